"""Lightning's fetchers of batches, without what one loader of known length does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle


class Again(Iterator[Any]):
    """A fetcher whose next batch is one that was taken from it already."""

    def __init__(self, fetcher: Any, batch: Any) -> None:
        """``batch`` was taken from ``fetcher``."""
        self._fetcher, self._batch = fetcher, batch

    def __next__(self) -> tuple[Any, int, int]:
        """That batch, and what Lightning's loop leaves out of account."""
        return self._batch, 0, 0

    def __getattr__(self, name: str) -> Any:
        """Whatever else the fetcher has."""
        return getattr(self._fetcher, name)


def reader(fetcher: Any) -> Callable[[], Any]:
    """What gives the next batch of ``fetcher``, without its detours where one loader of known length is read in order.

    Raises:
        StopIteration: by the function that it returns, where there is no further batch.
    """
    loader, kind = fetcher.iterator, type(fetcher)
    cycle = getattr(loader, "_iterator", None)
    is_plain = kind is _PrefetchDataFetcher and type(loader) is CombinedLoader and type(cycle) is _MaxSizeCycle
    if not is_plain or fetcher.length is None or not loader._spec.is_leaf():
        return lambda: next(fetcher)[0]

    def read() -> Any:
        if fetcher.iterator is not loader or loader._iterator is not cycle or fetcher.batches or fetcher.done:
            return next(fetcher)[0]
        try:
            batch = next(cycle.iterators[0])
        except StopIteration:
            cycle._consumed[0] = fetcher.done = True
            raise
        cycle._idx += 1
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= fetcher.length
        return batch

    return read
