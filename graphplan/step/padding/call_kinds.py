"""Kinds of calls, and the capture sizes that they are padded to: what is found out once and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from graphplan.feed.signature import Feed
from graphplan.step.padding.layout import Layout, Padding
from graphplan.step.padding.shape_stats import ShapeStats
from graphplan.step.padding.shapes import Place
from graphplan.step.padding.slicing import Slicer

_MOST_SHAPES = 65536
_MOST_SIZES = 1024
_MOST_KINDS = 4096
"""Shapes that are counted, and capture sizes and kinds of calls that are remembered: literals among the arguments make
others of them."""


@dataclass(slots=True)
class Size:
    """One capture size: what is known of its results, its padded calls so far, and which of them is checked next."""

    slicer: Slicer = field(default_factory=Slicer)
    calls: int = 0
    next_check: int = 1


SizeT = TypeVar("SizeT", bound=Size)


@dataclass(slots=True)
class Kind(Generic[SizeT]):
    """Calls of one signature: how they are padded, and what is known of their capture size. ``sure_of`` is what was
    known of its results when that was enough to cut those of these calls.
    """

    layout: Layout
    size: SizeT
    fed: int
    padded: int
    sure_of: object = None

    @property
    def is_sure(self) -> bool:
        """Whether what is known of the results is enough to cut those of these calls."""
        slicer, layout = self.size.slicer, self.layout
        if slicer.known is None or self.sure_of is not slicer.known:
            self.sure_of = slicer.known if slicer.is_sure(layout.true, layout.sizes) else None
        return self.sure_of is not None


class Kinds(Generic[SizeT]):
    """Kinds of one function's calls. ``make_size`` makes what is kept of a capture size."""

    def __init__(self, padding: Padding, stats: ShapeStats, make_size: Callable[[], SizeT]) -> None:
        self._padding = padding
        self._stats = stats
        self._make_size = make_size
        self._sizes: dict[Hashable, SizeT] = {}
        self._kinds: dict[Hashable, Kind[SizeT]] = {}

    def get(self, feed: Feed) -> Kind[SizeT] | None:
        """The kind of calls like this one, if there was one before."""
        return self._kinds.get(feed.key)

    def learn(self, feed: Feed, places: Sequence[Place], device: torch.device | None) -> Kind[SizeT]:
        """What is the same for all calls like this one."""
        layout = self._padding.layout(feed, places, device)
        others = [key for index, key in enumerate(feed.key[1:]) if index not in layout.staged]
        shapes = tuple((memory.shape, memory.dtype) for memory in layout.staged.values())
        key = (feed.key[0], *others, *shapes)
        stats = self._stats
        if len(stats.shapes) < _MOST_SHAPES:
            stats.shapes.add((feed.key[0], *others, *(feed.leaves[index].shape for index in layout.staged)))
            stats.capture_sizes.add(key)
        if key not in self._sizes:
            if len(self._sizes) >= _MOST_SIZES:
                # Learnt again if it comes back.
                del self._sizes[next(iter(self._sizes))]
            self._sizes[key] = self._make_size()
        if len(self._kinds) >= _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        fed = sum(feed.leaves[index].numel() for index in layout.staged)
        padded = sum(memory.numel() for memory in layout.staged.values())
        kind = self._kinds[feed.key] = Kind(layout, self._sizes[key], fed, padded)
        return kind
