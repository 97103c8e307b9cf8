"""Scaling a loss for its backward pass, and the handle of O1's casts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from gradscale.apex.amp._amp_state import _amp_state
from gradscale.apex.amp._process_optimizer import Unscaled, stash_of
from gradscale.apex.amp.casts import (
    CastCache,
    Casts,
    OtherThreads,
    disable_casts,
    rnn_inputs_as_weights,
)
from gradscale.errors import AmpError, OrderError

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scale a loss; unscale and check the gradients when the block ends. Syncs once.

    The block runs the backward pass. Its gradients are unscaled and added to those of
    other losses. If one is not finite, the scale of this loss is lowered and the next
    step of the given optimizers is skipped; others are not.

    >>> import torch
    >>> from gradscale.apex import amp
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> model, optimizer = amp.initialize(
    ...     model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0
    ... )
    >>> loss = model(torch.ones(1, 2)).sum()
    >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
    ...     scaled_loss.backward()
    >>> [p.grad for p in amp.master_params(optimizer)]
    [tensor([[1., 1.]])]
    >>> optimizer.step()
    >>> amp.last.applied, amp.last.scale
    (True, 128.0)

    Args:
        loss: The loss before scaling.
        optimizers: The optimizer or the optimizers whose parameters get a gradient.
        loss_id: Which of the `num_losses` scales.
        model: Has no effect, as in apex.
        delay_unscale: Leave the gradients scaled: a later pass adds to them, and
            unscales them if it is not delayed itself.
        delay_overflow_check: Unscale now, and check in `optimizer.step()`, without a
            sync here. With `exact`, do not check at all.
    """
    properties = getattr(_amp_state, "opt_properties", None)
    if properties is None:
        raise OrderError(
            "scale_loss() was called before amp.initialize(). There is no scale yet. "
            "Call model, optimizer = amp.initialize(model, optimizer) first.",
            code="GS102",
        )
    if not properties.enabled:
        yield loss
        return
    listed = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    amps = [stash_of(optimizer) for optimizer in listed]
    scaler = _scaler(loss_id)
    scale = scaler.loss_scale()
    fixed_at_one = not (properties.master_weights or scaler.dynamic) and scale == 1.0
    if _amp_state.exact and fixed_at_one:
        yield loss.float()
        _clear_cache()
        return
    unscaled = Unscaled(scaler, loss)
    with disable_casts():
        for amp in amps:
            amp.begin_pass(scale)
        scaled = loss.float() * scale
    try:
        yield scaled
    except BaseException:
        for amp in amps:
            amp.abandon_pass()
        raise
    finally:
        for amp in amps:
            amp.in_pass = False
        _clear_cache()
    if delay_unscale:
        return
    scaler.clear_overflow_state()
    with disable_casts():
        for amp in amps:
            amp.end_pass(unscaled)
        if not delay_overflow_check:
            if unscaled.settle(_amp_state.models):
                for amp in amps:
                    amp.skips.append(loss_id)
        elif not _amp_state.exact:
            for amp in amps:
                amp.delayed.append((loss_id, unscaled))


def _scaler(loss_id: int) -> Any:
    try:
        return _amp_state.loss_scalers[loss_id]
    except IndexError:
        known = len(_amp_state.loss_scalers)
        raise AmpError(
            f"loss_id={loss_id}, and there are {known} scales, counted from 0. This "
            f"loss has none. Pass num_losses={loss_id + 1} to amp.initialize().",
            code="GS101",
        ) from None


def _clear_cache() -> None:
    if _amp_state.handle is not None:
        _amp_state.handle._clear_cache()


class AmpHandle:
    """The casts of O1 while they are active.

    Attributes:
        casts: The `TorchFunctionMode`.
    """

    def __init__(
        self, *, enable_caching: bool, allow_banned: bool, on_cpu: bool
    ) -> None:
        self.casts = Casts(
            caching=enable_caching, allow_banned=allow_banned, on_cpu=on_cpu
        )
        self.verbose = False
        self._all_wrappers: list[tuple[Any, str, Any]] = []
        self._hooks: list[Any] = []
        self._threads = OtherThreads(self.casts)

    def activate(self) -> None:
        """Enter the mode."""
        self.casts.__enter__()
        self._hooks = [
            register_module_forward_pre_hook(self._threads.begin_forward),
            register_module_forward_hook(self._threads.end_forward, always_call=True),
            register_module_forward_pre_hook(rnn_inputs_as_weights),
        ]

    def is_active(self) -> bool:
        """Return whether functions are cast."""
        return bool(self._hooks) and self.casts.is_active

    @property
    def has_cache(self) -> bool:
        """Whether casts of parameters are kept."""
        return self.casts.cache.enabled

    @property
    def cache(self) -> CastCache:
        """The casts of parameters."""
        return self.casts.cache

    def replace(self, module: Any, name: str, wrapper: Any) -> None:
        """Replace a function of a module until `_deactivate`."""
        self._all_wrappers.append((module, name, getattr(module, name)))
        setattr(module, name, wrapper)

    def wrap_optimizer(self, *_: Any, **__: Any) -> None:
        """Raise: this is apex's interface of 2018, which apex has removed."""
        raise AmpError(
            "handle.wrap_optimizer() and handle.scale_loss() are apex's API of 2018, "
            "which apex has removed. Call model, optimizer = amp.initialize(model, "
            "optimizer, opt_level='O1') and amp.scale_loss(loss, optimizer).",
            code="GS101",
        )

    scale_loss = wrap_optimizer

    def _disable_casts(self) -> Any:
        return disable_casts()

    def _clear_cache(self) -> None:
        self.cache.clear()

    def _deactivate(self) -> None:
        """Leave the mode; a second call does nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.casts.remove()
        # Another thread may have entered it and cannot leave it here.
        self.casts.is_active = False
        self.cache.clear()
        for module, name, before in reversed(self._all_wrappers):
            setattr(module, name, before)
        self._all_wrappers = []


class NoOpHandle:
    """The handle of a disabled amp."""

    verbose = False
    has_cache = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def _clear_cache(self) -> None:
        """Do nothing."""

    def _deactivate(self) -> None:
        """Do nothing."""
