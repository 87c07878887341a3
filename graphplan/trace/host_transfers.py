"""Tensors that a step copies from host memory to the device: ``torch.randn(n).type_as(x)``, ``weights.to(device)``.

A graph cannot hold a copy from temporary host memory. A tensor that is made from Python numbers alone is the same in
each step, and is copied once. A tensor that the step draws on the host, or computes from an owner's tensor there, is
made again before each replay by the traced operators, and copied to where the recording reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphplan.feed.signature import is_dense
from graphplan.owners.slots import Slot
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.copying import same_bits
from graphplan.tensors.storages import storage_id
from graphplan.trace.batch_reads import RESTORE, TRANSFER, Call
from graphplan.trace.call_recorder import CallRecorder
from graphplan.trace.host_reads import CodePosition
from graphplan.trace.operator_schemas import OperatorCall, tensors_in


@dataclass(slots=True, eq=False)
class Transfer:
    """A tensor in host memory that a step copies to the device at ``place``, or uses as an index of a device's tensor.

    Attributes:
        value: its value in the trace, or in the latest capture.
        copy: memory on the device, which recordings read in its place.
        is_constant: whether it is made from Python numbers alone.
    """

    place: CodePosition
    value: Tensor
    copy: Tensor
    is_constant: bool = False

    @classmethod
    def of(cls, place: CodePosition, tensor: Tensor, device: torch.device, *, is_constant: bool = False) -> Transfer:
        """Return the transfer of ``tensor``, with its current value, to ``device``."""
        with torch.inference_mode(False), torch.no_grad():
            value = tensor.detach().clone()
            return cls(place, value, value.to(device), is_constant)

    def takes(self, tensor: Tensor) -> bool:
        """Return True if a capture may read the copy in place of ``tensor``, whose value this transfer then takes."""
        if self.is_constant:
            return same_bits(self.value, tensor)
        if (self.value.shape, self.value.dtype) != (tensor.shape, tensor.dtype):
            return False
        self.value = tensor.detach().clone()
        return True

    def load(self, tensor: Tensor) -> None:
        """Copy ``tensor`` to the memory that recordings read."""
        self.copy.copy_(tensor, non_blocking=True)


class HostRecorder(CallRecorder):
    """A recorder of what a step on a device computes in host memory from numbers, draws and owners' tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, tuple[str, Tensor]] = {}

    def meet(self, tensor: Tensor, slots: Sequence[Slot]) -> None:
        """Record the first use of a tensor, which owners hold in ``slots``."""
        for slot in slots if tensor.device.type == "cpu" else ():
            held = slot.get()
            if type(held) in PLAIN_KINDS and is_dense(held) and storage_id(held) == storage_id(tensor):
                self._sources.setdefault(self._begin_with(held), (slot.path, held))

    def _may_repeat(self, call: OperatorCall, made: Sequence[Tensor]) -> bool:
        return call.schema.is_certain or (call.schema.is_native and call.schema.is_random)

    def record_transfer(self, transfer: Transfer, tensor: Tensor) -> bool:
        """Record a transfer of ``tensor``. Return False if it cannot be made again before a replay."""
        if tensor.requires_grad or not self.has(tensor):
            return False
        self._add(transfer.load, TRANSFER, (tensor,), {}, [])
        return True

    def program(self) -> HostProgram | None:
        """Return the operators that repeat the transfers and draws; None if there are none."""
        draws = any(call.draws for call in self._calls)
        calls = self._leading_to(lambda call: call.has_effect and (draws or call.name != RESTORE))
        used = {slot.number for call in calls for slot in call.slots()}
        sources = {number: path for number, (path, _) in self._sources.items() if number in used}
        return HostProgram(calls, sources, self._covered(calls)) if calls else None

    def _covered(self, calls: Sequence[Call]) -> frozenset[str]:
        """Return the paths of owners' tensors that only ``calls`` use."""
        repeated, covered = set(map(id, calls)), set[str]()
        for path, held in self._sources.values():
            of_source = {storage_id(held)}
            is_covered = True
            for call in self._calls:
                if not of_source.isdisjoint(call.given):
                    of_source |= call.changed
                    is_covered &= id(call) in repeated
            if is_covered:
                covered.add(path)
        return frozenset(covered)


class HostProgram:
    """Operators that run on the host before each replay: those that draw there, those that copy to the device, and all
    that they depend on. ``sources`` are the paths of owners' tensors from which they start, by number. The step uses
    the paths in ``covers`` for nothing else.
    """

    def __init__(self, calls: Sequence[Call], sources: Mapping[int, str], covers: frozenset[str]) -> None:
        self._calls, self.sources, self.covers = calls, sources, covers

    def run(self, tensors: Mapping[int, Tensor]) -> None:
        """Run the operators, with the owners' ``tensors`` by number."""
        known = dict(tensors)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for call in self._calls:
                known.update(zip(call.made, tensors_in(call.repeat(known)), strict=False))
