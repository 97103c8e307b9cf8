"""The scalers that are replaced: whose state a saved value is."""

from collections.abc import Mapping
from typing import Any

from gradscale.errors import StateError

# The names that `source` takes, and the same in words.
SOURCES = {
    "torch": "torch.amp.GradScaler",
    "apex": "NVIDIA apex",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-Core",
    "fairseq": "fairseq",
    "flax": "flax",
    "jmp": "jmp",
}
# Who may have written a value with these keys; the first row that fits counts.
SIGNS: tuple[tuple[tuple[str, ...], frozenset[str]], ...] = (
    (("megatron",), frozenset({"hysteresis_tracker"})),
    (("flax",), frozenset({"fin_steps"})),
    (("torch",), frozenset({"scale", "growth_interval"})),
    (("jmp",), frozenset({"loss_scale", "counter"})),
    (("apex",), frozenset({"loss_scaler0"})),
    (("apex",), frozenset({"loss_scale", "unskipped"})),
    (("apex",), frozenset({"_loss_scale", "_unskipped"})),
    (("fairseq",), frozenset({"loss_scale", "param_groups"})),
    (("fairseq",), frozenset({"loss_scale", "_last_overflow_iter"})),
    (("deepspeed",), frozenset({"cur_scale", "fp32_groups_flat"})),
    (("deepspeed",), frozenset({"cur_scale", "dynamic"})),
    # DeepSpeed took this optimizer over from apex, key for key, and changed its rule.
    (("apex", "deepspeed"), frozenset({"cur_scale", "dynamic_loss_scale"})),
    (("apex",), frozenset({"cur_scale", "last_overflow_iter"})),
)
# The keys under which a larger checkpoint keeps the state of the scaler.
HOLDERS = (
    "loss_scaler",
    "grad_scaler",
    "dynamic_scale",
    "last_optimizer_state",
    "optimizer_state_dict",
    "optimizer",
)


def recognised(saved: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return who may have saved a value, and the fields of the scaler in it.

    Args:
        saved: A dict, an object with attributes, or a larger checkpoint that has one
            of them in it. Nobody is returned for what fits nobody.

    >>> recognised({"optimizer": {"grad_scaler": {"hysteresis_tracker": 2}}})
    (('megatron',), {'hysteresis_tracker': 2})
    """
    fields = dict(saved) if isinstance(saved, Mapping) else _attributes(saved)
    for sources, signs in SIGNS:
        if signs <= fields.keys():
            return sources, fields
    for key in HOLDERS:
        if key in fields:
            sources, inner = recognised(fields[key])
            if sources:
                return sources, inner
    return (), fields


def _attributes(saved: Any) -> dict[str, Any]:
    return dict(getattr(saved, "__dict__", {}))


def foreign(saved: Any) -> StateError | None:
    """Return what to say to who loads another scaler's state as it is, if it is one."""
    sources, _ = recognised(saved)
    if not sources or sources == ("torch",):
        return None
    named = "" if len(sources) == 1 else f", source={sources[0]!r}"
    return StateError(
        f"The checkpoint was saved by {_in_words(sources)}. Its keys and its rule are "
        "not those of this scaler, so it cannot be loaded as it is. Write "
        f"scaler.load_state_dict(gradscale.import_state(saved{named})), where saved is "
        "what you passed.",
        code="GS304",
    )


def unknown(saved: Any) -> StateError:
    """Return what to say of a value that nobody is known to save."""
    keys = ", ".join(str(key) for key in list(recognised(saved)[1])[:8])
    return StateError(
        f"Nobody is known to save a {type(saved).__name__} "
        f"{f'with the keys {keys}' if keys else 'like this one'}. Guessing whose it is "
        "could start from another scale than the one that was saved. Pass the "
        "scaler's own state, whole, or name where it comes from with source=, one of "
        f"{', '.join(map(repr, SOURCES))}.",
        code="GS304",
    )


def ambiguous(sources: tuple[str, ...]) -> StateError:
    """Return what to say of a value that several may have saved."""
    listed = " or ".join(f"source={source!r}" for source in sources)
    return StateError(
        f"The state may have been saved by {_in_words(sources)}. Their keys are the "
        "same and their rules are not: a wrong guess would grow at another step. Pass "
        f"{listed}.",
        code="GS304",
    )


def other_source(source: str, sources: tuple[str, ...]) -> StateError:
    """Return what to say of a value that someone else must have saved."""
    return StateError(
        f"source={source!r} was given for a state saved by {_in_words(sources)}. Read "
        "by the wrong rule, it would go on differently. Leave source out, or pass the "
        "state that belongs to it.",
        code="GS304",
    )


def _in_words(sources: tuple[str, ...]) -> str:
    return " or ".join(SOURCES[source] for source in sources)
