"""Master weights: f32 copies of half-precision parameters for any optimizer."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradscale.errors import ConfigError, OrderError, StateError
from gradscale.torch import messages, tensor_list
from gradscale.torch.device_state.async_copy import AsyncFlag
from gradscale.torch.devices import to_device
from gradscale.torch.grads.unscale import multiply_
from gradscale.torch.names import names_of
from gradscale.torch.optim.base import FusedOptimizer
from gradscale.torch.optim.batches import check_grad, is_plain, plain
from gradscale.torch.optim.masters import DataCheck, LastWrite, Masters
from gradscale.torch.optim.state import MASTER, WIDE, needs_master
from gradscale.torch.step.amp_protocol import amp_attributes, prepare_momentum
from gradscale.torch.step.dispatch import unscales_itself
from gradscale.torch.tensor_list import Mark, mark_of


class MasterWeights(torch.optim.Optimizer):
    """An optimizer that steps f32 masters, and rounds them into the parameters.

    Its groups are those of the inner optimizer and hold the model's parameters. For the
    duration of a step each half-precision parameter is replaced by its master, whose
    gradient is the model's, unscaled in f32. The model's gradients are not changed.
    Parameters in f32 or f64 are their own masters.

    Attributes:
        inner: The optimizer. Its state belongs to the masters, so it is stepped, saved
            and loaded through this one only.
        check_data: Keep writes through `.data` too.
    """

    inner: torch.optim.Optimizer
    check_data: bool
    _master_of: dict[Tensor, Tensor]

    # A scaler lends `grad_scale` and `found_inf`, as to torch's fused optimizers.
    _step_supports_amp_scaling = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, check_data: bool = False
    ) -> None:
        """Make the masters from the parameters.

        Args:
            optimizer: The optimizer to wrap, with or without state.
            check_data: As in `master_weights`.
        """
        self.__setstate__(
            {"inner": optimizer, "check_data": check_data, "_master_of": {}}
        )

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "check_data", "_master_of")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inner = state["inner"]
        # Torch's constructor would copy the groups.
        super().__setstate__({**state, "defaults": inner.defaults})
        self._kept: Masters | None = None
        self._check = DataCheck()
        # The model's gradients that `unscale_to_masters` has read, and the first one
        # that a step has used.
        self._read: list[Mark] | None = None
        self._used: Mark | None = None
        self._inside = inside = SimpleNamespace(now=False)

        def only_inside(*_: Any) -> None:
            if not inside.now:
                raise _used_directly(type(inner).__name__)

        inner.register_step_pre_hook(only_inside)
        inner.register_state_dict_pre_hook(only_inside)
        inner.register_load_state_dict_pre_hook(only_inside)
        self._make_masters()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch: an attribute
        """The groups of the inner optimizer, with the model's parameters."""
        return self.inner.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]  # torch: an attribute
        """The state of each of the model's parameters, `master` included.

        Created by each access: entries that are added to it are lost.
        """
        merged: defaultdict[Tensor, Any] = defaultdict(dict)
        for param in self._params():
            master = self._master_of.get(param)
            held = self.inner.state.get(param if master is None else master) or {}
            entries = held if master is None else {**held, MASTER: master}
            if entries:
                merged[param] = entries
        return merged

    def targets(self) -> list[Tensor]:
        """Return the tensor stepped for each parameter: its master, or itself."""
        return [self._master_of.get(param, param) for param in self._params()]

    def set_master(self, param: Tensor, value: Tensor) -> None:
        """Replace the master of a parameter by a more precise value of the same.

        Args:
            param: One of the model's parameters, with a master.
            value: f32[...], kept, not copied.
        """
        self._master_of[param].data = value

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch: overloads
        """Take one step, or none if `found_inf` is set.

        One flag is read on the host if a scaler has set it and the inner optimizer
        cannot skip by itself.

        Args:
            closure: Computes the gradients again and returns the loss.

        Returns:
            The result of the inner optimizer's step.
        """
        self._make_masters()
        self._update_masters()
        if closure is not None:
            return self._step_with(closure)
        versions = tensor_list.versions(list(self._master_of))
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        skips_itself = found_inf is not None and unscales_itself(self.inner)
        flag = None
        if found_inf is not None and not skips_itself:
            # Before anything else is queued.
            flag = AsyncFlag(found_inf)
        before = self._give_grads(grad_scale, found_inf is not None)
        try:
            if flag is not None and flag.is_set():
                messages.mark_called(self.inner)
                return None
            with self._with_masters():
                if not skips_itself:
                    returned = self.inner.step()
                elif prepare_momentum(self.inner) and AsyncFlag(found_inf).is_set():  # type: ignore[arg-type]  # there is one
                    return None
                else:
                    with amp_attributes(self.inner, None, found_inf):  # type: ignore[arg-type]
                        returned = self.inner.step()
            self._write_params_after(versions)
        finally:
            self._take_grads(before)
        return returned

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            with torch.no_grad(), self._with_params():
                # A line search may have moved the masters.
                self._write_params()
                with torch.enable_grad():
                    loss = closure()
                self._give_grads(None, False)
            return loss

        # SAM, as its users write it, starts with the gradients of a backward before.
        first = next((g for p, g in self._grads() if p in self._master_of), None)
        if first is not None and (self._used is None or not self._used.holds(first)):
            self._give_grads(None, False)
        with self._with_masters():
            returned = self.inner.step(evaluate)  # type: ignore[arg-type]  # any result
        self._write_params()
        self._take_grads([])
        return returned

    def unscale_to_masters(self, multiplier: Tensor | None = None) -> None:
        """Make the gradients of the masters from those of the model, unscaled.

        The next step uses them with any later change, such as a clip. A gradient of
        an f32 parameter, which is its own master, is multiplied in place. No host sync.

        Args:
            multiplier: f32[], the factor of the gradients; None for 1.
        """
        with torch.no_grad():
            self._make_masters()
            pairs = self._grads()
            halves = [pair for pair in pairs if pair[0] in self._master_of]
            wide = _wide([grad for _, grad in halves])
            for (param, _), unscaled in zip(halves, wide, strict=True):
                self._master_of[param].grad = unscaled
            if multiplier is not None:
                # By id: two parameters may share a gradient.
                own = {id(g): g for p, g in pairs if p not in self._master_of}
                multiply_([plain(g) for g in (*wide, *own.values())], multiplier)
        self._read = [mark_of(grad) for _, grad in halves]

    def _give_grads(
        self, scale: Tensor | None, is_lent: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Give each master its gradient, unscaled.

        Args:
            scale: f32[], the divisor of the gradients; None for 1.
            is_lent: The step was requested by a scaler.

        Returns:
            Parameters without a master whose gradients were replaced, and the
            original gradients.
        """
        pairs = self._grads()
        halves = [(p, grad) for p, grad in pairs if p in self._master_of]
        self._used = mark_of(halves[0][1]) if halves else None
        read, self._read = self._read, None
        if scale is None:
            same_grads = read is not None and len(read) == len(halves)
            if same_grads and all(map(Mark.holds, read or (), [g for _, g in halves])):
                return []
            if read is not None and is_lent:
                self._read = read
                raise _changed_after_unscale()
            pairs = halves
        wide = _wide([grad for _, grad in pairs])
        if scale is not None:
            by_device: dict[torch.device, list[Tensor]] = {}
            for grad in wide:
                by_device.setdefault(grad.device, []).append(plain(grad))
            for device, grads in by_device.items():
                # In f32 or wider, so exact for a power of two.
                torch._foreach_div_(grads, to_device(scale, device))
        replaced = []
        for (param, grad), unscaled in zip(pairs, wide, strict=True):
            target = self._master_of.get(param, param)
            target.grad = unscaled
            if target is param:
                replaced.append((param, grad))
        return replaced

    def _take_grads(self, replaced: list[tuple[Tensor, Tensor]]) -> None:
        """Drop the gradients of the masters, and restore replaced ones."""
        for param, grad in replaced:
            param.grad = grad
        for master in self._master_of.values():
            master.grad = None

    def _grads(self) -> list[tuple[Tensor, Tensor]]:
        pairs = [(p, p.grad) for p in self._params() if p.grad is not None]
        for param, grad in pairs:
            check_grad(self, param, grad)
        return pairs

    def _write_params_after(self, versions: tensor_list.Numbers) -> None:
        """Round the masters into the parameters after a step of the inner optimizer.

        Args:
            versions: Of the parameters with masters, before the step.

        Raises:
            ConfigError: The step has written to them. They are restored.
        """
        written = tensor_list.versions(list(self._master_of)) != versions
        self._write_params()
        if written:
            raise _wrote_params(type(self.inner).__name__)

    def _write_params(self) -> None:
        """Round the masters into the parameters."""
        kept = self._kept
        if kept is None:
            return
        torch._foreach_copy_(kept.params, kept.masters)
        if kept.params is not kept.owners:
            # Autograd has seen a write to the local tensor, not to the DTensor.
            torch.autograd.graph.increment_version(kept.owners)
        kept.note_own_write()

    def _update_masters(self) -> None:
        """Copy writes to the parameters since the last step into the masters."""
        kept, owners = self._kept, list(self._master_of)
        if not owners:
            return
        if (
            kept is None
            or kept.params is not kept.owners
            or not tensor_list.same(kept.owners, owners)
        ):
            writes = {} if kept is None else kept.last_writes()
            params = owners if all(map(is_plain, owners)) else list(map(plain, owners))
            kept = self._kept = Masters(
                owners,
                params,
                list(map(plain, self._master_of.values())),
                [writes.get(id(owner), LastWrite()) for owner in owners],
                self._check,
            )
        kept.update_(None, [self], check_data=self.check_data)

    def _make_masters(self) -> None:
        """Make the masters of parameters that were added or became trainable."""
        for param in self._params():
            trained = param.requires_grad or param.grad is not None
            if param in self._master_of or not trained or not needs_master(param):
                continue
            if is_lazy(param):
                # Without a shape until the first forward pass.
                continue
            master = torch.nn.Parameter(param.detach().to(WIDE[param.dtype]))
            # Marks that some optimizers look for; inner tensors are the master's own.
            master.__dict__.update({**param.__dict__, **master.__dict__})
            self._master_of[param] = master
            if param in self.inner.state:
                held = self.inner.state.pop(param)
                self.inner.state[master] = {
                    name: value.to(master.dtype)
                    if isinstance(value, Tensor) and value.dtype is param.dtype
                    else value
                    for name, value in held.items()
                }

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @contextmanager
    def _with_masters(self) -> Iterator[None]:
        """Put the masters into the groups."""
        # In place: torch's LBFGS holds the list of its group.
        params = [list(group["params"]) for group in self.param_groups]
        for group in self.param_groups:
            found = [self._master_of.get(param, param) for param in group["params"]]
            group["params"][:] = found
        self._inside.now = True
        try:
            yield
        finally:
            self._inside.now = False
            for group, held in zip(self.param_groups, params, strict=True):
                group["params"][:] = held

    @contextmanager
    def _with_params(self) -> Iterator[None]:
        """Put the parameters back into the groups, inside `_with_masters`."""
        param_of = {id(m): param for param, m in self._master_of.items()}
        masters = [list(group["params"]) for group in self.param_groups]
        for group in self.param_groups:
            group["params"][:] = [param_of.get(id(p), p) for p in group["params"]]
        self._inside.now = False
        try:
            yield
        finally:
            self._inside.now = True
            for group, held in zip(self.param_groups, masters, strict=True):
                group["params"][:] = held

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model, and those of the masters."""
        super().zero_grad(set_to_none)
        self._read = None
        self._take_grads([])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own settings."""
        self.inner.add_param_group(param_group)
        self._make_masters()

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, with `master` in each state."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        with self._with_masters():
            saved = self.inner.state_dict()
        states = dict(saved["state"])
        keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
        for key, param in zip(keys, self._params(), strict=True):
            if param in self._master_of:
                # Not the Parameter: it would be saved with its gradient hooks.
                master = self._master_of[param].detach()
                states[key] = {**states.get(key, {}), MASTER: master}
        saved = {**saved, "state": states}
        for post in self._optimizer_state_dict_post_hooks.values():
            changed = post(self, saved)
            saved = saved if changed is None else changed
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`, also of the inner optimizer alone.

        A missing master is made from its parameter; a master that no longer agrees with
        its parameter is replaced in the next step. A refused state changes nothing.
        """
        loaded = state_dict
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, loaded)
            loaded = loaded if changed is None else changed
        self._make_masters()
        keys = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        # Torch refuses groups of another size.
        param_of = dict(zip(keys, self._params(), strict=False))
        states: dict[Any, Any] = {}
        masters: dict[Tensor, Tensor] = {}
        for key, state in loaded["state"].items():
            param, value = param_of.get(key), None
            if isinstance(state, dict):
                value = state.get(MASTER)
                state = {name: v for name, v in state.items() if name != MASTER}
            if isinstance(value, Tensor) and param is not None:
                if value.shape != param.shape:
                    raise _wrong_shape(names_of([param], [self])[0], value, param)
                masters[param] = value
            if state or not isinstance(state, dict):
                states[key] = state
        with self._with_masters():
            self.inner.load_state_dict({**loaded, "state": states})
        for param, master in self._master_of.items():
            master.copy_(masters.get(param, param))
        self._kept = None
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)


def master_weights(
    optimizer: torch.optim.Optimizer, *, check_data: bool = False
) -> torch.optim.Optimizer:
    """Give an optimizer f32 masters of its half-precision parameters.

    Step, save and schedule the returned optimizer in place of the given one. Gradients
    are unscaled in f32, the optimizer's state is f32, and the parameters are the
    rounded masters. Writes to a parameter between two steps are kept.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    >>> optimizer = master_weights(torch.optim.SGD([weight], lr=2.0**-13))
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.data, list(master_params(optimizer))[0].data
    (tensor([1., 1.], dtype=torch.float16), tensor([0.9999, 0.9999]))

    Args:
        optimizer: Any `torch.optim.Optimizer`, made with the model's parameters. Those
            of `gradscale.torch.optim` have masters and are returned unchanged.
        check_data: Also keep writes through `.data`, at the cost of reading parameters
            and masters once more in each step. Without it such a write is overwritten;
            a sampled check reports it once.
    """
    if isinstance(optimizer, MasterWeights):
        return optimizer
    if isinstance(optimizer, FusedOptimizer):
        optimizer.check_data = optimizer.check_data or check_data
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"master_weights() was given a {type(optimizer).__name__}. It replaces the "
            "parameters of a torch.optim.Optimizer by masters during its step. Pass "
            "the optimizer, made with the model's parameters.",
            code="GS101",
        )
    return MasterWeights(optimizer, check_data=check_data)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors that are stepped: the f32 master of each parameter, or itself.

    Between `scaler.unscale_(optimizer)` and the step, the masters have the unscaled
    gradients, for `torch.nn.utils.clip_grad_norm_`.

    Args:
        optimizer: Made by `master_weights`, or any other.

    Raises:
        OrderError: There are gradients, and the masters do not have them.
    """
    if isinstance(optimizer, MasterWeights):
        grads = (p.grad for p in optimizer._master_of if p.grad is not None)
        first = next(grads, None)
        if first is not None and optimizer._read is None:
            used = optimizer._used
            if used is None or not used.holds(first):
                raise OrderError(
                    "master_params() was called after backward() and before "
                    "unscale_(). The masters have no gradients yet, so a clip would "
                    "change nothing. Call scaler.unscale_(optimizer) first, or clip by "
                    "scaler.clip_grad_norm_(optimizer, max_norm).",
                    code="GS102",
                )
        yield from optimizer.targets()
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not isinstance(optimizer, FusedOptimizer):
        yield from params
        return
    if any(needs_master(param) and param.grad is not None for param in params):
        raise OrderError(
            f"master_params() was called for {type(optimizer).__name__} of "
            "gradscale.torch.optim while there are gradients. Its masters never have "
            "gradients, so a clip of them would change nothing. Clip by "
            "scaler.clip_grad_norm_(optimizer, max_norm); to read a master, take "
            "optimizer.state[param]['master'].",
            code="GS102",
        )
    for param in params:
        yield optimizer.state.get(param, {}).get(MASTER, param)


def _wide(grads: list[Tensor]) -> list[Tensor]:
    """Return copies in the dtype of masters."""
    made = [torch.empty_like(grad, dtype=WIDE[grad.dtype]) for grad in grads]
    if made:
        torch._foreach_copy_(list(map(plain, made)), list(map(plain, grads)))
    return made


def _used_directly(kind: str) -> OrderError:
    return OrderError(
        f"{kind} was used directly after master_weights() had wrapped it. Its state "
        "belongs to the float32 masters, and the parameters would be stepped without "
        "them. Step, save and load the optimizer that master_weights() returned.",
        code="GS102",
    )


def _changed_after_unscale() -> OrderError:
    return OrderError(
        "The gradients of the model were changed after unscale_(), which had divided "
        "copies of them for the float32 masters. The step uses those copies, so a clip "
        "of model.parameters() would change nothing. Clip by "
        "scaler.clip_grad_norm_(optimizer, max_norm), or pass "
        "gradscale.torch.master_params(optimizer) to torch's function.",
        code="GS102",
    )


def _wrote_params(kind: str) -> ConfigError:
    return ConfigError(
        f"{kind} has written to the parameters in its step, and not to their float32 "
        "masters. It, or a hook of it, keeps a list of parameters beside its "
        "param_groups, whose gradients are not unscaled. The parameters were restored. "
        "Wrap the optimizer that holds them in its param_groups, or let the step read "
        "self.param_groups.",
        code="GS101",
    )


def _wrong_shape(name: str, value: Tensor, param: Tensor) -> StateError:
    return StateError(
        f"master of {name} has shape {tuple(value.shape)}, the parameter has "
        f"{tuple(param.shape)}. It belongs to another parameter. Load the checkpoint "
        "of this model.",
        code="GS302",
    )
