"""Device memory in pieces of its own.

torch's allocator takes memory from the device in pieces, of 20 MiB most often, and gives back none of which a part is
in use. What a run keeps, and was allocated among activations and gradients, so keeps pieces that are empty otherwise:
43 MiB of momentum of a ResNet-18 lie in 84.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def memory_apart(device: torch.device, nbytes: int) -> Iterator[None]:
    """Have this thread's memory on ``device`` come from a pool, where the device has ``nbytes`` free for it. What is
    unused of the pool goes back when torch's cache is next emptied.

    Not a ``torch.cuda.MemPool``: that empties the cache when it is destroyed, which ends the process if another thread
    captures, or the caller allocates from a pool of its own (torch 2.11).
    """
    if torch.cuda.get_allocator_backend() != "native" or nbytes > _free(device):
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    place = (index, torch.cuda.graph_pool_handle())
    torch._C._cuda_beginAllocateCurrentThreadToPool(*place)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(*place)
        torch._C._cuda_releasePool(*place)


def _free(device: torch.device) -> int:
    """Bytes that torch can have from the device, without what it has cached: a pool can neither use nor free that."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_reserved(device)
    return min(free, int(allowed))
