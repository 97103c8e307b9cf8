"""No module anywhere: tensors in a dict, and an optimizer for each of them."""

import torch

torch.manual_seed(221)
sizes = {"read": (10, 24), "think": (24, 24), "write": (24, 3)}
theta = {
    name: (torch.randn(shape) / shape[0] ** 0.5).requires_grad_()
    for name, shape in sizes.items()
}
theta["shift"] = torch.zeros(3, requires_grad=True)
rates = {"read": 3e-3, "think": 1e-3, "write": 3e-3, "shift": 1e-2}
optimizers = {
    name: torch.optim.Adam([tensor], lr=rates[name]) for name, tensor in theta.items()
}
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)


def forward(x, t):
    h = torch.tanh(torch.einsum("bi,ij->bj", x, t["read"]))
    h = h + torch.tanh(torch.einsum("bi,ij->bj", h, t["think"]))
    return torch.einsum("bi,ij->bj", h, t["write"]) + t["shift"]


truth = torch.randn(10, 3)
for step in range(130):
    x = torch.randn(24, 10)
    target = (x @ truth).argmax(1)
    for tensor in theta.values():
        tensor.grad = None
    with torch.autocast("cpu", dtype=torch.float16):
        logits = forward(x, theta)
    loss = torch.nn.functional.cross_entropy(logits.float(), target)
    scaler.scale(loss).backward()
    for optimizer in optimizers.values():
        scaler.step(optimizer)
    scaler.update()
    if step % 26 == 0:
        print(step, round(loss.item(), 4))
print(round(loss.item(), 4))
