"""Casts the weights of a module, and the inputs and outputs of its forward pass."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradscale.errors import ConfigError

# A type of module, or a pattern for qualified names: "head", "blocks.*.norm".
Kept = type[torch.nn.Module] | str
DISTRIBUTED = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


class CastForward:
    """The forward pass of one module with casts around it.

    Takes the place of the module's `forward`, as an attribute of the instance, and
    refers to the module itself: copies and pickles of the module stay whole, its class
    and the names of its parameters do not change, and `torch.compile` traces it.

    Attributes:
        module: The module.
        inputs: Floating tensors among the arguments are cast to this dtype; None to
            leave them.
        autocast: The dtype of `torch.autocast` around the forward pass; False to turn
            an outer one off; None to leave it.
        outputs: Floating tensors in the result are cast to this dtype; None to leave
            them.
        before: An earlier attribute `forward` of the instance; None if it had none.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        inputs: torch.dtype | None = None,
        autocast: torch.dtype | bool | None = None,
        outputs: torch.dtype | None = None,
    ) -> None:
        self.module = module
        self.inputs, self.autocast, self.outputs = inputs, autocast, outputs
        self.before: Callable[..., Any] | None = module.__dict__.get("forward")

    def install(self) -> None:
        """Put it on its module, and a copy of it on each replica of the module."""
        self.module.forward = self  # type: ignore[method-assign]
        # Called by `torch.nn.DataParallel`, whose replicas share all attributes.
        self.module.__dict__["_replicate_for_data_parallel"] = self._replicate

    def remove(self) -> None:
        """Restore the module."""
        del self.module.__dict__["forward"]
        self.module.__dict__.pop("_replicate_for_data_parallel", None)
        if isinstance(self.before, CastForward):
            self.before.install()
        elif self.before is not None:
            self.module.forward = self.before  # type: ignore[method-assign]

    def _replicate(self) -> torch.nn.Module:
        kind: Any = type(self.module)
        replica: torch.nn.Module = kind._replicate_for_data_parallel(self.module)
        self._of(replica).install()
        return replica

    def _of(self, module: torch.nn.Module) -> "CastForward":
        made = copy.copy(self)
        made.module = module
        if isinstance(self.before, CastForward):
            made.before = self.before._of(module)
        return made

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own forward pass."""
        if self.before is not None:
            return inspect.signature(self.before)
        return inspect.signature(type(self.module).forward.__get__(self.module))

    @property
    def __code__(self) -> Any:
        """The code of the module's own forward pass; `torch.export` takes its name."""
        forward: Any = self.before or type(self.module).forward
        return forward.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward pass between the casts."""
        if self.inputs is not None:
            args, kwargs = cast(args, self.inputs), cast(kwargs, self.inputs)
        if self.autocast is None:
            result = self._forward(*args, **kwargs)
        else:
            enabled = self.autocast is not False
            dtype = self.autocast if isinstance(self.autocast, torch.dtype) else None
            device = _device_type(self.module, args, kwargs)
            with torch.autocast(device, dtype, enabled=enabled):
                result = self._forward(*args, **kwargs)
        return result if self.outputs is None else cast(result, self.outputs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors in a nest of tuples, lists, dicts and dataclasses.

    Other values are returned as they are, and so are containers without a tensor to
    cast; of any other dataclass a shallow copy is made.

    >>> cast({"x": torch.ones(1), "n": torch.ones(1).int()}, torch.float16)
    {'x': tensor([1.], dtype=torch.float16), 'n': tensor([1], dtype=torch.int32)}
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if type(value) in (tuple, list):
        items = [cast(item, dtype) for item in value]
        return value if all(map(is_, items, value)) else type(value)(items)
    if isinstance(value, dict):
        made = {key: cast(item, dtype) for key, item in value.items()}
        if all(made[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return made
        # The outputs of transformers are dicts with attributes.
        return type(value)(**made) if all(isinstance(k, str) for k in made) else made
    if is_dataclass(value) and not isinstance(value, type):
        return _cast_fields(value, dtype)
    return value


def _cast_fields(value: Any, dtype: torch.dtype) -> Any:
    """Return a dataclass with its tensors cast, without a call of its constructor."""
    made = value
    for one in fields(value):
        before = getattr(value, one.name, None)
        after = cast(before, dtype)
        if after is not before:
            made = copy.copy(value) if made is value else made
            # It may be frozen.
            object.__setattr__(made, one.name, after)
    return made


def fp32_island(
    module: torch.nn.Module, *, outputs: torch.dtype | None = None
) -> torch.nn.Module:
    """Run one module in f32 inside autocast or a half-precision model.

    Its parameters and buffers become f32, its inputs are cast to f32, autocast is off
    inside, so its activations and gradients are f32 too. It stays an island when the
    model around it is cast. A second call changes at most the dtype of the result.

    >>> head = fp32_island(torch.nn.Linear(2, 1).half())
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     head(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
    torch.float32

    Args:
        module: The module, changed in place.
        outputs: The dtype of its result; None for f32, or for that of the model around
            it once `initialize` casts it.

    Returns:
        The module.
    """
    module.float()
    forward = module.__dict__.get("forward")
    if not isinstance(forward, CastForward):
        CastForward(
            module, inputs=torch.float32, autocast=False, outputs=outputs
        ).install()
    elif forward.outputs is None:
        forward.outputs = outputs
    return module


def is_island(module: torch.nn.Module) -> bool:
    """Return whether `fp32_island` was called for this module."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, CastForward) and forward.autocast is False


def cast_model_(
    model: torch.nn.Module, dtype: torch.dtype, keep_fp32: Sequence[Kept] = ()
) -> dict[Tensor, Tensor]:
    """Cast the floating parameters and buffers of a model, in place.

    Modules kept in f32 become islands, which return `dtype`.

    Args:
        model: The model.
        dtype: The dtype of its weights.
        keep_fp32: Types of modules, and patterns for their names.

    Returns:
        The unrounded value of each trainable parameter that was rounded.
    """
    kept = dict(kept_modules(model, keep_fp32))
    inside = [part for module in kept.values() for part in module.modules()]
    whole = {id(part) for part in inside}
    _check_tied(model, kept, whole)
    _check_not_distributed(model, dtype, whole)
    for module in kept.values():
        fp32_island(module, outputs=None if dtype is torch.float32 else dtype)
    if kept and dtype is not torch.float32:
        _turn_fused_inference_off(model)
    before: dict[Tensor, Tensor] = {}
    for part in model.modules():
        if id(part) in whole:
            continue
        for param in part.parameters(recurse=False):
            if param.is_floating_point() and param.dtype is not dtype:
                rounded = param.requires_grad and dtype is not torch.float32
                # A lazy one has no value yet.
                if rounded and not is_lazy(param):
                    before[param] = param.data.float()
                param.grad = None
                param.data = param.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype is not dtype:
                part._buffers[name] = buffer.to(dtype)
    return before


def kept_modules(
    model: torch.nn.Module, keep_fp32: Sequence[Kept]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the outermost modules that are named by type or pattern, and islands.

    Raises:
        ConfigError: A pattern names no module, or an entry is neither.
    """
    types = tuple(one for one in keep_fp32 if isinstance(one, type))
    patterns = [one for one in keep_fp32 if isinstance(one, str)]
    if len(types) + len(patterns) < len(keep_fp32):
        other = next(one for one in keep_fp32 if not isinstance(one, (type, str)))
        raise ConfigError(
            f"keep_fp32 has a {type(other).__name__} in it, which names no module. It "
            "would have no effect. Pass types of modules, and qualified names such as "
            "'head' or patterns such as '*.norm'.",
            code="GS101",
        )
    used: set[str] = set()
    inside: set[int] = set()
    for name, module in model.named_modules():
        found = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        used.update(found)
        kept = found or isinstance(module, types) or is_island(module)
        if kept and id(module) not in inside:
            inside.update(map(id, module.modules()))
            yield name, module
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        raise ConfigError(
            f"keep_fp32 names {unused[0]!r}, and no module of "
            f"{type(model).__name__} has that name. It would be cast with the others. "
            "Pass a qualified name such as 'blocks.0.norm', a pattern such as "
            "'*.norm', or a type of module.",
            code="GS101",
        )


def _check_tied(
    model: torch.nn.Module, kept: dict[str, torch.nn.Module], whole: set[int]
) -> None:
    held = {
        id(param): name
        for name, module in kept.items()
        for param in module.parameters()
    }
    for name, part in model.named_modules():
        if id(part) in whole:
            continue
        for param in part.parameters(recurse=False):
            if id(param) in held:
                raise ConfigError(
                    f"keep_fp32 names module {held[id(param)]!r}, which shares a "
                    f"parameter with module {name!r}. One parameter cannot be float32 "
                    "and half precision. Name both modules, or none of them.",
                    code="GS101",
                )


def _check_not_distributed(
    model: torch.nn.Module, dtype: torch.dtype, whole: set[int]
) -> None:
    """Raise if a wrapper has recorded the dtype of parameters that would change.

    Args:
        model: The model.
        dtype: Of its parameters after the cast.
        whole: The ids of the modules that are cast to f32 instead.
    """
    found = next((name for part in model.modules() for name in _wrappers(part)), None)
    changed = found is not None and any(
        param.is_floating_point()
        and param.dtype is not (torch.float32 if id(part) in whole else dtype)
        for part in model.modules()
        for param in part.parameters(recurse=False)
    )
    if changed:
        raise ConfigError(
            f"initialize() was given a model with {found}. It recorded the dtype of "
            "each parameter for its gradient reduction, and the level casts "
            "parameters. Call initialize() first, then wrap the model.",
            code="GS101",
        )


def _wrappers(module: torch.nn.Module) -> list[str]:
    # By name: torch's FSDP takes 0.3 s to import.
    names = [kind.__name__ for kind in type(module).__mro__]
    return [name for name in names if name in DISTRIBUTED]


def _turn_fused_inference_off(model: torch.nn.Module) -> None:
    """Have torch's encoder layers call their norms in evaluation too.

    Their fused kernel reads the weights of all parts, and needs one dtype.
    """
    for part in model.modules():
        if isinstance(part, torch.nn.TransformerEncoderLayer):
            part.activation_relu_or_gelu = 0
        elif isinstance(part, torch.nn.TransformerEncoder):
            part.use_nested_tensor = False


def _device_type(module: torch.nn.Module, args: Any, kwargs: Any) -> str:
    """Return the device type of a module, or of its arguments if it has no weights."""
    for tensor in module.parameters():
        return tensor.device.type
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
    return "cpu"
