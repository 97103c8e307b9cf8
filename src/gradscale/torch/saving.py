"""From the scaler's tensors to a checkpoint and back."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from gradscale.core.checkpoint import Saved, pack
from gradscale.core.policies import DynamicScale
from gradscale.torch.ledger import Ledger

if TYPE_CHECKING:
    from gradscale.torch.scaler import GradScaler


@dataclass
class Resumed:
    """What was loaded and waits for the ledger, which is made with the first loss."""

    debt: int = 0
    floor_steps: int = 0
    calibrated: bool = False
    grown: bool = False
    tallies: tuple[tuple[int, int], ...] = ()

    def enter(self, ledger: Ledger) -> None:
        """Write all of it into the ledger."""
        ledger.debt.fill_(self.debt)
        ledger.floor_steps.fill_(float(self.floor_steps))
        ledger.calibrated.fill_(float(self.calibrated))
        ledger.grown.fill_(float(self.grown))
        applied, skipped = self.tallies[0] if self.tallies else (0, 0)
        for place, count in enumerate((applied + skipped, applied, skipped)):
            ledger.total.tally[place].fill_(count)

    def next_tally(self, known: int) -> tuple[int, int]:
        """Return the counts of the optimizer that comes after `known` others."""
        own = self.tallies[1:]
        return own[known] if known < len(own) else (0, 0)


def bounds_around(init_scale: Any) -> dict[str, float]:
    """Return bounds that hold `init_scale`.

    Torch knows no bounds, so a scale beyond the default ones is a choice to honour.
    """
    if isinstance(init_scale, bool) or not isinstance(init_scale, Real):
        return {}
    if not 0.0 < init_scale < math.inf:
        return {}
    default = DynamicScale()
    return {
        "min_scale": min(default.min_scale, init_scale),
        "max_scale": max(default.max_scale, init_scale),
    }


def saved_of(scaler: "GradScaler") -> Saved:
    """Return all that a checkpoint holds, on the host. Syncs."""
    ledger, resumed = scaler._ledger, scaler._resumed
    facts: dict[str, Any] = {
        "policy": scaler._policy,
        "scale": scaler.get_scale(),
        "finite_steps": scaler._get_growth_tracker(),
    }
    if ledger is None:
        return Saved(**facts, **vars(resumed))
    accounts = [ledger.total, *scaler._accounts.values()]
    tallies = [tuple(account.tally[1:].tolist()) for account in accounts]
    # Optimizers of an earlier run that have not come back yet keep their counts.
    tallies += resumed.tallies[len(tallies) :]
    return Saved(
        **facts,
        debt=int(ledger.debt.item()),
        floor_steps=int(ledger.floor_steps.item()),
        calibrated=bool(ledger.calibrated.item()),
        grown=bool(ledger.grown.item()),
        tallies=tuple(tallies),
    )


def pack_scaler(scaler: "GradScaler") -> dict[str, Any]:
    """Return the scaler's checkpoint."""
    return pack(saved_of(scaler))


def _resumed(saved: Saved) -> Resumed:
    return Resumed(
        saved.debt, saved.floor_steps, saved.calibrated, saved.grown, saved.tallies
    )


def load_into(scaler: "GradScaler", saved: Saved) -> None:
    """Take over a checkpoint that has been checked."""
    scaler._policy = saved.policy
    scaler._init_scale = saved.scale
    scaler._init_growth_tracker = saved.finite_steps
    scaler._resumed = _resumed(saved)
    if scaler._scale is None or scaler._growth_tracker is None:
        return
    # In place: a captured graph holds these very tensors.
    scaler._scale.fill_(saved.scale)
    scaler._growth_tracker.fill_(saved.finite_steps)
    if scaler._ledger is not None:
        scaler._resumed.enter(scaler._ledger)
        for place, account in enumerate(scaler._accounts.values()):
            applied, skipped = scaler._resumed.next_tally(place)
            counts = (applied + skipped, applied, skipped)
            for field, count in enumerate(counts):
                account.tally[field].fill_(count)


def frozen(scaler: "GradScaler") -> dict[str, Any]:
    """Return what pickle keeps: settings and state, no tensors, not the model."""
    kept = dict(scaler.__dict__)
    if scaler._enabled:
        saved = saved_of(scaler)
        kept["_init_scale"] = saved.scale
        kept["_init_growth_tracker"] = saved.finite_steps
        kept["_resumed"] = _resumed(saved)
    kept["_scale"] = kept["_growth_tracker"] = kept["_model"] = None
    for name in ("_ledger", "_accounts", "_open", "_settled", "_params_clip"):
        del kept[name]
    for name in ("_mailbox", "_watchman"):
        del kept[name]
    return kept
