"""Tensors that no operator of a step works with, but of which its code may tell what they are like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import getitem, is_not
from typing import Any

from torch import Tensor

from graphplan.compare.comparing import facts_of
from graphplan.owners.slots import Slot, Walk
from graphplan.owners.tensor_metadata import THERE, TensorMetadata, is_there, metadata_of
from graphplan.owners.views import present
from graphplan.trace.changes import is_alike, same_value


class MetadataRows:
    """Compares what such tensors are like with what they were like in the traces. They are not held: the host may put
    another one there before each step, and as long as it is alike that does not matter.

    Args:
        known: what they were like, by path.
        walk: says where they lie now.
    """

    def __init__(self, known: Mapping[str, Any], walk: Walk) -> None:
        self._known = known
        slots = {path: walk.slots[path] for path in known if path in walk.slots}
        self.slots = list(slots.values())
        self._is_whole = len(slots) == len(known)
        loose = [path for path in slots if known[path] is THERE]
        self._loose_items = _places([slots[path] for path in loose if slots[path].param is None])
        self._loose_params = [param for path in loose if (param := slots[path].param) is not None]
        paths = sorted(
            slots.keys() - set(loose), key=lambda path: (isinstance(known[path], tuple), slots[path].param is not None)
        )
        single = [path for path in paths if not isinstance(known[path], tuple)]
        self._items = _places([slots[path] for path in single if slots[path].param is None])
        self._params = [param for path in single if (param := slots[path].param) is not None]
        # Tuples are held: what is in one that stays need not be looked for again.
        self._in_tuples = paths[len(single) :]
        self._tuple_items = _places([slots[path] for path in self._in_tuples])
        self._tuples: list[Any] = [()] * len(self._in_tuples)
        self._inner: list[Tensor] = []
        self._traits = [traits for path in paths for traits in _flat(known[path], TensorMetadata)]
        self._kinds = [traits.kind for traits in self._traits]
        self._facts: Any = None

    def hold(self) -> bool:
        """Whether all are there, and what they were."""
        try:
            now = [*map(getitem, *self._items), *(param.grad for param in self._params)]
            tuples = list(map(getitem, *self._tuple_items))
            loose = list(map(getitem, *self._loose_items))
        except (KeyError, IndexError, AttributeError):
            return False
        if any(map(is_not, tuples, self._tuples)) and not self._take_tuples(tuples):
            return False
        if not all(map(is_there, map(metadata_of, loose))):
            return False
        return self._is_whole and self.gradients_are_there() and self._are_alike([*now, *self._inner])

    def _take_tuples(self, now: list[Any]) -> bool:
        """Hold the tuples that are there now, if they are alike."""
        for path, old, new in zip(self._in_tuples, self._tuples, now, strict=True):
            if new is not old and not is_alike(self._known[path], metadata_of(new)):
                return False
        self._tuples = now
        self._inner = list(_flat(tuple(now), Tensor))
        return True

    def _are_alike(self, tensors: list[Any]) -> bool:
        """Whether these have the traits that are known: asked in one call, and closely where that says no."""
        kinds = list(map(type, tensors))
        if kinds == self._kinds and self._facts is not None and self._facts.fit(tensors):
            return True
        if not all(map(same_value, map(metadata_of, tensors), self._traits)):
            return False
        self._facts = facts_of(tensors, placed=False)
        return True

    def gradients_are_there(self) -> bool:
        """Whether the gradients are there of which that is all that the code may tell."""
        return all(param.grad is not None for param in (*self._params, *self._loose_params))


def _places(slots: Sequence[Slot]) -> tuple[list[Any], list[Any]]:
    return [present(slot.container) for slot in slots], [slot.key for slot in slots]


def _flat(value: Any, kind: type) -> Iterator[Any]:
    """``value`` if it is of that kind, or what is of it in a tuple."""
    if isinstance(value, tuple):
        for item in value:
            yield from _flat(item, kind)
    elif isinstance(value, kind):
        yield value
