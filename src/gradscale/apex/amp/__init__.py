"""apex.amp: automatic mixed precision by opt_level."""

from typing import Any

from gradscale.apex.amp._amp_state import _amp_state, master_params
from gradscale.apex.amp.amp import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from gradscale.apex.amp.frontend import initialize, load_state_dict, state_dict
from gradscale.apex.amp.handle import disable_casts, scale_loss

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]


def __getattr__(name: str) -> Any:
    # The outcome of the last backward pass; a module has no properties.
    if name == "last":
        return _amp_state.last
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
