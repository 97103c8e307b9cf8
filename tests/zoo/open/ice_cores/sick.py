"""Date ice cores. The forward pass moved into a helper when the loop was cleaned up."""

import torch
import torch.nn as nn


class Dating(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)
        )

    def forward(self, x):
        return self.net(x)


def predict(model, x):
    return model(x)


def main(steps=90):
    torch.manual_seed(13)
    model = Dating()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(steps):
        x = torch.randn(20, 9)
        age = x[:, :3].sum(1, keepdim=True).sin()
        pred = predict(model, x)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(pred, age)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 30 == 0:
            print(step, round(loss.item(), 4))


if __name__ == "__main__":
    main()
