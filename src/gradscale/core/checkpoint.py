"""The checkpoint format: torch's five keys and one that torch ignores."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

from gradscale.core.foreign_rules import foreign_state_error
from gradscale.core.policies import DynamicScale, NoScale, StaticScale
from gradscale.core.state import f32
from gradscale.errors import ConfigError, StateError

FORMAT = 1
KEY = "gradscale"
# Counts of the rule are i32 on the device and grow by one before they are compared.
LARGEST_COUNT = 2**31 - 2
# Those of a tally are i64.
LARGEST_TALLY = 2**62
TORCH_KEYS = (
    "scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "_growth_tracker",
)
POLICIES = {kind.__name__: kind for kind in (NoScale, StaticScale, DynamicScale)}
# A fixed scale in torch's format: both factors are one.
FIXED_SETTINGS = (1.0, 1.0, 2000)

AnyPolicy = NoScale | StaticScale | DynamicScale


class SavedLoss(NamedTuple):
    """The scale of one of several losses.

    Attributes:
        id: Its id, a whole number or a string.
        scale, finite_steps, debt: The fields of the policy's state, on the host.
    """

    id: int | str
    scale: float
    finite_steps: int = 0
    debt: int = 0


class Saved(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        policy: The policy the run used.
        scale, finite_steps, debt: The fields of its state, on the host.
        floor_steps: Steps in a row that were not finite at the lowest scale.
        calibrated: Some step was finite.
        grown: The last step raised the scale.
        tallies: (applied, skipped) for the run and then for each optimizer, in the
            order of their first use.
        losses: The scales of losses that have one of their own.
    """

    policy: AnyPolicy
    scale: float
    finite_steps: int = 0
    debt: int = 0
    floor_steps: int = 0
    calibrated: bool = False
    grown: bool = False
    tallies: tuple[tuple[int, int], ...] = ()
    losses: tuple[SavedLoss, ...] = ()


def pack(saved: Saved) -> dict[str, Any]:
    """Return `saved` as a plain dict that torch can also load.

    >>> packed = pack(Saved(policy=DynamicScale(), scale=65536.0))
    >>> packed["scale"], packed["growth_interval"], packed["gradscale"]["format"]
    (65536.0, 2000, 1)
    """
    policy = saved.policy
    growth, backoff, interval = torch_settings(policy)
    return {
        "scale": saved.scale,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "_growth_tracker": saved.finite_steps,
        KEY: {
            "format": FORMAT,
            "policy": {"kind": type(policy).__name__, **asdict(policy)},
            "debt": saved.debt,
            "floor_steps": saved.floor_steps,
            "calibrated": saved.calibrated,
            "grown": saved.grown,
            "tallies": [list(pair) for pair in saved.tallies],
            # Only where there are some: most checkpoints have none.
            **({"losses": list(map(list, saved.losses))} if saved.losses else {}),
        },
    }


def torch_settings(policy: AnyPolicy) -> tuple[float, float, int]:
    """Return the growth factor, back-off factor and growth interval of a policy."""
    if isinstance(policy, DynamicScale):
        return policy.growth_factor, policy.backoff_factor, policy.growth_interval
    return FIXED_SETTINGS


def unpack(state: Mapping[str, Any], policy: AnyPolicy) -> Saved:
    """Read a checkpoint of this format, or one written by `torch.amp.GradScaler`.

    Pure: if it raises, nothing was loaded.

    Args:
        state: A dict returned by `state_dict()`.
        policy: The policy in use. It supplies settings that the checkpoint lacks, such
            as the bounds in a checkpoint of torch.

    Raises:
        StateError: The checkpoint cannot be loaded.
    """
    foreign = foreign_state_error(state)
    if foreign is not None:
        raise foreign
    if not isinstance(state, Mapping):
        raise StateError(
            f"The checkpoint is a {type(state).__name__}, not a dict. It contains no "
            "scale. Load a dict returned by state_dict().",
            code="GS302",
        )
    if not state:
        raise StateError(
            "The checkpoint is an empty dict. A disabled scaler saves nothing, so "
            "there is no scale to resume from. Save from an enabled scaler, or do not "
            "load this checkpoint.",
            code="GS302",
            replaces="The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler.",
        )
    missing = [key for key in TORCH_KEYS if key not in state]
    if missing:
        raise StateError(
            f"The checkpoint lacks {', '.join(missing)}. Without it, the run would "
            "resume from a different state than the saved one. Load a dict returned by "
            "state_dict().",
            code="GS302",
        )
    extra = state.get(KEY)
    if extra is None:
        return _checked(state, _policy_of_torch(state, policy), {})
    if not isinstance(extra, Mapping) or not isinstance(extra.get("format"), int):
        raise _bad(KEY, extra, "a dict with a format number")
    if not 1 <= extra["format"] <= FORMAT:
        raise StateError(
            f"The checkpoint has format {extra['format']}. This version reads formats "
            f"up to {FORMAT} and would misread the rest. Install the version of "
            "gradscale that wrote it, or a newer one.",
            code="GS303",
        )
    settings = extra.get("policy")
    # A list, not a dict: the kind read from a file may not be hashable.
    if not isinstance(settings, Mapping) or settings.get("kind") not in list(POLICIES):
        raise _bad("policy", settings, f"one of {', '.join(POLICIES)}")
    arguments = {name: value for name, value in settings.items() if name != "kind"}
    if settings["kind"] == "DynamicScale":
        # The five keys take precedence: other tools edit those.
        arguments |= _moves_of_torch(state)
    kept = built(POLICIES[settings["kind"]], arguments)
    _check_whole(kept, arguments)
    return _checked(state, kept, extra)


def _check_whole(policy: AnyPolicy, arguments: Mapping[str, Any]) -> None:
    """Raise if a setting of the policy is missing."""
    missing = [f.name for f in fields(policy) if f.name not in arguments]
    if missing:
        # torch.distributed.checkpoint reads only the keys of the target state dict.
        raise StateError(
            f"The checkpoint lacks {', '.join(missing)} of its "
            f"{type(policy).__name__}. With defaults, the run would resume with a "
            "different rule than the saved one. Nothing was loaded; load into a scaler "
            f"with a {type(policy).__name__}, or save again from an intact run.",
            code="GS302",
        )


def _policy_of_torch(state: Mapping[str, Any], policy: AnyPolicy) -> AnyPolicy:
    growth, backoff, _ = moves = tuple(state[key] for key in TORCH_KEYS[1:4])
    if (growth, backoff) == FIXED_SETTINGS[:2] or (
        not isinstance(policy, DynamicScale) and moves == FIXED_SETTINGS
    ):
        scale = state["scale"]
        return (
            policy
            if isinstance(policy, NoScale)
            else built(StaticScale, {"scale": scale})
        )
    if not isinstance(policy, DynamicScale):
        policy = DynamicScale()
    bounds = {
        "min_scale": policy.min_scale,
        "max_scale": policy.max_scale,
        "tolerance": policy.tolerance,
    }
    scale = state["scale"]
    return built(
        DynamicScale, {"init_scale": scale, **bounds, **_moves_of_torch(state)}
    )


def _moves_of_torch(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in TORCH_KEYS[1:4]}


def built(kind: type[AnyPolicy], arguments: Mapping[str, Any]) -> AnyPolicy:
    """Return the policy that a checkpoint describes, or raise a StateError."""
    try:
        return kind(**arguments)
    except (ConfigError, TypeError) as error:
        # The last line: torch's message, if there is one, comes before it.
        reason = str(error).rpartition("\n")[2]
        raise StateError(
            f"The checkpoint describes a policy that cannot work: {reason}. Nothing "
            "was loaded. Save again from an intact run, or start without this "
            "checkpoint.",
            code="GS302",
        ) from error


def _checked(
    state: Mapping[str, Any], policy: AnyPolicy, extra: Mapping[str, Any]
) -> Saved:
    return Saved(
        policy=policy,
        scale=_scale("scale", state["scale"], policy),
        finite_steps=_small_count("_growth_tracker", state["_growth_tracker"]),
        debt=_small_count("debt", extra.get("debt", 0)),
        floor_steps=_small_count("floor_steps", extra.get("floor_steps", 0)),
        calibrated=_flag("calibrated", extra.get("calibrated", True)),
        grown=_flag("grown", extra.get("grown", False)),
        tallies=_tallies(extra.get("tallies", [])),
        losses=_losses(extra.get("losses", []), policy),
    )


def _scale(name: str, scale: Any, policy: AnyPolicy) -> float:
    low, high = policy.min_scale, policy.max_scale
    if not _is_number(scale) or not low <= f32(float(scale)) <= high:
        raise _bad(name, scale, f"a number in [{low:g}, {high:g}]")
    return f32(float(scale))


def _losses(value: Any, policy: AnyPolicy) -> tuple[SavedLoss, ...]:
    wanted = "a list of losses, each an id, a scale and two counts"
    if not isinstance(value, (list, tuple)):
        raise _bad("losses", value, wanted)
    losses = []
    for each in value:
        if not isinstance(each, (list, tuple)) or len(each) != 4:
            raise _bad("losses", value, wanted)
        id, scale, finite_steps, debt = each
        if isinstance(id, bool) or not isinstance(id, (int, str)):
            raise _bad("losses", value, wanted)
        losses.append(
            SavedLoss(
                id,
                _scale("losses", scale, policy),
                _small_count("losses", finite_steps),
                _small_count("losses", debt),
            )
        )
    if len({loss.id for loss in losses}) < len(losses):
        raise _bad("losses", value, "a list of losses with different ids")
    return tuple(losses)


def _tallies(value: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, (list, tuple)):
        raise _bad("tallies", value, "a list of pairs of counts")
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise _bad("tallies", value, "a list of pairs of counts")
    counts = tuple((_count("tallies", a), _count("tallies", b)) for a, b in value)
    if any(sum(pair) > LARGEST_TALLY for pair in counts):
        raise _bad("tallies", value, f"counts whose sum is up to {LARGEST_TALLY}")
    return counts


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, value, "True or False")
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise _bad(name, value, "a whole number, 0 or more")
    return int(value)


def _small_count(name: str, value: Any) -> int:
    count = _count(name, value)
    if count > LARGEST_COUNT:
        raise _bad(name, value, f"a count up to {LARGEST_COUNT}")
    return count


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _bad(name: str, value: Any, wanted: str) -> StateError:
    return StateError(
        f"The checkpoint has {name}={value!r}, which is not {wanted}. Resuming from it "
        "would corrupt the run. Nothing was loaded; repair the value, or start without "
        "this checkpoint. To widen the bounds, pass policy=DynamicScale(min_scale=..., "
        "max_scale=...).",
        code="GS302",
    )
