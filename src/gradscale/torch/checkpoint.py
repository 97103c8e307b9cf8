"""The scaler's checkpoint: state_dict, load_state_dict, pickle."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradscale.core.checkpoint import AnyPolicy, Saved, SavedLoss, pack
from gradscale.core.policies import HIGHEST_SCALE, LOWEST_SCALE, DynamicScale
from gradscale.errors import ConfigError
from gradscale.torch.device_state.layout import DeviceState
from gradscale.torch.precision.losses import LossScales

if TYPE_CHECKING:
    from gradscale.torch.scaler import GradScaler


# Attributes that are neither copied nor pickled, but created anew.
SHORT_LIVED = (
    "_state",
    "_entries",
    "_iteration",
    "_warn",
    "_ranks",
    "_monitor",
    "_disabled_steps",
    "_loss_scales",
    "_buffers",
    "_float16",
)
SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


@dataclass
class Resumed:
    """Loaded values, kept until the first loss creates the device state."""

    debt: int = 0
    floor_steps: int = 0
    calibrated: bool = False
    grown: bool = False
    tallies: tuple[tuple[int, int], ...] = ()
    losses: tuple[SavedLoss, ...] = ()

    def enter(self, state: DeviceState) -> None:
        """Write the values into the device state."""
        state.debt.fill_(self.debt)
        state.fields.floor_steps.fill_(float(self.floor_steps))
        state.fields.uncalibrated.fill_(float(not self.calibrated))
        state.fields.grown.fill_(float(self.grown))
        state.total.set_counts(*self.total())

    def total(self) -> tuple[int, int]:
        """Return the counts of the whole run."""
        return self.tallies[0] if self.tallies else (0, 0)

    def each(self) -> tuple[tuple[int, int], ...]:
        """Return the counts of each optimizer, in order."""
        return self.tallies[1:]


def chosen(policy: AnyPolicy | None, moves: tuple[Any, Any, Any, Any]) -> AnyPolicy:
    """Return the policy that the constructor's arguments specify.

    Args:
        policy: The policy, if one was given.
        moves: Torch's four settings. Torch has no bounds, so the default bounds are
            widened to include the initial scale.
    """
    default = DynamicScale()
    settings = dict(zip(SETTINGS, moves, strict=True))
    if policy is not None:
        if any(getattr(default, name) != value for name, value in settings.items()):
            raise ConfigError(
                f"Both policy={policy!r} and {settings} were given. Two sets of "
                "settings cannot both be used. Put the settings into the policy, or "
                "leave the policy out.",
                code="GS101",
            )
        if not isinstance(policy, AnyPolicy):
            raise ConfigError(
                f"policy={policy!r} is a {type(policy).__name__}. The scaler needs "
                "settings and a rule. Pass DynamicScale(), StaticScale(scale=...) or "
                "NoScale().",
                code="GS101",
            )
        return policy
    first = settings["init_scale"]
    if isinstance(first, (int, float)) and LOWEST_SCALE <= first <= HIGHEST_SCALE:
        settings["min_scale"] = min(default.min_scale, float(first))
        settings["max_scale"] = max(default.max_scale, float(first))
    return DynamicScale(**settings)


def saved_of(scaler: "GradScaler") -> Saved:
    """Return the values of a checkpoint, on the host. Syncs."""
    state, resumed = scaler._state, scaler._resumed
    facts: dict[str, Any] = {
        "policy": scaler._policy,
        "scale": scaler.get_scale(),
        "finite_steps": scaler._get_growth_tracker(),
    }
    if state is None:
        return Saved(**facts, **vars(resumed))
    totals = [state.total, *scaler._entries.totals().values()]
    tallies = [each.applied_and_skipped() for each in totals]
    # Optimizers of the resumed run that have not stepped yet keep their counts.
    tallies += resumed.tallies[len(tallies) :]
    return Saved(
        **facts,
        debt=int(state.debt.item()),
        floor_steps=int(state.fields.floor_steps.item()),
        calibrated=not state.fields.uncalibrated.item(),
        grown=bool(state.fields.grown.item()),
        tallies=tuple(tallies),
        losses=scaler._loss_scales.saved(),
    )


def pack_scaler(scaler: "GradScaler") -> dict[str, Any]:
    """Return the scaler's checkpoint."""
    return pack(saved_of(scaler))


def _resumed(saved: Saved) -> Resumed:
    return Resumed(
        saved.debt,
        saved.floor_steps,
        saved.calibrated,
        saved.grown,
        saved.tallies,
        saved.losses,
    )


def load_into(scaler: "GradScaler", saved: Saved) -> None:
    """Load a validated checkpoint into the scaler."""
    # Rows that are not judged yet belong to the run before the load.
    scaler._monitor.flush(scaler._state)
    scaler._policy = saved.policy
    scaler._init_scale = saved.scale
    scaler._init_growth_tracker = saved.finite_steps
    scaler._resumed = _resumed(saved)
    scaler._loaded = True
    scaler._loss_scales = LossScales(saved.losses)
    if scaler._scale is None or scaler._growth_tracker is None:
        return
    # In place: a captured graph holds these very tensors.
    scaler._scale.fill_(saved.scale)
    scaler._growth_tracker.fill_(saved.finite_steps)
    if scaler._state is not None:
        scaler._resumed.enter(scaler._state)
        scaler._monitor.meter.start(scaler._state.total.start)
        scaler._entries.start(scaler._state.debt.device, scaler._resumed.each())


def frozen(scaler: "GradScaler") -> dict[str, Any]:
    """Return the pickled attributes: settings and state, without tensors and model."""
    kept = dict(scaler.__dict__)
    if scaler._enabled:
        saved = saved_of(scaler)
        kept["_init_scale"] = saved.scale
        kept["_init_growth_tracker"] = saved.finite_steps
        kept["_resumed"] = _resumed(saved)
        kept["_loaded"] = scaler._loaded or scaler._state is not None
    kept["_scale"] = kept["_growth_tracker"] = kept["_model"] = None
    kept["_record"], kept["_sinks"] = None, ()
    for name in SHORT_LIVED:
        del kept[name]
    return kept
