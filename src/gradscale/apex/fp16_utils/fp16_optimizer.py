"""FP16_Optimizer: master weights and a scale around one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradscale.apex.fp16_utils.loss_scaler import (
    DynamicLossScaler,
    LossScaler,
    has_overflow,
)
from gradscale.apex.run_session import run_recorder
from gradscale.apex.step_log import StepLog
from gradscale.core.outcome import StepOutcome
from gradscale.errors import AmpError
from gradscale.torch.grads.unscale import multiply_
from gradscale.torch.names import names_of
from gradscale.torch.optim.state import WIDE, needs_master


class FP16_Optimizer:  # apex's name
    """Scales the loss and steps f32 masters of an optimizer's parameters.

    >>> model = torch.nn.Linear(2, 1, bias=False).half()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False)
    >>> optimizer.loss_scale = 1024.0
    >>> optimizer.backward(model(torch.ones(1, 2).half()).sum())
    >>> optimizer.clip_master_grads(0.5)
    tensor(1.4142)
    >>> optimizer.step()
    >>> optimizer.overflow, optimizer.last.applied
    (False, True)

    Args:
        init_optimizer: Made with the model's parameters, and changed in place.
        static_loss_scale: The scale if it does not move.
        dynamic_loss_scale: Move the scale.
        dynamic_loss_args: Arguments of `DynamicLossScaler`.
        verbose: Print findings.

    Attributes:
        optimizer: The optimizer.
        loss_scaler: The scale.
        overflow: The last gradients were not finite.
        log: Judges the steps; records them under `gradscale run`.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.loss_scaler: LossScaler = LossScaler(static_loss_scale)
        self.dynamic_loss_scale = dynamic_loss_scale
        if dynamic_loss_scale:
            self.loss_scaler = DynamicLossScaler(**(dynamic_loss_args or {}))
        self.overflow = False
        self._used_scale = self.loss_scaler.loss_scale
        self._loss: Tensor | None = None
        policy = self.loss_scaler.policy
        self.log = StepLog(run_recorder(), policy=policy, quiet=not verbose)
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for group in init_optimizer.param_groups:
            halves: list[Tensor] = []
            masters: list[Tensor] = []
            own: list[Tensor] = []
            for i, param in enumerate(group["params"]):
                if not param.requires_grad:
                    continue
                if not needs_master(param):
                    own.append(param)
                    continue
                master = torch.nn.Parameter(param.detach().to(WIDE[param.dtype]))
                group["params"][i] = master
                if param in init_optimizer.state:
                    init_optimizer.state[master] = init_optimizer.state.pop(param)
                halves.append(param)
                masters.append(master)
            self.fp16_groups.append(halves)
            self.fp32_from_fp16_groups.append(masters)
            self.fp32_from_fp32_groups.append(own)
        if init_optimizer.state:
            init_optimizer.load_state_dict(init_optimizer.state_dict())

    def __getstate__(self) -> Any:
        raise AmpError(
            "FP16_Optimizer was pickled or copied. Its masters would lose the model "
            "that they belong to. Save its state_dict().",
            code="GS101",
        )

    @property
    def last(self) -> StepOutcome | None:
        """The outcome of the last step."""
        return self.log.last

    @property
    def loss_scale(self) -> float:
        """The scale; may be set."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    @property
    def state(self) -> Any:
        """The state of the optimizer."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, with the masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of model and masters.

        Args:
            set_grads_to_None: Remove them instead of filling them with zeros.
        """
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        for param in _all(self.fp16_groups):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad = torch.zeros_like(param.grad)

    def backward(
        self,
        loss: Tensor,
        update_master_grads: bool = True,
        retain_graph: bool = False,
    ) -> None:
        """Run the backward pass of the scaled loss.

        Args:
            loss: The loss before scaling.
            update_master_grads: Give the masters their gradients; False if a further
                backward pass follows.
            retain_graph: As in torch.
        """
        self._used_scale, self._loss = self.loss_scale, loss.detach()
        self.loss_scaler.backward(loss, retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Check the gradients, and unscale them into those of the masters. Syncs.

        If one is not finite, the scale is lowered and `overflow` is set.
        """
        halves = _all(self.fp16_groups)
        own = _all(self.fp32_from_fp32_groups)
        self.overflow = has_overflow([*halves, *own])
        if self.overflow:
            return
        grads = [param.grad for param in own if param.grad is not None]
        for param, master in zip(halves, _all(self.fp32_from_fp16_groups), strict=True):
            master.grad = None
            if param.grad is not None:
                master.grad = param.grad.detach().to(master.dtype, copy=True)
                grads.append(master.grad)
        multiply_(grads, torch.tensor(1.0 / self._used_scale, device="cpu"))

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients of the masters by their joint norm.

        Returns:
            The norm before; -1 after an overflow.
        """
        if self.overflow:
            return -1
        params = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model, or skip; move the scale.

        Args:
            closure: Computes the gradients by `backward` and returns the loss; repeated
                at a lower scale after an overflow.
        """
        if closure is not None:
            return self._step_with(closure)
        self.loss_scaler.update_scale(self.overflow)
        self._note(applied=not self.overflow)
        if self.overflow:
            return None
        returned = self.optimizer.step()
        self._write_params()
        return returned

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def evaluate() -> Any:
            # The optimizer may have moved the masters.
            self._write_params()
            loss = closure()
            while self.overflow:
                self.loss_scaler.update_scale(True)
                if not self.dynamic_loss_scale or self.loss_scale <= 1.0:
                    raise AmpError(
                        f"The gradients of the closure are not finite at scale "
                        f"{self.loss_scale:g}. No lower scale is tried. Check the loss "
                        "and the data of this batch.",
                        code="GS208",
                    )
                loss = closure()
            return loss

        returned = self.optimizer.step(evaluate)
        self.loss_scaler.update_scale(False)
        self._note(applied=True)
        self._write_params()
        return returned

    def _note(self, *, applied: bool) -> None:
        loss = self._loss
        self.log.add(
            (self._used_scale, self.loss_scale),
            finite=applied,
            applied=applied,
            floor=self.loss_scaler.policy.min_scale
            if self.dynamic_loss_scale
            else None,
            state=self.loss_scaler.state,
            loss=float(loss) if loss is not None and loss.numel() == 1 else None,
            culprits=self._culprits,
        )

    def _culprits(self) -> list[str]:
        halves, masters = _all(self.fp16_groups), _all(self.fp32_from_fp16_groups)
        pairs = [*zip(halves, masters, strict=True)]
        pairs += [(param, param) for param in _all(self.fp32_from_fp32_groups)]
        bad = [held for param, held in pairs if has_overflow([param])]
        return names_of(bad, [self.optimizer])

    @torch.no_grad()
    def _write_params(self) -> None:
        masters = _all(self.fp32_from_fp16_groups)
        for param, master in zip(_all(self.fp16_groups), masters, strict=True):
            param.copy_(master)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the gradients of the masters by group; None after an overflow."""
        if self.overflow:
            return None
        return [
            [param.grad for param in group["params"]] for group in self.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return scale, optimizer and masters. Plain values, unlike apex's."""
        return {
            "loss_scaler": self.loss_scaler.state(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [
                [master.detach() for master in group]
                for group in self.fp32_from_fp16_groups
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of apex, which holds a scaler object."""
        scaler = state_dict["loss_scaler"]
        values = scaler if isinstance(scaler, dict) else vars(scaler)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for name, value in values.items():
            if hasattr(self.loss_scaler, name):
                setattr(self.loss_scaler, name, value)
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        for group, saved in zip(
            self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True
        ):
            for master, value in zip(group, saved, strict=True):
                master.copy_(value)


def _all(groups: list[list[Tensor]]) -> list[Tensor]:
    return [param for group in groups for param in group]
