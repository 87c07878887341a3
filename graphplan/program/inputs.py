"""A program's inputs: fed tensors and host work are copied to static memory, and the step's changes copied back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from graphplan.backends.backend import TracedValues
from graphplan.compare.moving import copy_in
from graphplan.environment.devices import current_stream, is_accelerator, module_of, synchronize
from graphplan.feed.buffers import Buffers
from graphplan.feed.signature import Feed, shared_leaf
from graphplan.owners.slots import Walk
from graphplan.plan.plan import Plan
from graphplan.program.shared_buffers import SharedBuffer, find_shared
from graphplan.tensors.storages import storage_id, without_overlap

_wants_grad = attrgetter("requires_grad")
_LARGE = 2**22
"""Minimum bytes of an input for which a copy takes longer than the overhead of staging it on another stream."""
_FEW = 3
"""Maximum inputs that are faster copied one by one: from host memory, a foreach call also makes one copy each."""


MEMORY_IS_FED = (
    "the step changes memory that an argument shares with an owner or with another argument; a replay uses copies and "
    "would not change that memory: pass clones"
)
ELSEWHERE = (
    "the arguments have other addresses than in the captured call, and copy_roles lacks input, so they are not "
    "copied: pass tensors in the same memory each time, or add input to copy_roles"
)


class HostInputs:
    """The host's part of one program; ``walk`` has the owners' tensors that it reads."""

    def __init__(self, traced: TracedValues, walk: Walk) -> None:
        assert traced.host_program is not None
        self._program = traced.host_program
        self._transfers = [transfer for transfer in traced.transfers if not transfer.is_constant]
        self._tensors = {number: walk.slots[path].tensors()[0] for number, path in self._program.sources.items()}

    def load(self, *, is_recorded: bool) -> None:
        """Run the host's part again; to finish the recorded call, copy the values that this call has made."""
        if not is_recorded:
            self._program.run(self._tensors)
            return
        for transfer in self._transfers:
            transfer.load(transfer.value)


class StaticInputs:
    """The static tensor of each leaf: a view of ``buffers``, or a shared buffer; the leaf itself without ``copies``."""

    def __init__(self, plan: Plan, feed: Feed, buffers: Buffers, *, copies: bool) -> None:
        mutated = {external.leaf for external in plan.inputs if external.mutated}
        self._of_callers = _find_shared(plan, feed, mutated) if copies else {}
        self.by_leaf = _fill(plan, feed, buffers, self._of_callers) if copies else {}
        # Keep the caller's memory alive, so that no other tensor can get its address.
        self._kept = {} if copies else {i: leaf.detach() for i, leaf in feed.tensors()}
        self.adopted = {index: leaf.data_ptr() for index, leaf in self._kept.items()}
        in_place = {**self._kept, **{index: self.by_leaf[index] for index in self._of_callers}}
        self.changed_in_place = [tensor for index, tensor in in_place.items() if index in mutated]
        """Inputs that replays change in the caller's memory."""
        self._indices = list(self.by_leaf)
        self._targets = [without_overlap(static.detach()) for static in self.by_leaf.values()]
        self._device = plan.device
        self._staging: _Staging | None = None
        self._shared = {index for index, static in self.by_leaf.items() if without_overlap(static) is not static}
        self.mutated = [(index, static) for index, static in self.by_leaf.items() if index in mutated]
        self.nbytes = sum(static.nbytes for static in self.by_leaf.values())

    @cached_property
    def _grads(self) -> list[tuple[int, Tensor]]:
        """Inputs that have a gradient after the recorded step; each run sets it on the leaves."""
        # A tensor read from the batch before the step may be a non-leaf by now.
        leaves = ((index, static) for index, static in self.by_leaf.items() if static.is_leaf)
        return [(index, static) for index, static in leaves if static.grad is not None]

    def misfit(self, feed: Feed) -> str | None:
        """Return why ``feed`` cannot be used (``ELSEWHERE``, ``MEMORY_IS_FED``); None if it can."""
        if any(feed.leaves[index].data_ptr() != at for index, at in self.adopted.items()):
            return ELSEWHERE
        is_shared = self.mutated and shared_leaf(feed, [index for index, _ in self.mutated]) is not None
        return MEMORY_IS_FED if is_shared else None

    def load(self, leaves: Sequence[Any]) -> None:
        """Copy the feed's tensors to the static ones."""
        indices, targets = self._indices, self._targets
        if self._of_callers:
            indices, targets = self._not_there(leaves)
        sources = [leaves[index] for index in indices]
        if self._shared:
            pairs = zip(sources, indices, strict=True)
            sources = [without_overlap(source) if index in self._shared else source for source, index in pairs]
        if self._staging is None:
            _copy(targets, sources)
            return
        _copy(targets, self._staging.fetch(sources))
        self._staging.give_back()

    def _not_there(self, leaves: Sequence[Any]) -> tuple[list[int], list[Tensor]]:
        """Return the indices of inputs that are not yet in their static memory, and the targets to copy them to."""
        found = [i for i, static in self.by_leaf.items() if leaves[i].data_ptr() != static.data_ptr()]
        for index in self._of_callers.keys() & found:
            # The copy overwrites results that callers may still hold: mark these as stale.
            self._of_callers[index].version += 1
        targets = dict(zip(self._indices, self._targets, strict=True))
        return found, [targets[index] for index in found]

    def give_back(self, leaves: Sequence[Any], results: Iterable[SharedBuffer] = ()) -> None:
        """After a run: copy changed inputs and input gradients to the caller's tensors, except tensors that the new
        ``results`` have overwritten.
        """
        if not self.mutated and not self._grads:
            return
        overwritten = {storage_id(buffer.tensor) for buffer in results}
        with torch.no_grad():
            for index, static in self.mutated:
                if not overwritten or storage_id(leaves[index]) not in overwritten:
                    leaves[index].copy_(static)
            for index, static in self._grads:
                assert static.grad is not None
                leaves[index].grad = static.grad.detach().clone()

    def stage(self) -> None:
        """From now on, copy large inputs from pinned host memory while the device still runs the previous replay."""
        if is_accelerator(self._device) and not self._of_callers and any(map(_is_stageable, self._targets)):
            self._staging = _Staging(self._targets, self._device)

    def unstage(self) -> None:
        """Undo :meth:`stage`."""
        self._staging = None

    @property
    def staged_bytes(self) -> int:
        """Bytes of the buffers in which inputs are staged."""
        return 0 if self._staging is None else self._staging.nbytes


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if len(sources) <= _FEW:
        copy_in(targets, sources)
        return
    if any(map(_wants_grad, sources)):
        sources = [source.detach() for source in sources]
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _find_shared(plan: Plan, feed: Feed, mutated: set[int | None]) -> dict[int, SharedBuffer]:
    """Return the shared buffers of leaves that are already in one, which the program can use without a copy."""
    storages = Counter(storage_id(leaf) for _, leaf in feed.tensors())
    found = {index: find_shared(leaf) for index, leaf in feed.tensors()}
    return {
        index: buffer
        for index, buffer in found.items()
        if buffer is not None
        and (buffer.writable or index not in mutated)
        and storages[storage_id(buffer.tensor)] == 1
        and buffer.tensor.device == plan.device
    }


def _fill(plan: Plan, feed: Feed, buffers: Buffers, of_callers: Mapping[int, SharedBuffer]) -> dict[int, Tensor]:
    """Return static tensors by leaf, filled with the fed values."""
    inputs = {index: buffer.tensor for index, buffer in of_callers.items()}
    for index, leaf in feed.tensors():
        if index not in of_callers:
            inputs[index] = buffers.view(index, leaf, plan.device)
            target = without_overlap(inputs[index])
            with torch.no_grad():
                target.copy_(leaf if target is inputs[index] else without_overlap(leaf))
    return dict(sorted(inputs.items()))


class _Staging:
    """Staging of large inputs from pinned host memory while the device still runs the previous replay. A side stream
    copies them to separate buffers, and only the copy from there to the static input waits for the replay. Two events
    order the streams: a buffer is read after it was filled, and filled after it was read.
    """

    def __init__(self, targets: Sequence[Tensor], device: torch.device) -> None:
        module = module_of(device)
        self._device, self._module = device, module
        with torch.inference_mode(False):
            self._buffers = {
                index: torch.empty_like(target) for index, target in enumerate(targets) if _is_stageable(target)
            }
        self._stream = module.Stream(device)
        for buffer in self._buffers.values():
            # The allocator must not reuse its memory before this stream is done.
            buffer.record_stream(self._stream)
        self._filled, self._read = module.Event(), module.Event()
        # Work that used this memory before may still be running.
        self._read.record(current_stream(device))
        self._is_taken = False

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def fetch(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Return ``sources`` with buffers for large pinned ones. Queue copies of these, then call :meth:`give_back`."""
        found = list(sources)
        coming = [index for index in self._buffers if found[index].is_cpu and found[index].is_pinned()]
        if not coming:
            return found
        if self._is_taken:
            # The last call was interrupted before the event of its reads was recorded.
            synchronize(self._device)
        self._is_taken = True
        with torch.no_grad(), self._module.stream(self._stream):
            self._stream.wait_event(self._read)
            for index in coming:
                found[index] = self._buffers[index].copy_(found[index], non_blocking=True)
            self._filled.record(self._stream)
        current_stream(self._device).wait_event(self._filled)
        return found

    def give_back(self) -> None:
        """Record on the current stream that the buffers have been read."""
        if self._is_taken:
            self._read.record(current_stream(self._device))
            self._is_taken = False


def _is_stageable(target: Tensor) -> bool:
    """Return True if staging pays for ``target``, and a buffer would have its strides."""
    dense = torch.empty_like(target, device="meta").stride() == target.stride()
    return dense and target.nbytes >= _LARGE
