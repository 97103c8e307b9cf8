"""`initialize`, the levels O0 to O3, and checkpoints of the scales."""

import os
from collections.abc import Iterable
from typing import Any, Literal

import torch

from gradscale.apex.amp import _initialize
from gradscale.apex.amp._amp_state import _amp_state
from gradscale.errors import AmpError, StateError
from gradscale.recording.recorder import Recorder

# Set by users of `gradscale run --as-apex`, whose script cannot pass the argument.
EXACT = "GRADSCALE_APEX_EXACT"


class Properties:
    """The settings of a level, overridden by those of the caller.

    >>> Properties("O2", {"loss_scale": "128.0"}).loss_scale
    128.0

    Attributes:
        options: All of them, by apex's names.
    """

    def __init__(self, level: str | None, changes: dict[str, Any]) -> None:
        self.options: dict[str, Any] = {"enabled": level is not None}
        self.options |= {"opt_level": level, **LEVELS[level or "O0"]}
        given = {name: value for name, value in changes.items() if value is not None}
        _check_changes(level, given)
        if "loss_scale" in given and given["loss_scale"] != "dynamic":
            given["loss_scale"] = float(given["loss_scale"])
        if "keep_batchnorm_fp32" in given:
            given["keep_batchnorm_fp32"] = _boolean(given["keep_batchnorm_fp32"])
        self.options |= given

    def __getattr__(self, name: str) -> Any:
        if name != "options" and name in self.options:
            return self.options[name]
        raise AttributeError(f"Properties has no attribute {name!r}")


LEVELS: dict[str, dict[str, Any]] = {
    "O0": {
        "cast_model_type": torch.float32,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": None,
        "master_weights": False,
        "loss_scale": 1.0,
    },
    "O1": {
        "cast_model_type": None,
        "patch_torch_functions": True,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": "dynamic",
    },
    "O2": {
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
    },
    "O3": {
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": False,
        "master_weights": False,
        "loss_scale": 1.0,
    },
}


def _boolean(value: Any) -> bool:
    known = {True: True, False: False, "True": True, "False": False}
    if not isinstance(value, (bool, str)) or value not in known:
        raise AmpError(
            f"keep_batchnorm_fp32={value!r} is neither True nor False. Pass one of "
            "them, or leave it out.",
            code="GS101",
        )
    return known[value]


def _check_changes(level: str | None, given: dict[str, Any]) -> None:
    cast = given.get("cast_model_type")
    if level == "O1":
        wrong: list[str] = [
            n for n in ("keep_batchnorm_fp32", "master_weights") if n in given
        ]
        if cast not in (None, False, torch.float32):
            wrong.append("cast_model_type")
        if wrong:
            raise AmpError(
                f"{wrong[0]}={given[wrong[0]]!r} was given with opt_level='O1', which "
                "casts around functions and leaves the weights in float32: there is "
                "nothing to keep and no master to make. Leave it out, or use "
                "opt_level='O2'.",
                code="GS101",
            )
    elif given.get("patch_torch_functions"):
        raise AmpError(
            f"patch_torch_functions=True was given with opt_level={level!r}. Only O1 "
            "casts around functions; with cast weights it would do so twice. Leave it "
            "out, or use opt_level='O1'.",
            code="GS101",
        )


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    exact: bool | None = None,
    record: str | os.PathLike[str] | Recorder | None = None,
    sinks: Iterable[Any] = (),
    guard: Literal["report", "raise"] = "report",
    check_data: bool = False,
) -> Any:
    """Prepare models and optimizers for a level; they are changed in place.

    The arguments up to `max_loss_scale` are apex's.

    >>> from gradscale.apex import amp
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = amp.initialize(
    ...     model, optimizer, opt_level="O2", verbosity=0
    ... )
    >>> model.weight.dtype, [p.dtype for p in amp.master_params(optimizer)]
    (torch.float16, [torch.float32, torch.float32])

    Args:
        models: The model, or a list, before any parallel wrapper.
        optimizers: The optimizer, or a list; None for inference.
        enabled: False turns every call of amp into a no-op.
        opt_level: "O0" (f32), "O1" (casts around functions), "O2" (half-precision
            weights, batch norm in f32, f32 masters) or "O3" (half precision).
        cast_model_type: The dtype of the weights; False for no cast.
        patch_torch_functions: Cast around functions; only with O1.
        keep_batchnorm_fp32: Batch norm stays in f32; True, False, "True" or "False".
        master_weights: The optimizers step f32 masters.
        loss_scale: "dynamic", or a fixed scale.
        cast_model_outputs: The dtype of the models' outputs.
        num_losses: How many scales; see `scale_loss`.
        verbosity: 0 prints nothing.
        min_loss_scale: The floor of a dynamic scale; None for 2^-24.
        max_loss_scale: Its ceiling.
        exact: Reproduce apex's defects: no floor, a fixed scale never skips, a delayed
            check is omitted, and an invalid checkpoint may be partly loaded. None to
            read the environment variable GRADSCALE_APEX_EXACT.
        record: The run file to write, one row a `scale_loss`; losses after the first
            get run.loss1.gs and so on. None for none.
        sinks: Receive the steps of loss 0; see `gradscale.sinks`.
        guard: "raise" raises `HopelessRun` once no scale can help.
        check_data: At O2, also keep writes through `.data` to half-precision weights,
            at the cost of reading weights and masters once more in each step. Without
            it such a write is overwritten; a sampled check reports it once.

    Returns:
        Models and optimizers as given; only the models without optimizers.
    """
    _amp_state.verbosity = verbosity
    many_models = isinstance(models, (list, tuple))
    many_optimizers = isinstance(optimizers, (list, tuple))
    if isinstance(enabled, str):
        raise AmpError(
            f"enabled={enabled!r} is a string. The third argument of initialize() "
            f"switches amp on or off. Pass opt_level={enabled!r} by name.",
            code="GS101",
        )
    if not enabled:
        _amp_state.opt_properties = Properties(None, {})
        return models if optimizers is None else (models, optimizers)
    if opt_level not in LEVELS:
        raise AmpError(
            f"opt_level={opt_level!r} is no level. Pass 'O0', 'O1', 'O2' or 'O3', with "
            "the letter O.",
            code="GS101",
        )
    properties = Properties(
        opt_level,
        {
            "cast_model_type": cast_model_type,
            "patch_torch_functions": patch_torch_functions,
            "keep_batchnorm_fp32": keep_batchnorm_fp32,
            "master_weights": master_weights,
            "loss_scale": loss_scale,
        },
    )
    _amp_state.exact = (
        os.environ.get(EXACT, "") not in ("", "0") if exact is None else exact
    )
    _amp_state.check_data = check_data
    _amp_state.last = None
    scalers = _initialize.make_scalers(
        properties.loss_scale,
        num_losses,
        min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
        exact=_amp_state.exact,
        record=record,
        sinks=tuple(sinks),
        guard=guard,
        quiet=verbosity == 0,
    )
    _initialize.initialize(
        list(models) if many_models else [models],
        []
        if optimizers is None
        else list(optimizers)
        if many_optimizers
        else [optimizers],
        properties,
        cast_model_outputs=cast_model_outputs,
    )
    _amp_state.opt_properties = properties
    _amp_state.loss_scalers = scalers
    shown = ", ".join(f"{name}={value}" for name, value in properties.options.items())
    _amp_state.print(f"amp: {shown}")
    return models if optimizers is None else (models, optimizers)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the scales in the format of apex's checkpoints.

    >>> from gradscale.apex import amp
    >>> _ = amp.initialize(torch.nn.Linear(1, 1), opt_level="O2", verbosity=0)
    >>> amp.state_dict()
    {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}

    Args:
        destination: The dict to fill; None for a new one.
    """
    destination = {} if destination is None else destination
    for number, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{number}"] = scaler.state_dict()
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load the scales of a checkpoint of apex or of gradscale.apex.

    If their number differs from that of the losses, a warning is issued: scales without
    an entry are kept, further entries ignored. Any other invalid entry is refused and
    nothing is changed; with `exact`, the entries before it are loaded.

    Args:
        state_dict: The result of either `state_dict`.
    """
    scalers = _amp_state.loss_scalers
    if not _amp_state.exact:
        for key, entry in state_dict.items():
            _check_entry(key, entry)
    found = sum(key.startswith("loss_scaler") for key in state_dict)
    if found != len(scalers):
        _amp_state.warn(
            f"The checkpoint has {found} loss scales, and there are {len(scalers)}. "
            "Scales without an entry stay as they are, further entries are left out. "
            "Pass the same num_losses to amp.initialize().",
            code="GS302",
        )
    for position, (key, entry) in enumerate(state_dict.items()):
        _check_entry(key, entry)
        number = int(key.removeprefix("loss_scaler") or position)
        if number < len(scalers):
            scalers[number]._loss_scale = entry["loss_scale"]
            scalers[number]._unskipped = entry["unskipped"]


def _check_entry(key: str, entry: Any) -> None:
    number = key.removeprefix("loss_scaler")
    known = key.startswith("loss_scaler") and number.isdecimal()
    if not known:
        raise StateError(
            f"The checkpoint has an entry {key!r}. Entries of amp are named "
            "loss_scaler0, loss_scaler1 and so on, so this is another state. Pass the "
            "dict that amp.state_dict() returned.",
            code="GS302",
        )
    usable = (
        isinstance(entry, dict)
        and isinstance(entry.get("loss_scale"), (int, float))
        and isinstance(entry.get("unskipped"), int)
        and 0.0 < entry["loss_scale"] < float("inf")
    )
    if not usable:
        raise StateError(
            f"{key} is {entry!r}. A scale is restored from a positive 'loss_scale' and "
            "a whole number 'unskipped'. Pass the dict that amp.state_dict() returned.",
            code="GS302",
        )
