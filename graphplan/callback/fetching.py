"""Lightning's fetchers of batches, without what one loader of known length does not need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle


class Again(Iterator[Any]):
    """A fetcher whose next item is one that was taken from it already."""

    def __init__(self, fetcher: Any, item: Any) -> None:
        """``item`` was taken from ``fetcher``."""
        self._fetcher, self._item = fetcher, item

    def __next__(self) -> Any:
        """That item."""
        return self._item

    def __getattr__(self, name: str) -> Any:
        """Whatever else the fetcher has."""
        return getattr(self._fetcher, name)


def next_of(fetcher: Any) -> Any:
    """``next(fetcher)``, without its detours where one loader of known length is read in order."""
    loader = fetcher.iterator
    if (
        type(fetcher) is not _PrefetchDataFetcher
        or fetcher.length is None
        or fetcher.batches
        or fetcher.done
        or type(loader) is not CombinedLoader
        or type(loader._iterator) is not _MaxSizeCycle
        or not loader._spec.is_leaf()
    ):
        return next(fetcher)
    try:
        batches, batch_idx, dataloader_idx = next(loader._iterator)
    except StopIteration:
        fetcher.done = True
        raise
    fetcher.fetched += 1
    fetcher.done = fetcher.fetched >= fetcher.length
    return batches[0], batch_idx, dataloader_idx
