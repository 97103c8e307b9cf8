"""Tell textures apart: a convolutional network, SGD and milestones."""

import json

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import MultiStepLR


def texture(kind):
    x = torch.arange(10.0)
    wave = torch.sin(x * (0.6 + 0.5 * kind))
    image = wave[:, None] if kind % 2 else wave[None, :]
    return image.expand(10, 10) + 1.3 * torch.randn(10, 10)


def dataset(n):
    kinds = torch.randint(4, (n,))
    return torch.stack([texture(int(k)) for k in kinds])[:, None], kinds


class TextureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2)
        self.fc = nn.Linear(12 * 9, 4)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        return self.fc(x.flatten(1))


torch.manual_seed(7)
images, kinds = dataset(256)
cnn = TextureNet()
sgd = optim.SGD(cnn.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
schedule = MultiStepLR(sgd, milestones=[6, 9, 11], gamma=10)
grad_scaler = torch.amp.GradScaler("cpu")
criterion = nn.CrossEntropyLoss()

record = []
for epoch in range(14):
    for batch in torch.randperm(256).split(16):
        sgd.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = cnn(images[batch])
        loss = criterion(output.float(), kinds[batch])
        grad_scaler.scale(loss).backward()
        grad_scaler.step(sgd)
        scale_before = grad_scaler.get_scale()
        grad_scaler.update()
        record.append((loss.item(), grad_scaler.get_scale() < scale_before))
    schedule.step()
    print(f"epoch {epoch}: loss {record[-1][0]:.3f}")

values = [value for value, _ in record]
final = sum(values[-8:]) / 8
print(
    json.dumps(
        {
            "first_loss": sum(values[:8]) / 8,
            "last_loss": final if final == final else "nan",
            "scale": grad_scaler.get_scale(),
            "taken": sum(not s for _, s in record),
            "skipped": sum(s for _, s in record),
        }
    )
)
