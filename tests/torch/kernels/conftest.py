"""Kernel tests run natively where there is a GPU, else in Triton's interpreter."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let the interpreter compute with values that are not finite, as a GPU does."""
    # NumPy, by which it computes, says each time that it divides by 0 or overflows.
    config.addinivalue_line(
        "filterwarnings", r"ignore::RuntimeWarning:triton\.runtime\.interpreter"
    )


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups be stood in for that are too small for it."""
    from gradscale.torch.kernels import torch_fused_adam as standing_in

    monkeypatch.setattr(standing_in, "FEW", 0)
