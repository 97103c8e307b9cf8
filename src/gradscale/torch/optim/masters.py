"""Keeps f32 masters consistent with writes to their parameters."""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gradscale.errors import GradscaleWarning
from gradscale.torch import tensor_list
from gradscale.torch.device_state.async_copy import AsyncTensor
from gradscale.torch.devices import can_touch_host
from gradscale.torch.messages import warn_at_caller
from gradscale.torch.names import names_of

# Sampled steps are the second, fourth, eighth ..., and each multiple of this prime:
# some of them follow a write, also if the script writes in every n-th step only.
SAMPLE_EVERY = 61
MOST_NAMES = 5


class LastWrite(NamedTuple):
    """A parameter as the optimizer left it.

    Attributes:
        version: Its version counter.
        address: Of its first element.
        storage: Its memory, held weakly, so that no other memory has the same key.
    """

    version: int | None = None
    address: int | None = None
    storage: StorageWeakRef | None = None


class DataCheck:
    """Samples whether parameters were written through `.data`, and reports it once.

    Such a write does not change the version counter, so the next step overwrites it
    with the rounded master. No host sync: a sample is read at the next one.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._reported = False
        self._sample: AsyncTensor | None = None

    def begin_step(self) -> bool:
        """Count a step; return whether it is sampled."""
        self._steps += 1
        steps = self._steps
        return (
            not self._reported
            and steps > 1
            and (steps & (steps - 1) == 0 or steps % SAMPLE_EVERY == 0)
            and can_touch_host()
        )

    def compare(self, masters: "Masters", names_from: list[Any]) -> None:
        """Compare each parameter with its rounded master; report an earlier sample.

        Args:
            masters: Already updated from the writes that autograd counted.
            names_from: The sources of `names_of`.
        """
        if self._sample is not None:
            self._report(self._sample, masters.owners, names_from)
        differ = [
            # NaN is unequal to itself.
            ((master.to(param.dtype) != param) & (param == param)).any()
            for param, master in zip(masters.params, masters.masters, strict=True)
        ]
        self._sample = AsyncTensor(torch.stack(differ))
        if not self._sample.pending:
            self._report(self._sample, masters.owners, names_from)
            self._sample = None

    def _report(
        self, sample: AsyncTensor, owners: list[Tensor], names_from: list[Any]
    ) -> None:
        flags = sample.values().tolist()
        # Another length: the parameters have changed since the sample.
        if self._reported or len(flags) != len(owners) or not any(flags):
            return
        self._reported = True
        names = names_of(list(compress(owners, flags)), names_from)
        more = len(names) - MOST_NAMES
        listed = ", ".join(names[:MOST_NAMES]) + (f" and {more} more" * (more > 0))
        warn_at_caller(
            GradscaleWarning(
                f"After a step, {listed} was written to through .data. Such a write "
                "does not change the version counter, so the next step overwrites it "
                "with the rounded float32 master. Write to the parameter itself under "
                "torch.no_grad(), or pass check_data=True to the optimizer, to "
                "master_weights() or to gradscale.apex's amp.initialize(). Reported "
                "once.",
                code="GS124",
            )
        )


class Masters:
    """The f32 masters of some half-precision parameters.

    Attributes:
        owners: The parameters as the optimizer holds them.
        params: float[...] each, the same or their local parts.
        masters: f32[...] each.
    """

    def __init__(
        self,
        owners: list[Tensor],
        params: list[Tensor],
        masters: list[Tensor],
        writes: Sequence[LastWrite],
        check: DataCheck,
    ) -> None:
        """Hold the tensors; none is read or written.

        Args:
            owners, params, masters: See the attributes.
            writes: The last write of each parameter.
            check: Lives as long as the optimizer.
        """
        self.owners, self.params, self.masters = owners, params, masters
        self._check = check
        self._versions: Sequence[int | None] = [write.version for write in writes]
        self._addresses: Sequence[int | None] = [write.address for write in writes]
        self._storages = [write.storage for write in writes]
        self._storage_keys: Sequence[int | None] = [
            None if storage is None else storage.cdata for storage in self._storages
        ]

    def update_(
        self,
        addresses: Sequence[int] | None,
        names_from: list[Any],
        *,
        check_data: bool,
    ) -> None:
        """Copy externally written parameters into their masters. No host sync.

        An element that still equals its rounded master keeps the digits of the master.

        Args:
            addresses: Of `params`; None if they are not known.
            names_from: The sources of `names_of`, for reports.
            check_data: Compare all parameters, also those with an unchanged version.
        """
        versions = tensor_list.versions(self.owners)
        if addresses is None:
            addresses = tensor_list.addresses(self.params)
        keys = tensor_list.storages(self.params)
        now = versions, addresses, keys
        before = self._versions, self._addresses, self._storage_keys
        both = zip(self.params, self.masters, strict=True)
        if check_data:
            self._take(both)
        elif now != before:
            pairs = zip(zip(*now, strict=True), zip(*before, strict=True), strict=True)
            self._take(compress(both, [one != other for one, other in pairs]))
        self._addresses = addresses
        if keys != self._storage_keys:
            storages = (param.untyped_storage() for param in self.params)
            self._storages = list(map(StorageWeakRef, storages))
            self._storage_keys = keys
        # On other devices, reading the sample would wait for the device.
        sampled = self.params[0].device.type in ("cpu", "cuda") and not check_data
        if sampled and self._check.begin_step():
            self._check.compare(self, names_from)

    @staticmethod
    def _take(pairs: Any) -> None:
        for param, master in pairs:
            same = master.to(param.dtype) == param
            master.copy_(torch.where(same, master, param.to(master.dtype)))

    def note_own_write(self) -> None:
        """Record the parameters as the optimizer has left them."""
        self._versions = tensor_list.versions(self.owners)

    def last_writes(self) -> dict[int, LastWrite]:
        """Return the last write of each parameter, by its id."""
        writes = map(LastWrite, self._versions, self._addresses, self._storages)
        return dict(zip(map(id, self.owners), writes, strict=True))
