"""Device memory in pieces of its own.

torch's allocator takes memory from the device in pieces, of 20 MiB most often, and gives back none of which a part is
in use. What a run keeps, and was allocated among activations and gradients, so keeps pieces that are empty otherwise:
43 MiB of momentum of a ResNet-18 lie in 84.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class MemoryApart:
    """Contexts in which this thread's memory on ``device`` comes from a pool. What is unused of it goes back to the
    device with this object; what is in use, when it is freed and the cache is emptied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self) -> AbstractContextManager[object]:
        """The context; one that changes nothing where torch, or another allocator than its own, has no such pools."""
        kind, use = (getattr(torch.cuda, name, None) for name in ("MemPool", "use_mem_pool"))
        if kind is None or use is None or torch.cuda.get_allocator_backend() != "native":
            return nullcontext()
        if self._pool is None:
            self._pool = kind()
        context: AbstractContextManager[object] = use(self._pool, self._device)
        return context
