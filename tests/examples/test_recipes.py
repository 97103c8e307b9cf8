"""The recipes: GAN, gradient penalty, SAM, two towers, LBFGS."""

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_gan_finds_the_ring(capsys):
    assert 1.5 < example("gan").train(200) < 2.5
    assert "step 200: scales" in capsys.readouterr().out


def test_the_gradient_penalty_is_trained(capsys):
    loss, penalty = example("gradient_penalty").train(150)
    assert loss < 0.3
    assert penalty < 0.6
    assert "step 150" in capsys.readouterr().out


def test_sam_learns():
    assert example("sam").train(100) < 0.1


def test_no_batch_of_the_two_towers_is_lost(capsys):
    loss, applied = example("two_tower").train(100)
    assert applied == 100
    assert loss < 2.0
    # The first batches overflowed and were run again.
    assert "skipped 0/" not in capsys.readouterr().out


def test_lbfgs_solves_the_equation():
    assert example("pinn_lbfgs").train(12) < 1e-2
