"""What functions, classes, modules, methods and the like lead to."""

from __future__ import annotations

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
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from graphplan.environment.origin import is_users, is_users_module
from graphplan.owners.contents import has_contents
from graphplan.owners.kinds import SCALARS, WEAKLY_HELD, is_plain, is_user_object, key_name, unwrapped, users_bases
from graphplan.owners.slots import Items, Namespace, Scalar, Walk
from graphplan.owners.views import Alive, Current, Inherited, Members, Numbers, Weakly, attributes_of

Source = tuple[Any, str]
"""The object and attribute that lead to a place."""


class Referents(ABC):
    """Walks into ``walk`` what lies behind values. Values and containers themselves are the subclass's affair."""

    def __init__(self) -> None:
        self.walk = Walk()
        self._seen: set[int] = set()
        self._named: list[tuple[str, torch.optim.Optimizer]] = []
        self._names_of: dict[int, str] = {}
        self._weakly_held: list[tuple[str, Any, Scalar]] = []
        self._open: set[int] = set()

    def _first_visit(self, thing: Any) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        return True

    @abstractmethod
    def _value(self, value: Any, path: str, container: Any, key: Any, depth: int, source: Source) -> None:
        """Walk whatever lies there."""

    @abstractmethod
    def _tuple(self, value: tuple[Any, ...], path: str, container: Any, key: Any, depth: int, source: Source) -> None:
        """Walk a tuple that lies there."""

    @abstractmethod
    def _items(self, items: MutableMapping[Any, Any] | Items, path: str, depth: int, source: Source) -> None:
        """Walk a dictionary or list."""

    @abstractmethod
    def _members(self, items: Iterable[Any], path: str, depth: int, source: Source) -> None:
        """Walk what is told apart by a hash."""

    @abstractmethod
    def _contents(self, items: Any, path: str, source: Source, depth: int = 0) -> None:
        """Walk a set, or what is compared as one value."""

    def _class_values(self, thing: Any, path: str, depth: int = 0) -> None:
        """What the user's classes hold for ``thing``, unless it has its own."""
        own = attributes_of(thing) or {}
        for kind in users_bases(type(thing)):
            members = Inherited(kind)
            for name, value in list(vars(kind).items()):
                place = f"{path}.{name}"
                if not (name.startswith("__") or name in own or self._knows(place)) and is_plain(value):
                    self._value(value, place, members, name, depth + 1, (thing, name))

    def _knows(self, path: str) -> bool:
        return path in self.walk.scalars or path in self.walk.objects or path in self.walk.slots

    def _behind(self, value: Any, path: str, depth: int, source: Source) -> None:
        """What a function, method, class, module, variable or buffer leads to."""
        if isinstance(value, FunctionType):
            if is_users(value) and self._first_visit(value):
                self._function(value, path, depth, source)
        elif isinstance(value, MethodType | BuiltinMethodType):
            self._bound(value, path, depth, source)
        elif isinstance(value, torch.optim.Optimizer):
            self.walk.parts[path] = value
            if not isinstance(source[0], LRScheduler):
                self._named.append((path, unwrapped(value)))
        elif isinstance(value, partial):
            self._behind(value.func, f"{path}.func", depth, source)
            self._tuple(value.args, f"{path}.args", Numbers(value, ("args",)), "args", depth, source)
            self._items(value.keywords, f"{path}.keywords", depth, source)
        elif isinstance(value, _lru_cache_wrapper):
            self._behind(value.__wrapped__, f"{path}.__wrapped__", depth, source)
        elif isinstance(value, type):
            if is_users(value) and not issubclass(value, Enum) and self._first_visit(value):
                self._class(value, path, depth)
        elif isinstance(value, ModuleType):
            # One that code names is looked at by the names that the code takes from it.
            is_named = isinstance(source[0], Namespace)
            if not is_named and is_users_module(value, value.__name__) and self._first_visit(value):
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
            thing = value()
            for name, item in list((attributes_of(thing) or {}).items()):
                if isinstance(item, SCALARS):
                    self.walk.scalars[f"{path}().{name}"] = Scalar(Weakly(value), name, value, name)
                elif isinstance(item, (dict, list, deque)) or is_user_object(item):
                    # Layers are owners as soon as they run.
                    if isinstance(thing, nn.Module) or isinstance(item, nn.Module):
                        continue
                    self._weakly_held.append((f"{path}().{name}", item, Scalar({name: WEAKLY_HELD}, name, value, name)))
        elif isinstance(value, frozenset) or has_contents(value):
            self._contents(value, path, source, depth)

    def _bound(self, method: MethodType | BuiltinMethodType, path: str, depth: int, source: Source) -> None:
        """What a method is bound to, and its function; a built-in function is bound to its module, or to nothing."""
        bound = method.__self__
        if bound is None or type(bound) is ModuleType:
            return
        if isinstance(bound, nn.Module | dict | list | deque) or is_user_object(bound):
            self._value(bound, f"{path}.__self__", Numbers(method, ()), "__self__", depth + 1, source)
        if isinstance(method, MethodType):
            self._behind(method.__func__, f"{path}.__func__", depth, source)

    def _function(self, function: FunctionType, path: str, depth: int, source: Source) -> None:
        """Its code, defaults and attributes: what its closure and its globals hold are names."""
        space = Numbers(function, ())
        self.walk.scalars[f"{path}.__code__"] = Scalar(space, "__code__", *source)
        self._value(function.__defaults__, f"{path}.__defaults__", space, "__defaults__", depth + 1, source)
        if function.__kwdefaults__:
            self._items(function.__kwdefaults__, f"{path}.__kwdefaults__", depth + 1, source)
        for name, value in list(vars(function).items()):
            self._value(value, f"{path}.{name}", vars(function), name, depth + 1, (function, name))

    def _class(self, kind: type, path: str, depth: int) -> None:
        """Values in a class that lies in a place of its own."""
        for base in reversed(users_bases(kind)):
            members = Members(base) if base is kind else Inherited(base)
            for name, value in list(vars(base).items()):
                if not name.startswith("__") and is_plain(value):
                    if base is kind:
                        self.walk.places.append((members, name))
                    self._value(value, f"{path}.{name}", members, name, depth + 1, (kind, name))
