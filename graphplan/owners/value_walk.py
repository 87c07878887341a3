"""Walking whatever lies in a place: tensors, numbers, containers, objects."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, MutableMapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from graphplan.owners.contents import elements_of, is_array_of_objects, is_proxy
from graphplan.owners.kinds import (
    CODE,
    MAPPINGS,
    MAX_DEPTH,
    MAX_ITEMS,
    PLAIN,
    SCALARS,
    TOO_DEEP,
    TOO_MANY,
    holds_nothing_else,
    is_gone,
    is_loader,
    is_user_object,
    key_name,
)
from graphplan.owners.referents import Referents, Source
from graphplan.owners.slots import Items, Namespace, Scalar, Slot, tensor_leaves
from graphplan.owners.views import Attributes, Contents, Extent, Numbers, Rest, Room, attributes_of, slots_of
from graphplan.specs.paths import Path
from graphplan.tensors.attributes import PLAIN_KINDS, attributes_on
from graphplan.tensors.dtensors import is_sharded


class Values(Referents):
    """Walks values into ``walk``. Modules and parameters are the subclass's affair."""

    @abstractmethod
    def _module(self, module: nn.Module, path: str, depth: int = 0) -> None:
        """Walk a module that lies there."""

    @abstractmethod
    def _parameter(self, param: nn.Parameter, path: str, container: Any, key: Any, source: Source) -> None:
        """Walk a parameter that lies there."""

    @abstractmethod
    def _loader(self, loader: Any, path: str, depth: int, source: Source) -> None:
        """Walk one of torch's loaders or samplers that lies there."""

    def _slot(self, path: str, container: Any, key: Any, source: Source) -> None:
        self.walk.slots[path] = Slot(container, key, *source, path=path)

    def _value(self, value: Any, path: str, container: Any, key: Any, depth: int, source: Source) -> None:
        kind = type(value)
        if kind in PLAIN:
            # Most values are; nothing that is asked below is true of them.
            if depth <= MAX_DEPTH:
                self.walk.scalars[path] = Scalar(container, key, *source)
        elif kind is Tensor:
            self._slot(path, container, key, source)
            self._marks(value, path)
        elif kind in CODE and depth <= MAX_DEPTH:
            self.walk.scalars[path] = Scalar(container, key, *source)
            self._behind(value, path, depth, source)
        elif not is_gone(value):
            self._other_value(value, path, container, key, depth, source)

    def _other_value(self, value: Any, path: str, container: Any, key: Any, depth: int, source: Source) -> None:
        """Walk what is seldom there, and takes more questions to be told. ``isinstance`` would ask the value too, whose
        answer is the user's code.
        """
        kind = value.__class__ if is_proxy(value) else type(value)
        if issubclass(kind, Tensor) and isinstance(value, nn.Parameter):
            self._parameter(value, path, container, key, source)
        elif issubclass(kind, Tensor):
            self._slot(path, container, key, source)
            self._marks(value, path)
        elif issubclass(kind, tuple):
            self._tuple(value, path, container, key, depth, source)
        elif depth > MAX_DEPTH:
            self.walk.objects[path] = Scalar({path: TOO_DEEP}, path, *source)
        elif issubclass(kind, nn.Module):
            self.walk.links.append((container, key, value))
            self._module(value, path, depth)
        elif issubclass(kind, dict | list | deque):
            self.walk.links.append((container, key, value))
            self._items(value, path, depth, source)
        elif issubclass(kind, set):
            self.walk.links.append((container, key, value))
            self._contents(value, path, source, depth)
        elif is_user_object(value):
            self.walk.links.append((container, key, value))
            self.walk.objects[path] = Scalar(container, key, *source)
            self._object(value, path, depth)
        elif is_loader(value):
            self.walk.scalars[path] = Scalar(container, key, *source)
            self._loader(value, path, depth, source)
        else:
            # Numbers and strings, but also functions, types, dtypes: whatever a step's code can tell apart.
            self.walk.scalars[path] = Scalar(container, key, *source)
            if not issubclass(kind, SCALARS):
                self._behind(value, path, depth, source)

    def _tuple(self, value: tuple[Any, ...], path: str, container: Any, key: Any, depth: int, source: Source) -> None:
        """A tuple with tensors is a slot of theirs, one without a value; in either there may be objects."""
        if not tensor_leaves(value):
            self.walk.scalars[path] = Scalar(container, key, *source)
        elif not isinstance(container, tuple):
            self._slot(path, container, key, source)
        for number, item in enumerate(value):
            if issubclass(type(item), Tensor):
                self._marks(item, f"{path}[{number}]")
            elif not issubclass(type(item), SCALARS):
                self._value(item, f"{path}[{number}]", value, number, depth + 1, source)

    def _items(self, items: MutableMapping[Any, Any] | Items, path: str, depth: int, source: Source) -> None:
        if not self._first_visit(items):
            self._name(items, source)
            return
        self.walk.containers.append(items)
        if not isinstance(source[0], torch.optim.Optimizer):
            self.walk.objects[Path.length(path)] = Scalar(Extent(items), "len", *source)
        dotted = isinstance(items, MAPPINGS)
        if dotted:
            self._members(items, f"{path}.keys()", depth, source)
        if isinstance(items, list | deque):
            self.walk.lists[path] = items
        if isinstance(items, deque):
            # Code that only appends does not look how long it is.
            via = f"{source[1]}[:]"
            self.walk.scalars[f"{path}.maxlen"] = Scalar(Numbers(items, ("maxlen",)), "maxlen", *source, via)
            self.walk.objects[f"full({path})"] = Scalar(Room(items), "full", *source, via)
        # The methods of the user's dictionaries may be code of the user's.
        kind: Any = dict if isinstance(items, dict) else type(items)
        pairs: Iterable[tuple[Any, Any]] = kind.items(items) if isinstance(items, MAPPINGS) else enumerate(items)
        for count, (key, value) in enumerate(list(pairs)):
            if count >= MAX_ITEMS:
                self._rest(items, count, path, source)
                break
            name = f"{path}.{key}" if dotted and isinstance(key, str) else f"{path}[{key_name(key, count)}]"
            self._value(value, name, items, key, depth + 1, source)
        if type(items) not in (dict, list, deque) and is_user_object(items):
            self._object(items, path, depth, visited=True)

    def _name(self, items: Any, source: Source) -> None:
        """Note that code has a name for a container that was found elsewhere, and so for the containers in it."""
        if not isinstance(source[0], Namespace) or id(items) in self._names_of:
            return
        self._names_of[id(items)] = source[1]
        for item in items.values() if isinstance(items, MAPPINGS) else items:
            if isinstance(item, (*MAPPINGS, list, deque)):
                self._name(item, source)

    def _rest(self, items: MutableMapping[Any, Any] | Items, start: int, path: str, source: Source) -> None:
        """The items of a long container from ``start`` on, which are compared as they are, without what is in them."""
        values = items.values() if isinstance(items, MAPPINGS) else items
        hold = not all(map(holds_nothing_else, values))
        rest: Any = {"rest": TOO_MANY} if hold else Rest(items, start)
        self.walk.objects[f"{path}[{start}:]"] = Scalar(rest, "rest", *source)

    def _members(self, items: Iterable[Any], path: str, depth: int, source: Source) -> None:
        """Objects that are told apart by a hash."""
        own = [i for i in items if type(i) not in PLAIN and (isinstance(i, Enum) or is_user_object(i))]
        found = tuple(item for item in own if not isinstance(item, nn.Module))
        for number, item in enumerate(found[:MAX_ITEMS]):
            self._value(item, f"{path}{{{number}}}", found, number, depth + 1, source)

    def _contents(self, items: Any, path: str, source: Source, depth: int = 0) -> None:
        if isinstance(items, set | frozenset):
            if isinstance(items, set):
                self.walk.containers.append(items)
                self.walk.scalars[path] = Scalar(Contents(items), "contents", *source)
            self._members(items, path, depth, source)
        else:
            self.walk.scalars[f"{path}[:]"] = Scalar(Contents(items), "contents", *source)
            if is_array_of_objects(items):
                self._elements(items, path, depth, source)

    def _elements(self, array: Any, path: str, depth: int, source: Source) -> None:
        """What the objects in an array hold."""
        found = elements_of(array)
        inner = [number for number, item in enumerate(found) if not holds_nothing_else(item)]
        if len(inner) > MAX_ITEMS:
            self.walk.objects[f"{path}[:]..."] = Scalar({"rest": TOO_MANY}, "rest", *source)
        if id(array) in self._open:
            return
        self._open.add(id(array))
        for number in inner[:MAX_ITEMS]:
            self._value(found[number], f"{path}[{number}]", found, number, depth + 1, source)
        self._open.remove(id(array))

    def _object(self, thing: Any, path: str, depth: int, *, visited: bool = False) -> None:
        if not visited and not self._first_visit(thing):
            return
        self._attributes(thing, path, depth)
        if slots_of(type(thing)):
            slots = Attributes(thing)
            self.walk.containers.append(slots)
            for name, value in list(slots.items()):
                self._value(value, f"{path}.{name}", slots, name, depth + 1, (thing, name))
        self._class_values(thing, path, depth)

    def _attributes(self, thing: Any, path: str, depth: int, without: Collection[str] = ()) -> None:
        inner = attributes_of(thing)
        # An attribute dictionary may be its own ``__dict__``.
        if inner is not None and inner is not thing:
            self.walk.containers.append(inner)
            self.walk.attributes.append((thing, inner))
            for name, value in list(inner.items()):
                if name not in without:
                    self._value(value, f"{path}.{name}", inner, name, depth + 1, (thing, name))

    def _marks(self, tensor: Tensor, path: str) -> None:
        """What code hung on a tensor."""
        if is_sharded(tensor) or not self._first_visit(inner := attributes_on(tensor)):
            return
        kind = type(tensor)
        self.walk.marks.append((path, inner, kind))
        if kind not in PLAIN_KINDS:
            self._class_values(tensor, path)
        for name, value in list(inner.items()):
            if not name.startswith("__"):
                self._value(value, f"{path}.{name}", inner, name, 1, (tensor, name))
