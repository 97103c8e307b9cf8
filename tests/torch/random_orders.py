"""Random orders of the scaler's calls, against the gradients that were asked for.

`python -m tests.torch.random_orders --first 0 --count 3000` runs many of them.
"""

import argparse
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gradscale import GradscaleWarning
from gradscale.torch import GradScaler, optim
from tests.torch.training import parameter, planted

KINDS: list[Callable[..., Any]] = [
    torch.optim.SGD,
    lambda params, lr: torch.optim.SGD(params, lr=lr, foreach=True),
    lambda params, lr: torch.optim.SGD(params, lr=lr, fused=True),
    optim.SGD,
]
# Codes that tell that a step will be wrong.
TOLD = {"GS104"}
REFUSALS = (RuntimeError, ValueError, AssertionError)


class Side:
    """An optimizer with one parameter, and what its steps should do.

    Attributes:
        raw: The sum of the gradients before scaling since they were cleared; None if
            there are none.
        used: A step has used them.
    """

    def __init__(self, rnd: random.Random) -> None:
        self.param = parameter(2)
        self.optimizer = rnd.choice(KINDS)([self.param], lr=1.0)
        self.raw: float | None = None
        self.used = False

    def clear(self, *, to_none: bool) -> None:
        """Zero the gradient."""
        self.optimizer.zero_grad(set_to_none=to_none)
        self.raw = None if to_none or self.raw is None else 0.0
        self.used = False


class Program:
    """Calls in random order on one scaler, whose scale moves with every update.

    Args:
        seed: Decides on everything.
    """

    def __init__(self, seed: int) -> None:
        self._rnd = rnd = random.Random(seed)
        self._sides = [Side(rnd), Side(rnd)]
        # Named: a search for the model takes longer than all the rest.
        self._model = torch.nn.ParameterList(one.param for one in self._sides)
        self._scaler = GradScaler(
            "cpu", init_scale=16.0, growth_interval=1, model=self._model
        )
        self.calls: list[str] = []
        self.told = False

    def run(self) -> str:
        """Return the first wrong step of which nothing was said; empty if none."""
        # The scaler learns which parameters there are before the first update.
        self._backward_of(self._sides, 0.0)
        for _ in range(self._rnd.randrange(6, 25)):
            wrong = self._call()
            if self.told:
                return ""
            if wrong:
                return f"{wrong} after {', '.join(self.calls)}"
        return ""

    def _call(self) -> str:
        names = ["backward"] * 5 + ["unscale_", "step", "step", "update", "update"]
        name = self._rnd.choice([*names, "set_scale", "clip", "zero_grad", "zero_grad"])
        place = self._rnd.randrange(2)
        side = self._sides[place]
        self.calls.append(f"{name} {place}")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                wrong = getattr(self, f"_{name.rstrip('_')}")(side)
            except REFUSALS as error:
                self.calls[-1] += " (refused)"
                self.told = getattr(error, "code", "") in TOLD
                wrong = ""
        codes = [
            w.message.code for w in said if isinstance(w.message, GradscaleWarning)
        ]
        self.told = self.told or not TOLD.isdisjoint(codes)
        return wrong

    def _backward(self, side: Side) -> str:
        chosen = self._rnd.choice([[side], [side], self._sides])
        value = self._rnd.choice([0.5, 1.0, -0.25])
        self.calls[-1] = f"backward {[self._sides.index(one) for one in chosen]}"
        for one in chosen:
            if one.used:
                # As in a loop: without it, backward adds to used gradients.
                one.clear(to_none=self._rnd.random() < 0.5)
                self.calls[-1] = f"zero_grad, {self.calls[-1]}"
        self._backward_of(chosen, value)
        return ""

    def _backward_of(self, chosen: list[Side], value: float) -> None:
        loss = torch.stack([planted(one.param, value) for one in chosen]).sum()
        self._scaler.scale(loss).backward()
        for one in chosen:
            one.raw = value + (one.raw or 0.0)

    def _unscale(self, side: Side) -> str:
        self._scaler.unscale_(side.optimizer)
        return ""

    def _clip(self, side: Side) -> str:
        self._scaler.clip_grad_norm_(side.optimizer, 2.0**30)
        return ""

    def _step(self, side: Side) -> str:
        before = side.param.detach().clone()
        self._scaler.step(side.optimizer)
        moved = (before - side.param.detach()).tolist()
        side.used = True
        expected = [side.raw or 0.0] * 2
        return "" if moved == expected else f"moved by {moved}, not {expected}"

    def _update(self, side: Side) -> str:
        self._scaler.update()
        return ""

    def _set_scale(self, side: Side) -> str:
        self._scaler.update(self._rnd.choice([4.0, 64.0]))
        return ""

    def _zero_grad(self, side: Side) -> str:
        side.clear(to_none=self._rnd.random() < 0.5)
        return ""


def wrong_step(seed: int) -> str:
    """Return the wrong step of this program of which nothing was said, or nothing."""
    return Program(seed).run()


def main() -> int:
    """Run the orders of many seeds; print those that go wrong silently."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--count", type=int, default=3000, help="programs (3000)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(given.first, given.first + given.count)
    found = [(seed, text) for seed in seeds if (text := wrong_step(seed))]
    for seed, text in found:
        print(f"seed {seed}: {text}")
    print(f"{len(found)} of {given.count} orders go wrong silently")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
