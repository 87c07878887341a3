"""Numbers that a step reads from the device to keep or return them, read together after each replay; and copies that
it makes in host memory for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.tensors.deferred import DeferredNumber, NumberForm, form_of


class StaticNumber:
    """A number of a recorded step, which is computed by ``form`` from those that lie at ``places``."""

    __slots__ = ("_form", "_numbers", "_places")

    def __init__(self, form: NumberForm, places: list[int], numbers: StaticNumbers) -> None:
        self._form, self._places, self._numbers = form, places, numbers

    def value(self, own: Any = None) -> Any:
        """Its value in the latest replay. ``own`` is the one that it replaces."""
        return self._form.compute([self._numbers.read[place] for place in self._places], own)


class StaticCopy:
    """A copy in host memory of what a recorded step makes, as a tensor or as an array."""

    __slots__ = ("_is_array", "_source")

    def __init__(self, source: Tensor, *, is_array: bool = False) -> None:
        self._source, self._is_array = source, is_array

    def value(self) -> Any:
        """A copy after the latest replay, for which the host waits."""
        copy = self._source.to("cpu", copy=True)
        return copy.numpy() if self._is_array else copy


class StaticNumbers:
    """What a recorded step reads for all its numbers. ``read`` has the values of the latest replay."""

    def __init__(self) -> None:
        self.read: list[Any] = []
        self.copies: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({})
        """Of what the step has copied to the host, see :class:`graphplan.trace.deferred_reads.DeferredReads`."""
        self._tensors: list[Tensor] = []
        self._places: dict[int, int] = {}
        """By the identity of those tensors."""
        self._packs: list[tuple[list[int], Tensor]] = []

    def take(self, tree: Any, own: Any = None) -> Any:
        """``tree`` with static numbers and copies for deferred ones. Their tensors are the recording's own copies."""

        def static(number: Any) -> Any:
            if id(number) in self.copies:
                return StaticCopy(self.copies[id(number)][1])
            if isinstance(number, Tensor):
                return number
            form, tensors = form_of(number, own)
            if number.is_array:
                return StaticCopy(tensors[0], is_array=True)
            for tensor in tensors:
                self._places.setdefault(id(tensor), len(self._tensors))
                if self._places[id(tensor)] == len(self._tensors):
                    self._tensors.append(tensor)
            return StaticNumber(form, [self._places[id(tensor)] for tensor in tensors], self)

        return pytree.tree_map_only((DeferredNumber, Tensor), static, tree)

    def close(self) -> None:
        """Within the recording, once all are taken: lay those of one dtype side by side."""
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, tensor in enumerate(self._tensors):
            groups.setdefault((tensor.dtype, tensor.device), []).append(place)
        self._packs = [(places, torch.stack([self._tensors[place] for place in places])) for places in groups.values()]
        self.read = [None] * len(self._tensors)
        self._tensors, self._places, self.copies = [], {}, {}

    def fetch(self) -> None:
        """After a replay: wait for it, and read."""
        for places, pack in self._packs:
            for place, value in zip(places, pack.tolist(), strict=True):
                self.read[place] = value


def cloned(value: Any) -> Any:
    """``value`` with detached clones of its tensors, and the values of its static numbers and copies."""

    def clone(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        return leaf.value() if isinstance(leaf, (StaticNumber, StaticCopy)) else leaf

    return pytree.tree_map(clone, value)
