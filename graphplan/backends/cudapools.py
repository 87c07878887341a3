"""Memory of CUDA graphs: what eager work uses between their replays, and cuBLAS's workspaces."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from graphplan.tensors.attributes import has_memory


class Loan:
    """A context in which memory for the current stream comes from the pool of CUDA graphs, autograd's threads included.
    The next replay overwrites it: what eager work leaves there has to be moved out before.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._place = (torch.cuda.current_device() if device.index is None else device.index, pool)
        self._before: set[int] = set()
        self._left: set[int] = set()

    @staticmethod
    def is_possible() -> bool:
        """Return True if torch's allocator can do it."""
        begin = getattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool", None)
        return begin is not None and torch.cuda.get_allocator_backend() == "native"

    def __enter__(self) -> Loan:
        self._before = self._used()
        torch._C._cuda_beginAllocateCurrentStreamToPool(*self._place)
        return self

    def __exit__(self, *exc: object) -> None:
        torch._C._cuda_endAllocateToPool(*self._place)
        torch._C._cuda_releasePool(*self._place)

    def move_out(self, tensors: Iterable[Tensor]) -> None:
        """Give what lies in memory that was borrowed other memory. Tensors keep their storages, and views see it."""
        # Looking for them may let go of others.
        tensors = list(tensors)
        self._left = self._used() - self._before
        for tensor in tensors if self._left else ():
            if tensor.device.type == "cuda" and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() in self._left:
                    self._left.discard(storage.data_ptr())
                    _renew(storage)

    def move_out_all(self) -> None:
        """Move out every tensor that Python has, which takes as long as a look at each of its objects."""
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        self.move_out(filter(has_memory, tensors))

    def is_over(self) -> bool:
        """Return True if nothing that was borrowed is in use any more."""
        if self._left:
            self._left = self._used() - self._before
        return not self._left

    def _used(self) -> set[int]:
        """Addresses of what is in use in the pool."""
        _, pool = self._place
        found = set()
        for segment in torch.cuda.memory_snapshot(**_only(pool)):
            if tuple(segment["segment_pool_id"]) != tuple(pool):
                continue
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found.add(address)
                address += block["size"]
        return found


def _only(pool: Any) -> dict[str, Any]:
    """How to ask for a snapshot of that pool alone, without a history, as far as this torch can: it is much faster."""
    wanted = {"mempool_id": tuple(pool), "include_traces": False}
    return {name: wanted[name] for name in signature(torch.cuda.memory_snapshot).parameters if name in wanted}


def forget_workspaces() -> None:
    """Have torch free each stream's cuBLAS workspace. Newer releases free it with the first graph of that stream that
    is destroyed, while others have its address. One that is made anew in a capture lies in that graph's own memory.
    """
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if forget is not None:
        forget()


def _renew(storage: UntypedStorage) -> None:
    kept, nbytes = storage.clone(), storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    storage.copy_(kept)
