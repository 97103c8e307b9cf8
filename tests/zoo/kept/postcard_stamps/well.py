"""Sort scanned stamps into six countries. Standard AMP training script."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def make_split(n, prototypes, generator):
    y = torch.randint(0, 6, (n,), generator=generator)
    x = prototypes[y] + 0.8 * torch.randn(n, 1, 10, 10, generator=generator)
    return TensorDataset(x, y)


class SmallCNN(nn.Module):
    def __init__(self, num_classes=6):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
        )
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.classifier(self.dropout(self.features(x).flatten(1)))


def train_one_epoch(model, loader, optimizer, scheduler, scaler, device):
    model.train()
    total = 0.0
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type=device, dtype=torch.float16):
            logits = model(images)
            loss = F.cross_entropy(logits, targets, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        total += loss.item() * len(images)
    return total / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct = 0
    for images, targets in loader:
        with torch.autocast(device_type=device, dtype=torch.float16):
            logits = model(images.to(device))
        correct += (logits.argmax(1).cpu() == targets).sum().item()
    return correct / len(loader.dataset)


def main():
    torch.manual_seed(3)
    device = "cpu"
    generator = torch.Generator().manual_seed(1)
    prototypes = torch.randn(6, 1, 10, 10, generator=generator)
    train = DataLoader(make_split(320, prototypes, generator), 16, shuffle=True)
    test = DataLoader(make_split(96, prototypes, generator), 32)
    model = SmallCNN().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    epochs = 6
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=epochs * len(train)
    )
    scaler = torch.amp.GradScaler(device)
    best = 0.0
    for epoch in range(epochs):
        loss = train_one_epoch(model, train, optimizer, scheduler, scaler, device)
        accuracy = evaluate(model, test, device)
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), "best.pt")
        print(f"epoch {epoch} loss {loss:.3f} acc {accuracy:.3f}")


if __name__ == "__main__":
    main()
