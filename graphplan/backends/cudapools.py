"""Memory pools of CUDA graphs, which eager work may use between replays, and cuBLAS workspaces."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from graphplan.tensors.attributes import has_memory
from graphplan.tensors.storages import whole_storage

_ALIGNED, _ROUNDED, _EXACT = 512, 2 * 2**20, 10 * 2**20
"""Bytes to which torch's allocator aligns tensors, and to which it rounds segments for tensors of at least ``_EXACT``
bytes, which then fill them.
"""


class PoolAllocation:
    """A context in which the current stream allocates from the pool of CUDA graphs, in autograd's threads too. The next
    replay overwrites that memory: tensors that eager work leaves there must be moved out before.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._place = (torch.cuda.current_device() if device.index is None else device.index, pool)
        self._before: set[int] = set()
        self._left: set[int] = set()

    @staticmethod
    def is_possible() -> bool:
        """Return True if torch's allocator supports it."""
        begin = getattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool", None)
        return begin is not None and torch.cuda.get_allocator_backend() == "native"

    def __enter__(self) -> PoolAllocation:
        self._before = self._used()
        torch._C._cuda_beginAllocateCurrentStreamToPool(*self._place)
        return self

    def __exit__(self, *exc: object) -> None:
        torch._C._cuda_endAllocateToPool(*self._place)
        torch._C._cuda_releasePool(*self._place)

    def move_out(self, tensors: Iterable[Tensor]) -> None:
        """Reallocate storages that lie in borrowed memory. Tensors keep their storage objects, so views stay valid."""
        # Listing the tensors may free others, so do it before looking at the pool.
        tensors = list(tensors)
        self._left = self._used() - self._before
        for tensor in tensors if self._left else ():
            if tensor.device.type == "cuda" and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() in self._left:
                    self._left.discard(storage.data_ptr())
                    _renew(storage)

    def move_out_all(self) -> None:
        """Move out every tensor that the garbage collector tracks, and their gradients, which Python may never have
        seen. This is slow: it visits every tracked object.
        """
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        tensors = list(filter(has_memory, found))
        with torch._C.DisableTorchFunctionSubclass():
            grads = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        self.move_out(tensors + grads)

    def is_over(self) -> bool:
        """Return True if no borrowed memory is in use any more."""
        if self._left:
            self._left = self._used() - self._before
        return not self._left

    def _used(self) -> set[int]:
        """Return the addresses of the pool's blocks in use."""
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
    """Return arguments for a snapshot of that pool without traces, if this torch takes them: that is much faster."""
    wanted = {"mempool_id": tuple(pool), "include_traces": False}
    return {name: wanted[name] for name in signature(torch.cuda.memory_snapshot).parameters if name in wanted}


def forget_workspaces() -> None:
    """Free the cuBLAS workspaces of all streams. Newer releases of torch free a stream's workspace with its first
    destroyed graph, while other graphs have its address. A workspace made in a capture is in that graph's own memory.
    """
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if forget is not None:
        forget()


@torch.no_grad()
def move(tensors: Sequence[Tensor], free: Callable[[], object]) -> None:
    """Reallocate the storages of ``tensors``, in their order, after ``free`` has freed the memory between them. Tensors
    keep their storage objects, so views stay valid. Without memory for copies, nothing is moved.
    """
    wholes = [whole_storage(tensor) for tensor in tensors if tensor.layout is torch.strided]
    # The copies fill a segment of their own, which can be freed because nothing else fits into it.
    sizes = [-(-whole.numel() // _ALIGNED) * _ALIGNED for whole in wholes]
    nbytes = max(_EXACT, -(-sum(sizes) // _ROUNDED) * _ROUNDED)
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=torch.cuda.current_device())
    except torch.OutOfMemoryError:
        return
    starts = accumulate(sizes, initial=0)
    copies = [memory[start:][: whole.numel()].copy_(whole) for whole, start in zip(wholes, starts, strict=False)]
    # The storages may belong to other streams, which must not reuse them before they are copied.
    torch.cuda.synchronize()
    for whole in wholes:
        whole.untyped_storage().resize_(0)
    free()
    for whole, copy in zip(wholes, copies, strict=True):
        whole.untyped_storage().resize_(copy.numel())
        whole.copy_(copy)


def _renew(storage: UntypedStorage) -> None:
    kept, nbytes = storage.clone(), storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    storage.copy_(kept)
