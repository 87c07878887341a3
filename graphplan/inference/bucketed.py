"""Calls at capture sizes: pad, run, cut, and now and then compare with the call as it came."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphplan.errors import OptionError, PaddingError, SkipReason
from graphplan.inference.buckets import Ladders
from graphplan.inference.effects import Effects
from graphplan.inference.ledger import ShapeStats
from graphplan.inference.options import ServeOptions
from graphplan.inference.padding import Padded, Padding
from graphplan.inference.shapes import Dynamic, Place
from graphplan.inference.slicing import Slicer, distance, result_leaves, tolerance
from graphplan.owners import storage_id, walk_owners
from graphplan.program import StaticOutput, plain
from graphplan.signature import Feed, asks_for_gradients, leaf_key
from graphplan.step import ServedStep
from graphplan.verify import find_room

_MOST_SHAPES = 65536
_MOST_SIZES = 1024
"""Shapes that are counted, and capture sizes that are remembered: literals among the arguments make others of them."""


@dataclass(slots=True)
class _Size:
    """One capture size: what is known of its results, its padded calls so far, and which of them is checked next."""

    slicer: Slicer = field(default_factory=Slicer)
    calls: int = 0
    next_check: int = 0
    refusal: PaddingError | None = None


class Bucketed:
    """Serves the calls of one step at capture sizes."""

    def __init__(self, fn: Callable[..., Any], step: ServedStep, options: ServeOptions, stats: ShapeStats) -> None:
        assert options.buckets is not None
        self.ladders = Ladders(options.buckets)
        self.padding = Padding(fn, self.ladders, Dynamic(fn, options.dynamic), options.pad, options.mask)
        self._step = step
        self._stats = stats
        self._device = options.step.feed_device
        self._schedule = options.step.schedule
        self._allow = options.allow
        self._sizes: dict[Hashable, _Size] = {}

    def call(self, feed: Feed) -> Any:
        """One call of dense tensors.

        Raises:
            PaddingError: if padding changes what comes out.
        """
        places = self.padding.places(feed)
        self._check_dims(feed, places)
        misfit = "none of the arguments has a dimension with a ladder" if not places else ""
        misfit = misfit or self.padding.misfit(feed, places) or ""
        if misfit:
            return self._leave(feed, places, SkipReason.BUCKET, misfit)
        if any(map(asks_for_gradients, feed.leaves)) or self._trains():
            return self._leave(feed, places, SkipReason.GRADIENT)
        padded = self.padding.pad(feed, places, self._device)
        size = self._size(feed, padded)
        if size.refusal is not None:
            return self._leave(feed, places, SkipReason.PADDING, str(size.refusal))
        return self._run(feed, places, padded, size)

    def _check_dims(self, feed: Feed, places: Sequence[Place]) -> None:
        """Refuse a ladder that nothing is ever padded by.

        Raises:
            OptionError: naming its dimension.
        """
        missing = [dim for dim in self.ladders.dims if places and all(dim != padded for _, padded in places)]
        if missing:
            raise OptionError(
                f"buckets has sizes for dimension {missing[0]}, which is a dynamic one of none of the arguments "
                f"({', '.join(feed.names())}); expected one that may vary: by default, the last of several may not. "
                f"Name it: dynamic={{'argument': ({missing[0]},)}}"
            )

    def _leave(self, feed: Feed, places: Sequence[Place], reason: SkipReason, detail: str = "") -> Any:
        """The call as it came."""
        return self._step.skip(*self.padding.leave(feed, places, self._device), reason, detail)

    def _trains(self) -> bool:
        """Whether gradients could flow to parameters: what is padded lies in memory that the next call overwrites."""
        if not torch.is_grad_enabled():
            return False
        found = [owner for owner in self._step.owners.values() if isinstance(owner, nn.Module)]
        return any(asks_for_gradients(param) for owner in found for param in owner.parameters())

    def _size(self, feed: Feed, padded: Padded) -> _Size:
        others = [leaf_key(leaf) for index, leaf in enumerate(feed.leaves) if index not in padded.staged]
        shapes = tuple((memory.shape, memory.dtype) for memory in padded.staged.values())
        key = (feed.key[0], *others, *shapes)
        stats = self._stats
        if len(stats.shapes) < _MOST_SHAPES:
            stats.shapes.add((feed.key[0], *others, *(feed.leaves[index].shape for index in padded.staged)))
            stats.capture_sizes.add(key)
        stats.unpadded_elements += sum(feed.leaves[index].numel() for index in padded.staged)
        stats.padded_elements += sum(memory.numel() for memory in padded.staged.values())
        if key not in self._sizes:
            if len(self._sizes) >= _MOST_SIZES:
                # Learnt again if it comes back.
                del self._sizes[next(iter(self._sizes))]
            self._sizes[key] = _Size(next_check=self._schedule.after(0))
        return self._sizes[key]

    def _run(self, feed: Feed, places: Sequence[Place], padded: Padded, size: _Size) -> Any:
        versions = {index: memory._version for index, memory in padded.staged.items()}
        size.calls += padded.is_padded
        is_sure = not padded.is_padded or size.slicer.is_sure(padded.true, padded.sizes)
        room, reason = None, ""
        if padded.is_padded and (size.calls == size.next_check or not is_sure):
            room, reason = self._find_room(padded)
            size.next_check = self._schedule.after(size.calls)
        if reason and not is_sure:
            return self._leave(feed, places, SkipReason.CHECK, reason)
        effects = Effects(self._step.owners, self._allow, room) if room is not None else None
        result = self._step(*padded.args, **padded.kwargs)
        leaves, structure = result_leaves(result)
        mutated = [index for index, memory in padded.staged.items() if memory._version != versions[index]]
        size.slicer.meet(leaves, structure, padded.sizes)
        if effects is not None:
            return self._check(feed, places, padded, size, leaves, mutated, effects)
        for index in mutated:
            feed.leaves[index].copy_(padded.own_part(index))
        return size.slicer.cut([_handed_on(leaf, padded, feed) for leaf in leaves], padded.true)

    def _find_room(self, padded: Padded) -> tuple[torch.device | None, str]:
        """Where copies of what the owners hold can lie during a check; or why nowhere."""
        held = {id(t): t for slot in walk_owners(self._step.owners).slots.values() for t in slot.tensors()}
        where = next((memory.device for memory in padded.staged.values()), torch.device("cpu"))
        return find_room(sum(tensor.nbytes for tensor in held.values()), where)

    def _check(
        self,
        feed: Feed,
        places: Sequence[Place],
        padded: Padded,
        size: _Size,
        leaves: list[Any],
        mutated: list[int],
        effects: Effects,
    ) -> Any:
        """Make the call as it came, too: its outcome stands."""
        kept = [plain(leaf).clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        effects.undo()
        expected = self._leave(feed, places, SkipReason.CHECK)
        self._stats.checked += 1
        problems = size.slicer.learn(expected, kept, padded.true, padded.sizes)
        problems += effects.problems()
        for index in mutated:
            own, part = feed.leaves[index], padded.own_part(index)
            if distance(own.to(part.device), part) > tolerance(own.dtype):
                problems.append(f"{feed.names()[index]}, which the function changes, differs")
        if problems:
            sizes = ", ".join(dict.fromkeys(f"{true} to {padded.sizes[place]}" for place, true in padded.true.items()))
            size.refusal = PaddingError(
                f"padding from {sizes} changes what comes out: {'; '.join(problems[:3])}. Expected the same as without "
                "padding, within rounding: have the function leave the padding out (mask= names an argument that says "
                "what is real), pad with another value (pad=), name the dimensions that may be padded (dynamic=), or "
                "pass shapes='exact'. What came out without padding stands",
                result=expected,
            )
            self._step.refuse(size.refusal)
        return expected


def _handed_on(leaf: Any, padded: Padded, feed: Feed) -> Any:
    """What the caller may have of a padded call: its own tensor where the function returns it, and nothing that lies
    in memory which the next call overwrites.
    """
    if not isinstance(leaf, Tensor) or isinstance(leaf, StaticOutput):
        return leaf
    for index, memory in padded.staged.items():
        if leaf is memory:
            return feed.leaves[index]
        if storage_id(leaf) == storage_id(memory):
            return leaf.clone()
    return leaf
