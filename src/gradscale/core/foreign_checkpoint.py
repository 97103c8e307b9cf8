"""From the saved state of another scaler to a checkpoint that goes on as it would."""

from dataclasses import asdict
from typing import Any, Literal

from gradscale.core.checkpoint import KEY, TORCH_KEYS, Saved, built, pack, unpack
from gradscale.core.foreign_rules import READERS, Given
from gradscale.core.incumbent_fields import Fields
from gradscale.core.incumbents import (
    SOURCES,
    ambiguous,
    other_source,
    recognised,
    unknown,
)
from gradscale.core.policies import DynamicScale, StaticScale
from gradscale.errors import ConfigError

Source = Literal["torch", "apex", "deepspeed", "megatron", "fairseq", "flax", "jmp"]
SETTINGS = (
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "min_scale",
    "max_scale",
    "tolerance",
)


def import_state(
    saved: Any, *, source: Source | None = None, **settings: float
) -> dict[str, Any]:
    """Turn the saved state of another scaler into a checkpoint of this format.

    The scales that follow are those that the other scaler would have gone on with, as
    far as its rule can be said by `DynamicScale`; docs/policies.md has the exceptions.
    Nothing is changed.

    Args:
        saved: What torch, apex, DeepSpeed, Megatron-Core, fairseq, flax or jmp saved: a
            dict, the scaler itself, or a checkpoint that has it in one of the usual
            places. Values may be tensors or arrays of one element.
        source: Who saved it. Needed only where the keys do not tell.
        settings: What the state does not hold, by the names of `DynamicScale`, such as
            growth_interval. They win over what it does hold. What neither has is the
            other scaler's default.

    Returns:
        What `load_state_dict()` takes.

    Raises:
        StateError: Nobody is known to save such a value, or it cannot be gone on with.
        ConfigError: A source or a setting has no such name.

    >>> saved = {"loss_scaler0": {"loss_scale": 8192.0, "unskipped": 1990}}
    >>> state = import_state(saved)
    >>> state["scale"], state["growth_interval"], state["_growth_tracker"]
    (8192.0, 2000, 1990)
    """
    _check_names(source, settings)
    sources, values = recognised(saved)
    chosen = _chosen(saved, source, sources)
    fields = Fields(SOURCES[chosen], values)
    if chosen == "torch":
        return pack(_of_torch(fields, settings))
    found = READERS[chosen](fields, settings)
    if found.settings is None and settings:
        raise _never_moves(fields, settings)
    if found.settings is None:
        policy = built(StaticScale, {"scale": found.scale})
    else:
        arguments = {**found.settings, **settings, "init_scale": found.scale}
        policy = built(DynamicScale, arguments)
    state = Saved(
        policy,
        found.scale,
        finite_steps=found.finite_steps,
        debt=found.debt,
        calibrated=True,
    )
    # Read back: what could not be loaded is refused here.
    return pack(unpack(pack(state), policy))


def _check_names(source: str | None, settings: Given) -> None:
    if source is not None and source not in SOURCES:
        raise ConfigError(
            f"source={source!r} is not known. Every scaler saves in its own way. Pass "
            f"one of {', '.join(map(repr, SOURCES))}, or leave it out.",
            code="GS101",
        )
    wrong = [name for name in settings if name not in SETTINGS]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} is not a setting that can be given here. Nothing "
            f"would answer to it. Pass any of {', '.join(SETTINGS)}.",
            code="GS101",
        )


def _chosen(saved: Any, source: str | None, sources: tuple[str, ...]) -> str:
    if source is not None:
        if sources and source not in sources:
            raise other_source(source, sources)
        return source
    if not sources:
        raise unknown(saved)
    if len(sources) > 1:
        raise ambiguous(sources)
    return sources[0]


def _of_torch(fields: Fields, given: Given) -> Saved:
    state = dict(fields.values)
    for key in TORCH_KEYS:
        if key in state:
            whole = key in ("growth_interval", "_growth_tracker")
            state[key] = fields.whole(key) if whole else fields.number(key)
    # Torch has no bounds and no tolerance: they are those of the policy in use.
    moves = {name: given[name] for name in given if name in TORCH_KEYS}
    limits = {name: given[name] for name in given if name not in TORCH_KEYS}
    if "scale" in state:
        limits["init_scale"] = state["scale"]
    own = KEY in state
    in_use = DynamicScale() if own else built(DynamicScale, limits)
    saved = unpack({**state, **moves}, in_use)
    if given and not isinstance(saved.policy, DynamicScale):
        raise _never_moves(fields, given)
    if given and own:
        arguments = {**asdict(saved.policy), **limits}
        saved = saved._replace(policy=built(DynamicScale, arguments))
    return saved


def _never_moves(fields: Fields, given: Given) -> ConfigError:
    return ConfigError(
        f"{dict(given)} was given, but the state saved by {fields.source} is that of a "
        "fixed scale, which never moves. Leave the settings out.",
        code="GS101",
    )
