"""Collects the gradients of parameters; errors name the unusable ones."""

from array import array
from collections.abc import Iterable, Mapping
from itertools import pairwise
from operator import add, attrgetter, le
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradscale.errors import GradientError
from gradscale.torch import tensor_list
from gradscale.torch.messages import float16_remedy
from gradscale.torch.names import names_of
from gradscale.torch.tensor_list import REAL_DTYPES, GradSnapshot, Numbers

_GRAD, _DTYPE, _NBYTES = map(attrgetter, ("grad", "dtype", "nbytes"))
_VERSION = attrgetter("_version")
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))


def collect(
    params: Iterable[Tensor],
    *,
    allow_fp16: bool,
    names: Iterable[Any] = (),
    copies: Mapping[int, float] | None = None,
) -> GradSnapshot:
    """Collect the gradients of `params`; raise for those that cannot be unscaled.

    A gradient that is expanded, lazily negated or conjugated, or made in inference mode
    is materialised and replaces `.grad`; an f16 sparse gradient is replaced by its
    coalesced form. Other sparse gradients are read from a coalesced copy. No host sync.

    Args:
        params: The parameters; those without a gradient are skipped. A list is kept,
            not copied.
        allow_fp16: Accept f16 gradients.
        names: The sources of `names_of`, for errors.
        copies: As in `Sharding`; None where each rank has its own.
    """
    params = params if isinstance(params, list) else list(params)
    if not torch.compiler.is_compiling() and not copies:
        ordinary = _collect_plain(params, allow_fp16)
        if ordinary is not None:
            return ordinary
    gradients = _collect_any(params, allow_fp16, names)
    if not copies:
        return gradients
    held_by = [copies.get(id(param), 1.0) for param in gradients.params]
    # Gradients held by different numbers of ranks are read separately.
    kind = gradients.kind if len(set(held_by)) == 1 else None
    return gradients._replace(copies=held_by, kind=kind)


def _collect_plain(params: list[Tensor], allow_fp16: bool) -> GradSnapshot | None:
    """Return the gradients if all are dense, contiguous and of one kind; else None.

    Args:
        params: The parameters; some may have no gradient.
        allow_fp16: Accept f16 gradients.
    """
    if not set(map(type, params)) <= {Tensor, torch.nn.Parameter}:
        return None
    tensors = list(map(_GRAD, params))
    kinds = set(map(type, tensors))
    if kinds != {Tensor}:
        if kinds != {Tensor, type(None)}:
            return None
        params = [
            p for p, grad in zip(params, tensors, strict=True) if grad is not None
        ]
        tensors = list(map(_GRAD, params))
    if any(map(Tensor.is_neg, tensors)) or any(map(Tensor.is_inference, tensors)):
        return None
    dtypes = set(map(_DTYPE, tensors))
    accepted = REAL_DTYPES if allow_fp16 else REAL_DTYPES - {torch.float16}
    if len(dtypes) > 1 or not dtypes <= accepted:
        return None
    try:
        begins = array("q", list(map(Tensor.data_ptr, tensors)))
        contiguous = all(map(Tensor.is_contiguous, tensors))
    except RuntimeError:
        # A sparse tensor has neither address nor strides.
        return None
    if not contiguous or not _are_apart(tensors, begins):
        return None
    numels = array("q", list(map(Tensor.numel, tensors)))
    versions = array("q", list(map(_VERSION, tensors)))
    kind = tensors[0].device, tensors[0].dtype
    return GradSnapshot(params, tensors, begins, versions, numels, kind, len(tensors))


def _are_apart(tensors: list[Tensor], begins: Numbers) -> bool:
    """Return whether the tensors are on one device, not empty, and do not overlap."""
    if len(set(map(Tensor.get_device, tensors))) > 1 or 0 in begins:
        return False
    # Views are not the only sharing: `.data` and NumPy share memory too. With both
    # lists sorted, spans are disjoint if each ends before the next one begins.
    ends = sorted(map(add, begins, map(_NBYTES, tensors)))
    return all(map(le, ends, sorted(begins)[1:]))


@torch.no_grad()
def _collect_any(
    params: list[Tensor], allow_fp16: bool, names: Iterable[Any]
) -> GradSnapshot:
    owners: list[Tensor] = []
    tensors: list[Tensor] = []
    originals: list[Tensor] = []
    addresses: list[int] = []
    versions: list[int] = []
    grads: list[Tensor] = []
    by_address: dict[int, Tensor] = {}
    halves: list[Tensor] = []
    # A fake tensor has no address.
    fake = any(isinstance(param, FakeTensor) for param in params)
    tracing = fake or torch.compiler.is_compiling()
    present, shared = 0, False
    _put_together(params)
    for param in params:
        if not isinstance(param, Tensor):
            raise AssertionError(
                f"expected param to be torch.Tensor, got {type(param).__name__}"
            )
        grad = param.grad
        if grad is None:
            continue
        present += 1
        if grad.dtype is torch.float16 and not allow_fp16:
            halves.append(param)
        if not tracing and (grad.is_neg() or grad.is_inference()):
            # Its memory does not hold its values, or writes to it are not counted.
            grad = param.grad = grad.clone().resolve_neg()
        if type(grad) is not Tensor or grad.dtype not in REAL_DTYPES:
            grad = _plain(param, grad, names)
        elif grad.layout is not torch.strided or not grad.is_contiguous():
            grad = _strided(param, grad, names)
        # Read `.grad` again: `_strided` may have replaced it.
        grads.append(param.grad)  # type: ignore[arg-type]  # there is one
        if grad.numel() == 0:
            continue
        original = grad
        if param.grad.is_sparse and not param.grad.is_coalesced():  # type: ignore[union-attr]
            # Torch multiplies the duplicates. Their sum may overflow although none of
            # them does.
            original, grad = grad, param.grad.coalesce()._values()  # type: ignore[union-attr]
        if not tracing:
            address = original.data_ptr()
            if address in by_address:
                _check_same_view(param, grad, by_address[address], names)
                shared = True
                continue
            by_address[address] = grad
            addresses.append(grad.data_ptr())
            versions.append(original._version)
        owners.append(param)
        tensors.append(grad)
        originals.append(original)
    if halves:
        raise _fp16_refused(halves, names)
    # torch.compile does not support arrays; the lists are empty while it traces.
    begins: Any = addresses if tracing else array("q", addresses)
    marks: Any = versions if tracing else array("q", versions)
    sizes: Any = [] if tracing else array("q", list(map(Tensor.numel, tensors)))
    gradients = GradSnapshot(
        owners, tensors, begins, marks, sizes, None, present, shared
    )
    if not tensor_list.same(originals, tensors):
        gradients = gradients._replace(originals=originals)
    if not tracing and not tensor_list.same(grads, tensors):
        gradients = gradients._replace(wrapped=grads)
    if tracing:
        return gradients
    _check_apart(gradients, names)
    return gradients._replace(kind=_kind_of(gradients))


def _put_together(params: list[Any]) -> None:
    """Give gradients the placements of their parameters, by one collective each.

    For example partial sums after a sequence-parallel layer. This precedes every check:
    the other ranks take part in these collectives, and would wait for a rank that has
    raised an error.
    """
    # hasattr() for a missing attribute of a Tensor takes a microsecond.
    for param in params:
        if type(param) in _ORDINARY or not hasattr(param, "placements"):
            continue
        grad, wanted = param.grad, param.placements
        if grad is not None and grad.placements != wanted:
            param.grad = grad.redistribute(placements=wanted)


def _kind_of(gradients: GradSnapshot) -> tuple[torch.device, torch.dtype] | None:
    """Return the common device and dtype if all are contiguous `.grad`; else None."""
    params, tensors = gradients.params, gradients.tensors
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    alike = (
        len(kinds) == 1
        and len(tensors) == gradients.present
        and tensor_list.same(list(map(_GRAD, params)), tensors)
        and all(map(Tensor.is_contiguous, tensors))
    )
    return kinds.pop() if alike else None


def _plain(param: Tensor, grad: Tensor, names: Iterable[Any]) -> Tensor:
    """Return the plain real tensor behind a subclass or a complex gradient."""
    # The local part of a DTensor; the result of a pending collective.
    for unwrap in ("to_local", "wait"):
        if hasattr(grad, unwrap):
            grad = getattr(grad, unwrap)()
    if is_traceable_wrapper_subclass(grad):
        # It has no memory of its own that could be read or written.
        raise _refused(param, grad, f"a gradient of class {type(grad).__name__}", names)
    if grad.is_complex():
        if grad.layout is not torch.strided:
            raise _refused(param, grad, "a complex sparse gradient", names)
        if grad.is_conj() and grad is param.grad:
            grad = param.grad = grad.resolve_conj()
        return torch.view_as_real(_strided(param, grad, names))
    if grad.dtype not in REAL_DTYPES:
        raise _refused(param, grad, f"a gradient of dtype {grad.dtype}", names)
    return _strided(param, grad, names)


def _strided(param: Tensor, grad: Tensor, names: Iterable[Any]) -> Tensor:
    """Return a strided tensor without overlap; `.grad` is replaced where needed."""
    if grad.layout is torch.sparse_coo:
        if grad.dtype is torch.float16 and not grad.is_coalesced():
            grad = param.grad = grad.coalesce()
        return grad._values()
    if grad.layout is not torch.strided:
        raise _refused(param, grad, f"a gradient of layout {grad.layout}", names)
    overlaps = any(
        stride == 0 and size > 1
        for stride, size in zip(grad.stride(), grad.shape, strict=True)
    )
    if overlaps:
        grad = param.grad = grad.clone(memory_format=torch.contiguous_format)
    return grad


def _check_same_view(
    param: Tensor, grad: Tensor, other: Tensor, names: Iterable[Any]
) -> None:
    if grad.shape != other.shape or grad.stride() != other.stride():
        raise _refused(
            param, grad, "a gradient that overlaps another one's memory", names
        )


def _check_apart(gradients: GradSnapshot, names: Iterable[Any]) -> None:
    """Refuse a gradient that overlaps another; slices of one buffer are fine."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, place)
        for place, tensor in enumerate(gradients.tensors)
        # Interleaved slices may be disjoint although their spans overlap.
        if tensor.is_contiguous()
    )
    for (_, end, _), (start, _, place) in pairwise(spans):
        if start < end:
            raise _refused(
                gradients.params[place],
                gradients.tensors[place],
                "a gradient that overlaps another one's memory",
                names,
            )


def _refused(
    param: Tensor, grad: Tensor, what: str, names: Iterable[Any]
) -> GradientError:
    return GradientError(
        f"{names_of([param], names)[0]} has {what} (shape {tuple(grad.shape)}). "
        "It cannot be unscaled in place without a wrong result. Give the parameter a "
        "dense gradient of its own in f16, bf16, f32, f64 or a complex type, or keep "
        "it out of this optimizer.",
        code="GS106",
    )


def _fp16_refused(params: list[Tensor], names: Iterable[Any]) -> GradientError:
    listed = ", ".join(names_of(params[:8], names))
    more = f" and {len(params) - 8} more" if len(params) > 8 else ""
    users = [one for one in names if hasattr(one, "param_groups")]
    remedy = float16_remedy(users[0] if users else None)
    if any(getattr(one, "_step_supports_amp_scaling", False) for one in names):
        remedy = (
            "This optimizer unscales them in its step, in float32: leave unscale_() "
            "out, and clip by scaler.clip_grad_norm_(optimizer, max_norm). To divide "
            "them in float16 nevertheless, pass allow_fp16=True."
        )
    return GradientError(
        f"The gradients of {listed}{more} are float16. Dividing them by the scale in "
        f"float16 loses what the scale has saved. {remedy}",
        code="GS105",
        replaces="Attempting to unscale FP16 gradients.",
    )
