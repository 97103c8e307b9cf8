"""Random orders of the scaler's calls, against the gradients that were asked for.

And against torch's scaler: the same scales, and no refusal where torch has none.

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

    Args:
        rnd: Chooses the optimizer.
        kinds: To choose from.

    Attributes:
        raw: The sum of the gradients before scaling since they were cleared; None if
            there are none.
        used: A step has used them.
    """

    def __init__(self, rnd: random.Random, kinds: list[Callable[..., Any]]) -> None:
        self.param = parameter(2)
        self.optimizer = rnd.choice(kinds)([self.param], lr=1.0)
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

    kinds = KINDS
    refusals: tuple[type[Exception], ...] = REFUSALS

    def _new_scaler(self) -> Any:
        return GradScaler("cpu", init_scale=16.0, growth_interval=1, model=self._model)

    def __init__(self, seed: int) -> None:
        self._rnd = rnd = random.Random(seed)
        self._sides = [Side(rnd, self.kinds), Side(rnd, self.kinds)]
        # Named: a search for the model takes longer than all the rest.
        self._model = torch.nn.ParameterList(one.param for one in self._sides)
        self._scaler = self._new_scaler()
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
            except self.refusals as error:
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


class DropIn(Program):
    """The same calls on torch's scaler, or on gradscale's in its place.

    Args:
        seed: Decides on everything.
        make: The class of the scaler.
    """

    # All but gradscale's own.
    kinds = KINDS[:-1]
    # Torch's, for a fused optimizer without a gradient at `unscale_`, and after that.
    refusals = (*REFUSALS, AttributeError, TypeError)

    def __init__(self, seed: int, make: Callable[..., Any]) -> None:
        self._make = make
        super().__init__(seed)

    def _new_scaler(self) -> Any:
        return self._make("cpu", init_scale=16.0, growth_interval=1)

    def outcomes(self) -> list[float | str]:
        """Return the scale after each call, or that the call was refused."""
        self._backward_of(self._sides, 0.0)
        seen: list[float | str] = []
        for _ in range(self._rnd.randrange(6, 25)):
            self._call()
            refused = self.calls[-1].endswith("(refused)")
            seen.append("refused" if refused else self._scaler.get_scale())
        return seen

    def _clip(self, side: Side) -> str:
        torch.nn.utils.clip_grad_norm_([side.param], 2.0**30)
        return ""


def difference_from_torch(seed: int) -> str:
    """Return the first call that is refused, or moves the scale, unlike in torch.

    Once torch refuses a call that gradscale accepts, the two go apart.
    """
    ours = DropIn(seed, GradScaler)
    torchs = DropIn(seed, torch.amp.GradScaler).outcomes()
    for place, (theirs, own) in enumerate(zip(torchs, ours.outcomes(), strict=True)):
        if theirs != own:
            calls = ", ".join(ours.calls[: place + 1])
            return "" if theirs == "refused" else f"{own}, not {theirs}: {calls}"
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
    found = dict.fromkeys((wrong_step, difference_from_torch), 0)
    for seed in seeds:
        for check in found:
            if text := check(seed):
                found[check] += 1
                print(f"seed {seed}: {text}", flush=True)
    wrong, different = found.values()
    print(f"{wrong} of {given.count} orders go wrong silently, {different} differ")
    return 1 if wrong or different else 0


if __name__ == "__main__":
    sys.exit(main())
