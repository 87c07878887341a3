"""Decide which fed host values are part of a step's keys: those that stay the same, and those that the step reads.

Keys leave out values that vary or that no key can hold, and host tensors fed beside tensors on a device; traces get
placeholders for them. Once a trace reads a value, its whole list is in the key, or the call is refused.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphplan.errors import FeedError, GraphPlanError
from graphplan.feed.call_arguments import is_callers
from graphplan.feed.placeholders import Placeholder, ReadSignal, index_of, is_placeholder
from graphplan.feed.signature import Feed, Unread, leaf_key, named_key, names_in
from graphplan.tensors.trees import Literals, flatten_result, rebuild

_SHAPES = 256  # Maximum number of call structures that are remembered.
_FEW = (bool, int, float, complex, Enum, type(None), torch.dtype, torch.device, torch.memory_format)
"""Types of values that mostly select a branch."""
_VALUES = 8
"""Maximum number of different values of the types ``_FEW``, per place or list, that are part of the key."""
_Group = tuple[str, bool]
"""A unit (the path of a leaf, or of its list) and whether the values have types of ``_FEW``."""
_IN_C = torch.Generator.__module__
_NUMBERED = re.compile(r"\[\d+\]$")


class _Shape:
    """The units of one structure: a path per leaf (that of its list, if that has no tensors), and the keys seen."""

    def __init__(self, structure: Any, leaves: Sequence[Any]) -> None:
        self.structure = structure
        names = names_in(structure)
        parents = [_NUMBERED.sub("", name) for name in names]
        mixed = {parent for parent, leaf in zip(parents, leaves, strict=True) if isinstance(leaf, Tensor)}
        pairs = zip(names, parents, strict=True)
        self.units = [name if parent in mixed or parent == "args" else parent for name, parent in pairs]
        self.seen: dict[_Group, set[Hashable]] = {}
        devices = [leaf.device for leaf in leaves if isinstance(leaf, Tensor)]
        self.home = next((d for d in devices if d.type != "cpu"), None) if len(set(devices)) > 1 else None
        """The step's device, if tensors on several devices are fed. Those on the CPU are host values."""


class UnreadValues:
    """The fed values that one step's keys leave out."""

    def __init__(self) -> None:
        self._shapes: dict[Hashable, _Shape] = {}
        self._free: set[str] = set()
        self._read: set[str] = set()

    def keys(self, structure: Any, leaves: Sequence[Any]) -> tuple[list[Hashable], frozenset[int]]:
        """Return the leaves' keys and the indices left out. Raises FeedError for a leaf that is read and has no key."""
        known = self._shape(structure, leaves)
        if known.home is None and all(isinstance(leaf, Tensor) for leaf in leaves):
            return list(map(leaf_key, leaves)), frozenset()
        keys: list[Hashable] = [None] * len(leaves)
        groups: dict[_Group, list[int]] = {}
        for index, leaf in enumerate(leaves):
            if type(leaf).__module__ == _IN_C:
                # C code would trust a placeholder's `__class__` and take it for the real object: always key these.
                keys[index] = named_key(structure, index, leaf)
            elif not isinstance(leaf, Tensor):
                groups.setdefault((known.units[index], isinstance(leaf, _FEW)), []).append(index)
            elif known.home is None or leaf.device.type != "cpu":
                keys[index] = leaf_key(leaf)
            elif known.units[index] in self._read:
                raise FeedError(
                    f"{names_in(structure)[index]} is on {leaf.device} and the step reads it beside tensors on "
                    f"{known.home}; a replay would keep its first values. Move it before the call, pass Python "
                    "numbers instead (each value gets its own program), or do not pass it"
                )
        for group, indices in groups.items():
            for index, key in zip(indices, self._keys(known, group, indices, leaves), strict=True):
                keys[index] = key
        unread = frozenset(index for index, key in enumerate(keys) if key is None)
        return [(Unread, type(leaf)) if key is None else key for key, leaf in zip(keys, leaves, strict=True)], unread

    def _shape(self, structure: Any, leaves: Sequence[Any]) -> _Shape:
        known = self._shapes.get(structure)
        if known is None:
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            known = self._shapes[structure] = _Shape(structure, leaves)
        return known

    def _keys(self, shape: _Shape, group: _Group, indices: Sequence[int], leaves: Sequence[Any]) -> Sequence[Hashable]:
        """Return the keys of a group's values; None for a value that is left out."""
        unit, is_few = group
        if unit in self._read:
            return [named_key(shape.structure, index, leaves[index]) for index in indices]
        literals = [leaf_key(leaves[index]) if isinstance(leaves[index], Literals) else None for index in indices]
        if not is_few and unit in self._free:
            return literals
        try:
            content = tuple(leaf_key(leaves[index]) for index in indices)
        except FeedError:
            self._free.add(unit)
            return literals
        seen = shape.seen.setdefault(group, set())
        if len(seen) < (_VALUES if is_few else 1):
            seen.add(content)
        if content in seen:
            return content
        if not is_few:
            self._free.add(unit)
        return literals

    def mark(self, feed: Feed, indices: Iterable[int]) -> None:
        """Mark the units of the values at ``indices`` of ``feed`` as read, from now on."""
        shape = self._shape(feed.structure, feed.leaves)
        self._read.update(shape.units[index] for index in indices)


class Placeholders:
    """Replace values of a feed by placeholders, in ``feed``. On exit, raise ReadSignal for those that were used."""

    def __init__(self, feed: Feed, indices: Iterable[int]) -> None:
        kinds = {index: type(feed.leaves[index]) for index in indices}
        self._made = {index: Placeholder(index, kind, partial(self._use, index)) for index, kind in kinds.items()}
        self._values = feed.leaves
        leaves = [self._made.get(index, leaf) for index, leaf in enumerate(feed.leaves)]
        self.feed = feed.replaced(leaves) if self._made else feed
        self._used: set[int] = set()
        self._references: dict[int, int] = {}

    def _use(self, index: int) -> NoReturn:
        self._used.add(index)
        raise ReadSignal([index])

    def __enter__(self) -> None:
        self._references = self._count()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        """Raise :class:`ReadSignal` for placeholders that were used, or that have more references than before."""
        if error is None and self._count() != self._references:
            # Reference cycles of the step's garbage hold references, too.
            gc.collect(1)
            now = self._count()
            self._used.update(index for index, number in now.items() if number > self._references[index])
        self.check()
        if self._made and isinstance(error, Exception) and not isinstance(error, GraphPlanError) and is_callers(error):
            # C code rejects a placeholder with an error of its own, so such an error counts as a read.
            raise ReadSignal(self._made) from None

    def settled(self, result: Any) -> Any:
        """Return ``result`` with each placeholder replaced by its value."""
        if not self._made:
            return result
        leaves, structure = flatten_result(result)
        if not any(map(is_placeholder, leaves)):
            return result
        return rebuild(structure, [self._values[index_of(leaf)] if is_placeholder(leaf) else leaf for leaf in leaves])

    def check(self) -> None:
        """Raise :class:`ReadSignal` for placeholders that were used."""
        if self._used:
            raise ReadSignal(self._used) from None

    def _count(self) -> dict[int, int]:
        return {index: sys.getrefcount(made) for index, made in self._made.items()}
