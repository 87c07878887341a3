"""Walking whatever lies in a place: tensors, numbers, containers, objects; and what functions and classes lead to."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import ItemsView, Iterable, KeysView, MutableMapping, ValuesView
from contextvars import ContextVar
from enum import Enum
from functools import _lru_cache_wrapper, partial
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from graphplan.owners.contents import has_contents
from graphplan.owners.kinds import (
    FOREIGN,
    MAPPINGS,
    MAX_DEPTH,
    MAX_ITEMS,
    PLAIN,
    SCALARS,
    TOO_DEEP,
    TOO_MANY,
    holds_nothing_else,
    is_foreign,
    is_gone,
    is_plain,
    is_user_object,
    key_name,
)
from graphplan.owners.records import Items, Namespace, Scalar, Slot, Walk, tensor_leaves
from graphplan.owners.spaces import (
    Alive,
    Attributes,
    Contents,
    Current,
    Extent,
    Members,
    Numbers,
    Registered,
    Remembered,
    Rest,
    Room,
    Weakly,
    slots_of,
)

Source = tuple[Any, str]
"""The object and attribute that lead to a place."""


class Values(ABC):
    """Walks values into ``walk``. Modules and parameters are the subclass's affair."""

    def __init__(self) -> None:
        self.walk = Walk()
        self._seen: set[int] = set()
        self._named: list[tuple[str, torch.optim.Optimizer]] = []
        self._names_of: dict[int, str] = {}

    def _first_visit(self, thing: Any) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        return True

    @abstractmethod
    def _module(self, module: nn.Module, path: str, depth: int = 0) -> None:
        """Walk a module that lies there."""

    @abstractmethod
    def _parameter(self, param: nn.Parameter, path: str, container: Any, key: Any) -> None:
        """Walk a parameter that lies there."""

    def _slot(self, path: str, container: Any, key: Any) -> None:
        self.walk.slots[path] = Slot(path, container, key)

    def _value(self, value: Any, path: str, container: Any, key: Any, depth: int, source: Source) -> None:
        if type(value) in PLAIN:
            # Most values are; nothing that is asked below is true of them.
            if depth <= MAX_DEPTH:
                self.walk.scalars[path] = Scalar(container, key, *source)
            return
        if is_gone(value):
            return
        if isinstance(value, nn.Parameter):
            self._parameter(value, path, container, key)
        elif isinstance(value, Tensor):
            self._slot(path, container, key)
            self._marks(value, path)
        elif isinstance(value, tuple):
            self._tuple(value, path, container, key, depth, source)
        elif depth > MAX_DEPTH:
            self.walk.objects[path] = Scalar({path: TOO_DEEP}, path, *source)
        elif isinstance(value, nn.Module):
            self.walk.links.append((container, key, value))
            self._module(value, path, depth)
        elif isinstance(value, dict | list | deque):
            self.walk.links.append((container, key, value))
            self._items(value, path, depth, source)
        elif isinstance(value, set):
            self.walk.links.append((container, key, value))
            self._contents(value, path, source, depth)
        elif is_user_object(value):
            self.walk.links.append((container, key, value))
            self.walk.objects[path] = Scalar(container, key, *source)
            self._object(value, path, depth)
        else:
            # Numbers and strings, but also functions, types, dtypes: whatever a step's code can tell apart.
            self.walk.scalars[path] = Scalar(container, key, *source)
            if not isinstance(value, SCALARS):
                self._behind(value, path, depth, source)

    def _tuple(self, value: tuple[Any, ...], path: str, container: Any, key: Any, depth: int, source: Source) -> None:
        """A tuple with tensors is a slot of theirs, one without a value; in either there may be objects."""
        if not tensor_leaves(value):
            self.walk.scalars[path] = Scalar(container, key, *source)
        elif not isinstance(container, tuple):
            self._slot(path, container, key)
        for number, item in enumerate(value):
            if isinstance(item, Tensor):
                self._marks(item, f"{path}[{number}]")
            elif not isinstance(item, SCALARS):
                self._value(item, f"{path}[{number}]", value, number, depth + 1, source)

    def _items(self, items: MutableMapping[Any, Any] | Items, path: str, depth: int, source: Source) -> None:
        if not self._first_visit(items):
            self._name(items, source)
            return
        self.walk.containers.append(items)
        if not isinstance(source[0], torch.optim.Optimizer):
            self.walk.objects[f"len({path})"] = Scalar(Extent(items), "len", *source)
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
        pairs: Iterable[tuple[Any, Any]] = items.items() if isinstance(items, MAPPINGS) else enumerate(items)
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
        hold = items is not sys.modules and not all(map(holds_nothing_else, values))
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

    def _object(self, thing: Any, path: str, depth: int, *, visited: bool = False) -> None:
        if not visited and not self._first_visit(thing):
            return
        inner = getattr(thing, "__dict__", None)
        # An attribute dictionary may be its own ``__dict__``.
        if isinstance(inner, dict) and inner is not thing:
            self.walk.containers.append(inner)
            self.walk.attributes.append((thing, inner))
            for name, value in list(inner.items()):
                self._value(value, f"{path}.{name}", inner, name, depth + 1, (thing, name))
        if slots_of(type(thing)):
            slots = Attributes(thing)
            self.walk.containers.append(slots)
            for name, value in list(slots.items()):
                self._value(value, f"{path}.{name}", slots, name, depth + 1, (thing, name))
        self._class_values(thing, path, depth)

    def _marks(self, tensor: Tensor, path: str) -> None:
        """What the user's code hung on a tensor."""
        inner = vars(tensor)
        for name, value in list(inner.items()) if inner else ():
            if not name.startswith("_") and not isinstance(value, Tensor):
                self._value(value, f"{path}.{name}", inner, name, 1, (tensor, name))

    def _class_values(self, thing: Any, path: str, depth: int = 0) -> None:
        """What the user's classes hold for ``thing``, unless it has its own."""
        own = getattr(thing, "__dict__", {})
        for kind in type(thing).__mro__:
            if kind.__module__.split(".")[0] in FOREIGN:
                continue
            for name, value in list(vars(kind).items()):
                place = f"{path}.{name}"
                if name.startswith("__") or name in own or self._knows(place):
                    continue
                if isinstance(value, SCALARS):
                    # Seen through the object: it may get one of its own.
                    self.walk.scalars[place] = Scalar(Numbers(thing, (name,)), name, thing, name)
                elif is_plain(value):
                    self._value(value, place, Members(kind), name, depth + 1, (thing, name))

    def _knows(self, path: str) -> bool:
        return path in self.walk.scalars or path in self.walk.objects or path in self.walk.slots

    def _behind(self, value: Any, path: str, depth: int, source: Source) -> None:
        """What a function, method, class, module, variable or buffer leads to."""
        if isinstance(value, torch.optim.Optimizer):
            if not isinstance(source[0], LRScheduler):
                self._named.append((path, value))
        elif isinstance(value, partial):
            self._behind(value.func, f"{path}.func", depth, source)
            self._tuple(value.args, f"{path}.args", Numbers(value, ("args",)), "args", depth, source)
            self._items(value.keywords, f"{path}.keywords", depth, source)
        elif isinstance(value, _lru_cache_wrapper):
            self.walk.objects[f"{path}.cache"] = Scalar(Remembered(value), "cache", *source)
            self._behind(value.__wrapped__, f"{path}.__wrapped__", depth, source)
        elif isinstance(value, MethodType | BuiltinMethodType):
            bound = value.__self__
            if isinstance(bound, nn.Module | dict | list | deque) or is_user_object(bound):
                self._value(bound, f"{path}.__self__", Numbers(value, ()), "__self__", depth + 1, source)
            self._behind(getattr(value, "__func__", None), f"{path}.__func__", depth, source)
        elif isinstance(value, FunctionType):
            if not is_foreign(value) and self._first_visit(value):
                self._function(value, path, depth, source)
        elif isinstance(value, type):
            if not is_foreign(value) and self._first_visit(value):
                if issubclass(value, Enum):
                    self._members(value, path, depth, source)
                else:
                    self._class(value, path, depth)
        elif isinstance(value, ModuleType):
            # One that code names is looked at by the names that the code takes from it.
            if not isinstance(source[0], Namespace) and self._first_visit(value):
                for name, item in list(vars(value).items()):
                    if isinstance(item, SCALARS) and not name.startswith("__"):
                        self._value(item, f"{path}.{name}", vars(value), name, depth + 1, (value, name))
        elif isinstance(value, ContextVar):
            self._value(value.get(None), f"{path}.get()", Current(value), "get", depth + 1, source)
        elif isinstance(value, KeysView | ValuesView | ItemsView) and hasattr(value, "mapping"):
            self._behind(value.mapping, path, depth, source)
        elif isinstance(value, MappingProxyType):
            for number, (key, item) in enumerate(value.items()):
                self._value(item, f"{path}[{key_name(key, number)}]", value, key, depth + 1, source)
        elif isinstance(value, Enum):
            for name, item in list(vars(value).items()):
                if not name.startswith("__"):
                    via = "value" if name == "_value_" else name
                    self._value(item, f"{path}.{name}", vars(value), name, depth + 1, (value, via))
        elif isinstance(value, weakref.ref):
            self.walk.objects[f"{path}()"] = Scalar(Alive(value), "alive", *source)
            for name, item in list(getattr(value(), "__dict__", {}).items()):
                if isinstance(item, SCALARS):
                    self.walk.scalars[f"{path}().{name}"] = Scalar(Weakly(value), name, value, name)
        elif isinstance(value, frozenset) or has_contents(value):
            self._contents(value, path, source, depth)

    def _function(self, function: FunctionType, path: str, depth: int, source: Source) -> None:
        """Its code, defaults and attributes: what its closure and its globals hold are names."""
        space = Numbers(function, ())
        self.walk.scalars[f"{path}.__code__"] = Scalar(space, "__code__", *source)
        self._value(function.__defaults__, f"{path}.__defaults__", space, "__defaults__", depth + 1, source)
        if function.__kwdefaults__:
            self._items(function.__kwdefaults__, f"{path}.__kwdefaults__", depth + 1, source)
        registry = getattr(function, "registry", None)
        if isinstance(registry, MappingProxyType):
            # What functools.singledispatch chooses from.
            self.walk.objects[f"{path}.registry[:]"] = Scalar(Registered(registry), "registry", *source)
        for name, value in list(vars(function).items()):
            self._value(value, f"{path}.{name}", vars(function), name, depth + 1, (function, name))

    def _class(self, kind: type, path: str, depth: int) -> None:
        """Values in a class that lies in a place of its own."""
        members = Members(kind)
        for base in reversed(kind.__mro__):
            for name, value in [] if is_foreign(base) else list(vars(base).items()):
                if name.startswith("__") or not is_plain(value):
                    continue
                if base is kind:
                    self.walk.places.append((members, name))
                    self._value(value, f"{path}.{name}", members, name, depth + 1, (kind, name))
                else:
                    self._value(value, f"{path}.{name}", Numbers(kind, ()), name, depth + 1, (kind, name))
