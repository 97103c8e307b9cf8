"""Cell images with a look at the saliency of the inputs now and then."""

import torch
from torch import nn

torch.manual_seed(101)


def cells(n):
    kind = torch.randint(0, 3, (n,))
    image = 1.2 * torch.randn(n, 1, 8, 8)
    for row, k in enumerate(kind.tolist()):
        image[row, 0, k * 2 : k * 2 + 3, k * 2 : k * 2 + 3] += 1.5
    return image, kind


net = nn.Sequential(
    nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 3)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu")
criterion = nn.CrossEntropyLoss()
held, held_kind = cells(32)


def saliency():
    """Where the network looks; in float32, without a scale."""
    net.eval()
    x = held.clone().requires_grad_()
    net(x).gather(1, held_kind[:, None]).sum().backward()
    # The backward above has left gradients in the weights too.
    net.zero_grad(set_to_none=True)
    net.train()
    return x.grad.abs().mean((0, 1))


for step in range(120):
    image, kind = cells(16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(net(image).float(), kind)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step % 15 == 0:
        seen = saliency()
        print(step, round(loss.item(), 4), "brightest", divmod(seen.argmax().item(), 8))
