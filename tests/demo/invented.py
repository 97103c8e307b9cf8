"""Comparisons made by hand."""

from gradscale.demo.comparison import Comparison
from gradscale.demo.settings import Settings
from gradscale.demo.training import Run

MOVING = (2.0**16, 2.0**17) * 50


def ended(name, loss, *, lost=0.0, scales=(), skipped=(), seed=0):
    return Run(
        name=name,
        seed=seed,
        losses=((0, 4.5), (100, loss)),
        scales=scales,
        skipped=skipped,
        lost_share=lost,
    )


def compared(*, bare=3.08, static=2.79, dynamic=2.81, skipped=(40,), scales=MOVING):
    return Comparison(
        settings=Settings(steps=100),
        parameters=1,
        frequency_loss=3.07,
        runs=(
            ended("FP32", 2.80),
            ended("BF16", 2.80),
            ended("FP16 bare", bare, lost=0.45),
            ended("FP16 static", static, scales=(2.0**12,) * 100),
            ended(
                "FP16 dynamic",
                dynamic,
                scales=scales,
                skipped=skipped,
            ),
        ),
        other_seeds=(ended("FP32", 2.85, seed=1),),
    )
