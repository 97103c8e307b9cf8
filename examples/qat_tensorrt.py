"""Quantisation-aware training for TensorRT, in float16 with loss scaling.

A small convolutional net is trained in float32, quantised to simulated INT8 by NVIDIA's
Model Optimizer, trained further under float16 autocast with gradscale's scaler,
exported to ONNX with QuantizeLinear and DequantizeLinear nodes, and checked in ONNX
Runtime. A copy is trained further in float32 on the same images, to compare. Two
batches overflow on purpose: their steps are skipped, and the ranges of the quantizers
stay. The exit code is 1 if a check fails.

  make example-qat                                       builds .venv-qat and runs this
  .venv-qat/bin/python examples/qat_tensorrt.py -o net.onnx
  .venv-qat/bin/python examples/qat_tensorrt.py --json   the figures for a program
"""

import argparse
import copy
import json
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

import modelopt.torch.quantization as mtq
import onnx
import onnxruntime
import torch
from modelopt.torch.quantization.nn import TensorQuantizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradscale.torch import GradScaler

CLASSES, SIDE, BATCH = 10, 12, 64
NOISE = 1.6
STEPS, QAT_STEPS = 100, 150
# In levels: four times the spacing of float32 at 127.
BORDER = 3e-5
Precision = Literal["fp32", "fp16", "fp16 without scaling"]


class Images:
    """Ten fixed patterns, shifted by up to a pixel and covered with noise.

    Args:
        seed: Of patterns, shifts and noise.
    """

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        coarse = torch.randn(CLASSES, 1, 4, 4, generator=self._random)
        patterns = nn.functional.interpolate(coarse, size=SIDE, mode="bilinear")
        shifts = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
        self._shifted = torch.stack([patterns.roll(by, dims=(2, 3)) for by in shifts])

    def skip_to(self, seed: int) -> None:
        """Continue with other shifts and noise on the same patterns."""
        self._random.manual_seed(seed)

    def batch(self, size: int = BATCH) -> tuple[Tensor, Tensor]:
        """Return f32[size, 1, 12, 12] and i64[size]."""
        labels = torch.randint(CLASSES, (size,), generator=self._random)
        shifts = torch.randint(len(self._shifted), (size,), generator=self._random)
        images = self._shifted[shifts, labels]
        noise = torch.randn(images.shape, generator=self._random)
        return images + NOISE * noise, labels


def made(seed: int) -> nn.Module:
    """Return the net."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (SIDE // 4) ** 2, CLASSES),
    )


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], half: bool) -> Tensor:
    """Return f32[], with the layers in float16 or float32."""
    images, labels = batch
    with torch.autocast("cpu", torch.float16, enabled=half):
        logits = model(images)
    return cross_entropy(logits.float(), labels)


def train(
    model: nn.Module,
    images: Images,
    steps: int,
    precision: Precision,
    *,
    rate: float = 0.05,
    loss_weight: float = 1.0,
) -> GradScaler:
    """Train in place; return the scaler, which is disabled without scaling.

    Args:
        model: The model.
        images: Gives the batches.
        steps: Their number.
        precision: Of the layers.
        rate: The learning rate.
        loss_weight: Multiplies the loss; the rate is divided by it.
    """
    optimizer = torch.optim.SGD(model.parameters(), rate / loss_weight, momentum=0.9)
    scaler = GradScaler(
        "cpu", enabled=precision == "fp16", model=model, guard_buffers=True
    )
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, images.batch(), precision != "fp32")
        scaler.scale(loss_weight * loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


@torch.no_grad()
def accuracy(model: nn.Module, seed: int) -> float:
    """Return the share of 4096 new images whose class is found, in float32."""
    images = Images(seed)
    images.skip_to(seed + 1000)
    model.eval()
    found = [
        (model(data).argmax(1) == labels).float().mean()
        for data, labels in (images.batch() for _ in range(64))
    ]
    return float(torch.stack(found).mean())


def quantized(model: nn.Module, images: Images) -> nn.Module:
    """Return a copy with INT8 quantizers, calibrated on 8 batches."""

    def calibrate(model: nn.Module) -> None:
        for _ in range(8):
            model(images.batch()[0])

    # `quantize` prints the number of quantizers.
    return mtq.quantize(copy.deepcopy(model), mtq.INT8_DEFAULT_CFG, calibrate)


def lost_gradients(
    model: nn.Module, images: Images, loss_weight: float, scale: float
) -> float:
    """Return the share of gradient elements that are 0 in float16 and not in float32.

    Args:
        model: The model; unchanged.
        images: Gives one batch.
        loss_weight: Multiplies the loss.
        scale: The scale; 1 for none.
    """
    batch, grads = images.batch(), []
    for half in (False, True):
        probe = copy.deepcopy(model).train()
        (
            loss_of(probe, batch, half) * loss_weight * (scale if half else 1.0)
        ).backward()
        grads.append(torch.cat([p.grad.flatten() for p in probe.parameters()]))
    wide, narrow = grads
    return float(((narrow == 0) & (wide != 0)).sum() / (wide != 0).sum())


def overflows_change_nothing(model: nn.Module, images: Images) -> bool:
    """Take two steps on batches that overflow; return whether all values stay.

    A NaN in the images, and a loss so large that float16 gradients are infinite.
    """
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = GradScaler("cpu", model=model, guard_buffers=True)
    model.train()
    for poison, weight in ((math.nan, 1.0), (0.0, 1e8)):
        data, labels = images.batch()
        data[0, 0, 0, 0] += poison
        optimizer.zero_grad()
        loss = weight * loss_of(model, (data, labels), half=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last is not None
        if scaler.last.applied:
            return False
    after = model.state_dict()
    return all(torch.equal(before[name], after[name]) for name in before)


def exported(model: nn.Module, path: Path) -> dict[str, int]:
    """Write an ONNX file; return how many nodes it has of each quantising kind."""
    example = torch.zeros(1, 1, SIDE, SIDE)
    with warnings.catch_warnings():
        # The exporter that writes Q/DQ pairs is the older one.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            (example,),
            str(path),
            dynamo=False,
            opset_version=19,
            input_names=["images"],
            output_names=["logits"],
            dynamic_axes={"images": {0: "batch"}, "logits": {0: "batch"}},
        )
    nodes = [node.op_type for node in onnx.load(str(path)).graph.node]
    return {kind: nodes.count(kind) for kind in ("QuantizeLinear", "DequantizeLinear")}


@torch.no_grad()
def onnx_figures(path: Path, model: nn.Module, images: Images) -> dict[str, float]:
    """Return how far ONNX Runtime is from the model on 1000 images.

    Without optimisation the Q/DQ pairs are computed as they stand; with it they become
    INT8 kernels.

    Returns:
        The largest difference of a logit on all images; on those with no activation at
        a rounding border, where the two may round to different integers; how many have
        one; and the share of images with the same class from INT8 kernels.
    """
    data, _ = images.batch(1000)
    expected, border = outputs_and_borders(model.eval(), data)
    level = onnxruntime.GraphOptimizationLevel
    outputs = {}
    for name, optimisation in (
        ("plain", level.ORT_DISABLE_ALL),
        ("int8", level.ORT_ENABLE_ALL),
    ):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = optimisation
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        (logits,) = session.run(None, {"images": data.numpy()})
        outputs[name] = torch.from_numpy(logits)
    same = outputs["int8"].argmax(1) == expected.argmax(1)
    difference = (outputs["plain"] - expected).abs().amax(1)
    return {
        "largest_difference": float(difference.max()),
        "difference": float(difference[~border].max()),
        "images_at_a_border": int(border.sum()),
        "same_class": float(same.float().mean()),
    }


def outputs_and_borders(model: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs, and bool[images]: an activation is at a rounding border.

    The model multiplies by 127 / amax and ONNX divides by amax / 127: where the result
    is half an integer, up to a rounding error, they may differ by a whole level.
    """
    near = torch.zeros(len(data), dtype=torch.bool)

    def look(quantizer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        levels = inputs[0] * (127.0 / quantizer.amax)
        distance = (levels.remainder(1.0) - 0.5).abs()
        hit = (distance < BORDER) & (levels.abs() < 127.5)
        near.logical_or_(hit.flatten(1).any(1))

    hooks = [
        module.register_forward_pre_hook(look)
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer)
        and module.is_enabled
        and name.endswith("input_quantizer")
    ]
    outputs = model(data)
    for hook in hooks:
        hook.remove()
    return outputs, near


def run(path: Path, seed: int) -> dict[str, Any]:
    """Train, quantise, train further, export and check; return the figures."""
    images = Images(seed)
    model = made(seed)
    train(model, images, STEPS, "fp32")
    found: dict[str, Any] = {"fp32": accuracy(model, seed)}
    model = quantized(model, images)
    found["int8_calibrated"] = accuracy(model, seed)
    wide, same_images = copy.deepcopy(model), copy.deepcopy(images)
    train(wide, same_images, QAT_STEPS, "fp32")
    found["int8_trained_fp32"] = accuracy(wide, seed)
    scaler = train(model, images, QAT_STEPS, "fp16")
    found |= {
        "int8_trained_fp16": accuracy(model, seed),
        "scale": scaler.get_scale(),
        "skipped": scaler.skipped_steps,
        "overflows_change_nothing": overflows_change_nothing(model, images),
        **exported(model, path),
        **onnx_figures(path, model, images),
    }
    return found


def failures(found: dict[str, Any]) -> list[str]:
    """Return the checks that failed, as sentences."""
    checks = {
        "ONNX Runtime differs by more than 1e-4": found["difference"] <= 1e-4,
        "INT8 kernels give another class in over 1 %": found["same_class"] >= 0.99,
        "an overflow changed a value": found["overflows_change_nothing"],
        "a Q/DQ pair is missing": found["QuantizeLinear"] >= 6
        and found["DequantizeLinear"] >= 6,
        "float16 is less accurate than float32": found["int8_trained_fp16"]
        >= found["int8_trained_fp32"] - 0.01,
    }
    return [text for text, holds in checks.items() if not holds]


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="the ONNX file to keep")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="figures for a program")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.output or Path(folder) / "net.onnx"
        found = run(path, options.seed)
    failed = failures(found)
    if options.json:
        print(json.dumps({**found, "failed": failed}))
    else:
        for name, value in found.items():
            print(f"{name:26} {value}")
        print("\n".join(f"FAILED: {text}." for text in failed) or "All checks passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
