"""Tensors in a ``functools.lru_cache``: no attribute leads to them, only a call with the same arguments."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

_Function: Any = type(functools.lru_cache(lambda: None))


class Cached(NamedTuple):
    """A ``tensor`` that ``function`` has cached: under ``key`` in the dictionary ``results`` of an unbounded cache, or
    in the list of a bounded one.
    """

    tensor: Tensor
    function: Any
    results: dict[Any, Any] | None = None
    key: Any = None

    def get(self) -> Tensor | None:
        """Return the tensor; None if the cache no longer holds it."""
        if self.results is not None:
            return self.tensor if self.results.get(self.key) is self.tensor else None
        return self.tensor if any(held is self.tensor for held in gc.get_referents(self.function)) else None


def find_cached(tensors: Sequence[Tensor]) -> dict[int, Cached]:
    """Return the cache entries of ``tensors``, by tensor id. It takes as long as one or two garbage collections."""
    holders = gc.get_referrers(*tensors)
    spaces = [holder for holder in holders if type(holder) is dict]
    functions = {id(f): f for f in (*holders, *(gc.get_referrers(*spaces) if spaces else ())) if type(f) is _Function}
    wanted = {id(tensor) for tensor in tensors}
    found = {}
    for function in functions.values():
        for held in gc.get_referents(function):
            if id(held) in wanted:
                found[id(held)] = Cached(held, function)
            elif type(held) is dict:
                found.update({id(t): Cached(t, function, held, key) for key, t in held.items() if id(t) in wanted})
    return found
