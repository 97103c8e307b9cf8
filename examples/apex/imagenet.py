"""Image classification as in apex's ImageNet example: O0 to O3, accuracy at the end.

Written for NVIDIA apex: `gradscale run --as-apex examples/apex/imagenet.py`.
"""

import argparse

import torch
from apex import amp
from torch import nn


def make_images(count, device):
    """Return noisy images of four kinds, each bright in another quarter."""
    labels = torch.randint(4, (count,))
    images = torch.randn(count, 1, 8, 8)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1.0
    return images.to(device), labels.to(device)


def make_network():
    """Return a small convolutional network with batch norm."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def main():
    """Train, and print the last loss and the accuracy on new images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--keep-batchnorm-fp32", default=None)
    parser.add_argument("--loss-scale", default=None)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels = make_images(512, args.device)
    model = make_network().to(args.device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4
    )
    criterion = nn.CrossEntropyLoss()
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    model.train()
    for step in range(args.steps):
        start = 32 * step % len(images)
        output = model(images[start : start + 32])
        loss = criterion(output, labels[start : start + 32])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    model.eval()
    images, labels = make_images(256, args.device)
    with torch.no_grad():
        output = model(images)
    accuracy = (output.argmax(1) == labels).float().mean().item()
    print(f"loss {criterion(output, labels).item():.4f} accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
