"""Imports the saved state of another scaler as a checkpoint of this format."""

from dataclasses import asdict
from typing import Any, Literal

from gradscale.core.checkpoint import KEY, TORCH_KEYS, Saved, built, pack, unpack
from gradscale.core.foreign_rules import (
    READERS,
    SOURCES,
    Fields,
    Given,
    library_names,
    recognise,
)
from gradscale.core.policies import DynamicScale, StaticScale
from gradscale.errors import ConfigError, StateError

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
    """Convert the saved state of another scaler to a checkpoint of this format.

    Subsequent scales equal those of the other scaler as far as `DynamicScale` can
    express its rule; docs/policies.md lists the exceptions. `saved` is not changed.

    Args:
        saved: State saved by torch, apex, DeepSpeed, Megatron-Core, fairseq, flax or
            jmp: a dict, the scaler itself, or a checkpoint that contains it under one
            of the usual keys. Values may be tensors or arrays of one element.
        source: The library that saved it. Needed only if the keys are ambiguous.
        settings: Arguments of `DynamicScale` that the state does not contain, such as
            growth_interval. They override the state. Settings in neither are the
            other scaler's defaults.

    Returns:
        A dict for `load_state_dict()`.

    Raises:
        StateError: No known library saves such a value, or a field is missing or
            unusable.
        ConfigError: `source` or a setting is unknown.

    >>> saved = {"loss_scaler0": {"loss_scale": 8192.0, "unskipped": 1990}}
    >>> state = import_state(saved)
    >>> state["scale"], state["growth_interval"], state["_growth_tracker"]
    (8192.0, 2000, 1990)
    """
    _check_names(source, settings)
    sources, values = recognise(saved)
    chosen = _chosen(saved, source, sources)
    fields = Fields(SOURCES[chosen], values)
    if chosen == "torch":
        return pack(_of_torch(fields, settings))
    state = READERS[chosen](fields, settings)
    if state.settings is None and settings:
        raise _fixed_scale_error(fields, settings)
    if state.settings is None:
        policy = built(StaticScale, {"scale": state.scale})
    else:
        arguments = {**state.settings, **settings, "init_scale": state.scale}
        policy = built(DynamicScale, arguments)
    packed = pack(
        Saved(
            policy,
            state.scale,
            finite_steps=state.finite_steps,
            debt=state.debt,
            calibrated=True,
        )
    )
    # Read back: a state that cannot be loaded is refused here.
    return pack(unpack(packed, policy))


def _check_names(source: str | None, settings: Given) -> None:
    if source is not None and source not in SOURCES:
        raise ConfigError(
            f"source={source!r} is not known. Each library has its own format. Pass "
            f"one of {', '.join(map(repr, SOURCES))}, or omit the argument.",
            code="GS101",
        )
    wrong = [name for name in settings if name not in SETTINGS]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} is not a setting of import_state(). It would have no "
            f"effect. Pass any of {', '.join(SETTINGS)}.",
            code="GS101",
        )


def _chosen(saved: Any, source: str | None, sources: tuple[str, ...]) -> str:
    if source is not None:
        if sources and source not in sources:
            raise _source_error(source, sources)
        return source
    if not sources:
        raise _unknown_error(saved)
    if len(sources) > 1:
        raise _ambiguous_error(sources)
    return sources[0]


def _of_torch(fields: Fields, given: Given) -> Saved:
    state = dict(fields.values)
    for key in TORCH_KEYS:
        if key in state:
            whole = key in ("growth_interval", "_growth_tracker")
            state[key] = fields.whole(key) if whole else fields.number(key)
    # Torch has no bounds and no tolerance: the settings or defaults supply them.
    moves = {name: given[name] for name in given if name in TORCH_KEYS}
    limits = {name: given[name] for name in given if name not in TORCH_KEYS}
    if "scale" in state:
        limits["init_scale"] = state["scale"]
    own = KEY in state
    in_use = DynamicScale() if own else built(DynamicScale, limits)
    saved = unpack({**state, **moves}, in_use)
    if given and not isinstance(saved.policy, DynamicScale):
        raise _fixed_scale_error(fields, given)
    if given and own:
        arguments = {**asdict(saved.policy), **limits}
        saved = saved._replace(policy=built(DynamicScale, arguments))
    return saved


def _fixed_scale_error(fields: Fields, given: Given) -> ConfigError:
    return ConfigError(
        f"{dict(given)} was given, but the state saved by {fields.source} has a fixed "
        "scale, which never moves. Omit the settings.",
        code="GS101",
    )


def _unknown_error(saved: Any) -> StateError:
    keys = ", ".join(str(key) for key in list(recognise(saved)[1])[:8])
    return StateError(
        f"No known library saves a {type(saved).__name__} "
        f"{f'with the keys {keys}' if keys else 'like this one'}. A wrong guess could "
        "resume from a different scale than the saved one. Pass the complete state of "
        "the scaler, or name the library with source=, one of "
        f"{', '.join(map(repr, SOURCES))}.",
        code="GS304",
    )


def _ambiguous_error(sources: tuple[str, ...]) -> StateError:
    listed = " or ".join(f"source={source!r}" for source in sources)
    return StateError(
        f"The state may have been saved by {library_names(sources)}. Their keys are "
        "the same and their rules differ: a wrong guess would change the step of the "
        f"next growth. Pass {listed}.",
        code="GS304",
    )


def _source_error(source: str, sources: tuple[str, ...]) -> StateError:
    return StateError(
        f"source={source!r} was given for a state saved by {library_names(sources)}. "
        "Read by the wrong rule, the scale would move at other steps. Omit source, or "
        "pass a state of that library.",
        code="GS304",
    )
