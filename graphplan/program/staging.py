"""Large inputs on their way from pinned host memory, while the device is still busy with the replay before.

A copy into a static input has to wait until the replay before has read it. The long part of it, over the bus, need not:
it goes to a buffer of its own, on a stream of its own, and only the copy from there waits for the replay. Two events
keep the streams apart: the buffer is read after it was filled, and filled after it was read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphplan.environment.devices import current_stream, module_of, synchronize

LARGE = 2**22
"""Bytes of an input from which a copy takes longer than to have it done elsewhere."""


class Staging:
    """Buffers for the large ones among ``targets``, which are on an accelerator."""

    def __init__(self, targets: Sequence[Tensor], device: torch.device) -> None:
        module = module_of(device)
        self._device, self._module = device, module
        with torch.inference_mode(False):
            self._buffers = {
                index: torch.empty_like(target) for index, target in enumerate(targets) if is_stageable(target)
            }
        self._stream = module.Stream(device)
        for buffer in self._buffers.values():
            # Later uses of its memory have to wait for this stream as well.
            buffer.record_stream(self._stream)
        self._filled, self._read = module.Event(), module.Event()
        # What the memory was used for before may still be under way.
        self._read.record(current_stream(device))
        self._is_taken = False

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def fetch(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """``sources``, but the buffer for what has one and lies in pinned host memory, as the current stream will find
        it. :meth:`give_back` has to follow once copies from there are queued.
        """
        found = list(sources)
        coming = [index for index in self._buffers if found[index].is_cpu and found[index].is_pinned()]
        if not coming:
            return found
        if self._is_taken:
            # The last call was broken off, and when the buffers were read was not noted.
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
        """The buffers have been read when the current stream gets here."""
        if self._is_taken:
            self._read.record(current_stream(self._device))
            self._is_taken = False


def is_stageable(target: Tensor) -> bool:
    """Whether a buffer pays for ``target`` and has its strides."""
    dense = torch.empty_like(target, device="meta").stride() == target.stride()
    return dense and target.nbytes >= LARGE
