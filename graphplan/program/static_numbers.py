"""Python numbers that a step keeps or returns and that no replay computes. Numbers from the device are read together
after each replay, owners' numbers before it. Also copies that the step makes in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.observe.host_draws import Draw
from graphplan.owners.slots import Walk, item_by_attribute
from graphplan.tensors.deferred import DeferredNumber, NumberForm, form_of
from graphplan.trace.symbolic_numbers import NumberTensor


class StaticNumber:
    """A number of a recorded step, computed by ``form`` from the numbers at ``places``."""

    __slots__ = ("_form", "_numbers", "_places")

    def __init__(self, form: NumberForm, places: list[int], numbers: StaticNumbers) -> None:
        self._form, self._places, self._numbers = form, places, numbers

    def value(self, own: Any = None) -> Any:
        """Return the value in the latest replay. ``own`` is the number that it replaces."""
        return self._form.compute([self._numbers.read[place] for place in self._places], own)


class StaticCopy:
    """A host copy of a recorded step's tensor, as a tensor or as an array."""

    __slots__ = ("_is_array", "_source")

    def __init__(self, source: Tensor, *, is_array: bool = False) -> None:
        self._source, self._is_array = source, is_array

    def value(self) -> Any:
        """Copy the tensor of the latest replay to the host, which waits for the replay."""
        copy = self._source.to("cpu", copy=True)
        return copy.numpy() if self._is_array else copy


class StaticNumbers:
    """All numbers that a recorded step reads; ``read`` has their values in the latest replay. ``before`` are the
    owners' numbers before the recorded step, by path, ``filled`` the tensors that hold such numbers, and ``draws`` the
    step's random draws on the host.
    """

    def __init__(self, before: Mapping[str, Any], filled: Sequence[NumberTensor], draws: Sequence[Draw]) -> None:
        self._before, self._filled, self._draws = before, filled, draws
        for each in filled:
            if before.keys() >= set(each.paths):
                each.fill(before)
        self._hosts: list[tuple[int, str]] = []
        """Indices in ``read`` of owners' numbers, with their paths."""
        self._numbers: Mapping[str, Any] = {}
        self.read: list[Any] = []
        self.are_kept: Callable[[], bool] = bool
        """Return True if code has kept numbers of the recorded step beyond those that are replaced."""
        self.copies: Mapping[int, tuple[Tensor, Tensor]] = MappingProxyType({})
        """Host copies of the step, see :class:`graphplan.trace.deferred_reads.DeferredReads`."""
        self._sources: list[Any] = []
        """Tensors that are read, and paths of owners' numbers."""
        self._places: dict[Any, int] = {}
        """Indices of ``_sources``, by the id of the tensor or by path."""
        self._packs: list[tuple[list[int], Tensor]] = []

    def take_drawn(self, numbers: Mapping[str, Any]) -> None:
        """Add the numbers that the recorded step has drawn, by path."""
        self._before = {**self._before, **numbers}

    def take(self, tree: Any, own: Any = None) -> Any:
        """Return ``tree`` with static numbers and copies, which use the recording's tensors, for deferred ones."""

        def static(number: Any) -> Any:
            if id(number) in self.copies:
                return StaticCopy(self.copies[id(number)][1])
            if isinstance(number, Tensor):
                return number
            form, sources = form_of(number, own)
            if number.is_array:
                return StaticCopy(sources[0], is_array=True)
            keys = [source if isinstance(source, str) else id(source) for source in sources]
            for key, source in zip(keys, sources, strict=True):
                if self._places.setdefault(key, len(self._sources)) == len(self._sources):
                    self._sources.append(source)
            return StaticNumber(form, [self._places[key] for key in keys], self)

        return pytree.tree_map_only((DeferredNumber, Tensor), static, tree)

    def close(self) -> None:
        """At the end of the recording: stack the tensors of one dtype, so that a replay reads them together."""
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        self.read = [None] * len(self._sources)
        for place, source in enumerate(self._sources):
            if isinstance(source, Tensor):
                groups.setdefault((source.dtype, source.device), []).append(place)
            else:
                self._hosts.append((place, source))
                self.read[place] = self._before[source]
        self._packs = [(places, torch.stack([self._sources[place] for place in places])) for places in groups.values()]
        self._sources, self._places, self.copies = [], {}, {}

    def follow(self, walk: Walk) -> None:
        """Read owners' numbers at the places of ``walk`` from now on."""
        paths = {path for _, path in self._hosts} | {path for filled in self._filled for path in filled.paths}
        self._numbers = {path: item_by_attribute(walk.scalars[path]) for path in sorted(paths) if path in walk.scalars}

    def start(self) -> None:
        """Before a replay: read owners' numbers, which the step may change, and make the host draws."""
        if not (self._numbers or self._draws):
            return
        numbers = {path: number.get() for path, number in self._numbers.items()}
        for draw in self._draws:
            numbers[draw.path] = draw()
        for place, path in self._hosts:
            self.read[place] = numbers[path]
        for filled in self._filled:
            filled.fill(numbers)

    def fetch(self) -> None:
        """After a replay: wait for it, and read its numbers."""
        for places, pack in self._packs:
            for place, value in zip(places, pack.tolist(), strict=True):
                self.read[place] = value


def renewer(value: Any, copier: Callable[[Tensor], Callable[[], Tensor]]) -> Callable[[], Any]:
    """Return a function that rebuilds ``value`` with copies of its tensors and the values of its static numbers."""

    def make_of(leaf: Any) -> Callable[[], Any]:
        if isinstance(leaf, Tensor):
            return copier(leaf)
        return leaf.value if isinstance(leaf, (StaticNumber, StaticCopy)) else lambda: leaf

    leaves, structure = pytree.tree_flatten(value)
    makes = list(map(make_of, leaves))
    return lambda: pytree.tree_unflatten([make() for make in makes], structure)
