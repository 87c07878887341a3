"""Walk values: record the value in a place of an owner, and everything that it leads to."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from functools import _lru_cache_wrapper, partial
from itertools import islice
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from graphplan.environment.origin import file_of, is_users, is_users_file, is_users_module
from graphplan.owners.contents import has_contents, is_proxy
from graphplan.owners.kinds import (
    MAPPINGS,
    MAX_DEPTH,
    MAX_ITEMS,
    MODULE_HOOKS,
    PLAIN,
    SCALARS,
    TOO_DEEP,
    TOO_MANY,
    holds_nothing_else,
    holds_values,
    is_gone,
    is_of_library,
    is_plain,
    is_user_object,
    key_name,
    unwrapped,
    users_bases,
)
from graphplan.owners.slots import Items, Namespace, Presence, Scalar, Slot, Walk, tensor_leaves
from graphplan.owners.views import (
    Attributes,
    ComputedItem,
    Inherited,
    Members,
    ReadOnly,
    Setting,
    attributes_of,
    contents,
    extent,
    rest,
)
from graphplan.specs.paths import Path
from graphplan.tensors.attributes import PLAIN_KINDS, attributes_on
from graphplan.tensors.dtensors import is_sharded
from graphplan.tensors.records import slots_of

STEP = "the step"  # The path of a step's function.
_IN_HOOK = (Namespace(), "hook")
"""The source of values that torch passes to a hook's code, which has names of its own for them."""
_MODULE_INTERNALS = frozenset(vars(nn.Module()))
_METHODS = (FunctionType, staticmethod, classmethod)
_CONTAINERS = (list, dict, deque, tuple, set)
_FEW = 64  # Maximum number of items of a container that is always walked.
_LEVELS = 4  # Maximum nesting of containers that count as data.

Source = tuple[Any, str]
"""The object, and its attribute, that lead to a place."""


class ValueWalker:
    """Fills ``walk`` with the places in values. ``names`` are the names that the step's code uses; ``mentioned`` are
    all names and strings in code that ran, None if they are not known.
    """

    def __init__(self, names: Namespace, mentioned: set[str] | None) -> None:
        self.walk = Walk()
        self._used, self._asked, self._leaves = names.attributes, names.asked, names.leaves
        self._mentioned, self._has_name = mentioned, names.has
        self._asked_of_kinds: dict[type, set[str]] = {}
        self._seen: set[int] = set()
        self._named: list[tuple[str, torch.optim.Optimizer]] = []
        """Optimizers that a value refers to, by path."""
        self._homes: dict[int, str] = {}
        """Descriptions of where containers were found first, by identity."""
        self._leads: dict[int, dict[tuple[int, str], Source]] = {}
        """Further references to containers, by identity: the step's code may have other names for them."""

    def _first_visit(self, thing: Any) -> bool:
        # Each call of ``id`` runs the audit hooks of other packages, so call it once.
        number = id(thing)
        if number in self._seen:
            return False
        self._seen.add(number)
        return True

    def _value(self, value: Any, path: str, container: Any, key: Any, depth: int, source: Source) -> None:
        kind = type(value)
        if kind in PLAIN and depth <= MAX_DEPTH:
            # Most values are plain, and no condition below holds for them.
            self.walk.scalars[path] = Scalar(container, key, *source)
        elif not is_gone(value):
            self._other_value(value, path, container, key, depth, source)

    def _other_value(self, value: Any, path: str, container: Any, key: Any, depth: int, source: Source) -> None:
        """Walk a less common value, without ``isinstance``: it reads ``__class__``, which may run the user's code."""
        kind = value.__class__ if is_proxy(value) else type(value)
        if issubclass(kind, Tensor):
            is_leaf = kind is Tensor and path in self._leaves and has_own_gradient(value)
            self._tensor(value, path, container, key, source, is_parameter=is_leaf or isinstance(value, nn.Parameter))
        elif issubclass(kind, tuple):
            self._tuple(value, path, container, key, depth, source)
        elif depth > MAX_DEPTH:
            self.walk.objects[path] = Scalar({path: TOO_DEEP}, path, *source)
        elif issubclass(kind, nn.Module | dict | list | deque | set) or is_user_object(value):
            self.walk.links.append((container, key, value))
            if issubclass(kind, nn.Module):
                self._module(value, path, depth)
            elif issubclass(kind, dict | list | deque):
                self._items(value, path, depth, source)
            elif issubclass(kind, set):
                self._contents(value, path, source)
            else:
                self.walk.objects[path] = Scalar(container, key, *source)
                self._object(value, path, depth)
        else:
            # Numbers and strings, but also functions, types and dtypes: all that a step's code can distinguish.
            self.walk.scalars[path] = Scalar(container, key, *source)
            if not issubclass(kind, SCALARS):
                self._walk_referents(value, path, depth, source)

    def _tensor(
        self, value: Tensor, path: str, container: Any, key: Any, source: Source, *, is_parameter: bool
    ) -> None:
        if is_parameter:
            self._parameter(value, path, container, key, source)
        else:
            self._slot(path, container, key, source)
            self._walk_tensor_attributes(value, path)

    def _slot(self, path: str, container: Any, key: Any, source: Source) -> None:
        self.walk.slots[path] = Slot(container, key, *source, path=path)

    def _parameter(self, param: Tensor, path: str, container: Any, key: Any, source: Source) -> None:
        self.walk.slots[path] = Slot(container, key, *source, path=path, is_parameter=True)
        number = id(param)
        if number not in self.walk.parameters:
            self._walk_tensor_attributes(param, path)
            self.walk.parameters[number] = (path, param)
            if param.requires_grad or param.grad is not None:
                place = Path.gradient(path)
                self.walk.slots[place] = Slot(Setting(param), "grad", param, "grad", path=place, param=param)

    def _walk_tensor_attributes(self, tensor: Tensor, path: str) -> None:
        """Walk the attributes that code has set on a tensor. Most tensors have none."""
        inner = attributes_on(tensor)
        if not inner and type(tensor) in PLAIN_KINDS:
            return
        if is_sharded(tensor) or not self._first_visit(inner):
            return
        if type(tensor) not in PLAIN_KINDS:
            self._class_values(tensor, path)
        for name, value in list(inner.items()):
            if not name.startswith("__"):
                self._value(value, f"{path}.{name}", inner, name, 1, (tensor, name))

    def _tuple(self, value: tuple[Any, ...], path: str, container: Any, key: Any, depth: int, source: Source) -> None:
        """Walk a tuple: with tensors it is a slot, without them one value. One that holds objects or containers, but no
        tensors, is instead recorded by identity, length and plain items, because a step may make it anew. Then walk the
        objects in it.
        """
        # A subclass may override ``__iter__`` and ``__len__``.
        items = tuple(tuple.__iter__(value))
        if tensor_leaves(value):
            if not isinstance(container, tuple):
                self._slot(path, container, key, source)
        elif _is_entered(value):
            self.walk.links.append((container, key, value))
            self.walk.objects[path] = Scalar(container, key, *source)
            self.walk.objects[Path.length(path)] = Scalar(ComputedItem(value, tuple.__len__), "len", *source)
            # One value: no number in a tuple can be assigned, as counters are.
            self.walk.scalars[f"{path}[:]"] = Scalar(ComputedItem(value, _plain_items), "contents", *source)
        else:
            self.walk.scalars[path] = Scalar(container, key, *source)
        for number, item in enumerate(items):
            place = f"{path}[{number}]"
            if issubclass(type(item), Tensor):
                if place in self._leaves and has_own_gradient(item):
                    self._parameter(item, place, value, number, source)
                self._walk_tensor_attributes(item, place)
            elif not issubclass(type(item), SCALARS):
                self._value(item, place, value, number, depth + 1, source)

    def _items(self, items: MutableMapping[Any, Any] | Items, path: str, depth: int, source: Source) -> None:
        if not self._first_visit(items):
            self._record_reference(items, source)
            # Record where it was found first: a later container at this path may be known from another place.
            self.walk.objects[path] = Scalar({path: self._homes.get(id(items), "what an optimizer has")}, path, *source)
            return
        self._homes[id(items)] = f"what lies at {path}"
        self.walk.containers.append(items)
        if not isinstance(source[0], torch.optim.Optimizer):
            self.walk.objects[Path.length(path)] = Scalar(ComputedItem(items, extent), "len", *source)
        dotted = isinstance(items, MAPPINGS)
        if isinstance(items, list | deque):
            self.walk.lists[path] = items
        if isinstance(items, deque):
            # With ``[:]``, code that only appends does not count as reading these.
            via = f"{source[1]}[:]"
            self.walk.scalars[f"{path}.maxlen"] = Scalar(ReadOnly(items), "maxlen", *source, via)
            is_full = ComputedItem(items, lambda deque: len(deque) == deque.maxlen)
            self.walk.objects[f"full({path})"] = Scalar(is_full, "full", *source, via)
        # Call the built-in methods: a subclass of dict may override them.
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

    def _record_reference(self, items: Any, source: Source) -> None:
        """Record a further reference to a container that was found elsewhere, and so to the containers in it."""
        known, way = self._leads.setdefault(id(items), {}), (id(source[0]), source[1])
        if way in known:
            return
        known[way] = source
        for item in islice(items.values() if isinstance(items, MAPPINGS) else items, MAX_ITEMS):
            if isinstance(item, (*MAPPINGS, list, deque, tuple)):
                self._record_reference(item, source)

    def _rest(self, items: MutableMapping[Any, Any] | Items, start: int, path: str, source: Source) -> None:
        """Record the items of a long container from ``start`` on. They are compared, but not walked."""
        values = items.values() if isinstance(items, MAPPINGS) else items
        hold = not all(map(holds_nothing_else, values))
        left: Any = {"rest": TOO_MANY} if hold else ComputedItem(items, partial(rest, start))
        self.walk.objects[f"{path}[{start}:]"] = Scalar(left, "rest", *source)

    def _contents(self, items: set[Any], path: str, source: Source) -> None:
        self.walk.containers.append(items)
        self.walk.scalars[path] = Scalar(ComputedItem(items, contents), "contents", *source)

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
        # A dictionary of attributes may be its own ``__dict__``.
        if inner is not None and inner is not thing:
            self.walk.containers.append(inner)
            self.walk.attributes.append((thing, inner))
            for name, value in list(inner.items()):
                if name not in without:
                    self._attribute(value, f"{path}.{name}", inner, name, depth, thing)

    def _attribute(self, value: Any, path: str, inner: Any, name: str, depth: int, thing: Any) -> None:
        """Walk an attribute, unless it holds data and no code that ran mentions its name."""
        if self._mentioned is None or name in self._mentioned or not _is_data(value):
            self._value(value, path, inner, name, depth + 1, (thing, name))
        else:
            self.walk.passed.add(name)

    def _class_values(self, thing: Any, path: str, depth: int = 0) -> None:
        """Walk what ``thing`` inherits from the user's classes; record which attributes that code may look up exist."""
        inner = attributes_of(thing)
        for name in self._asked_of(type(thing)) if inner is not None and holds_values(thing) else ():
            self.walk.objects[Path.presence(path, name)] = Presence(inner, name, thing, name)
        known = (self.walk.scalars, self.walk.objects, self.walk.slots)
        for members, name, value in _members(thing, type(thing), [] if inner is None else [inner]):
            place = f"{path}.{name}"
            if not any(place in table for table in known):
                self.walk.places.append((members, name))
                self._value(value, place, members, name, depth + 1, (thing, name))

    def _asked_of(self, kind: type) -> set[str]:
        """Return the names of attributes that code would find if they were set on an object of ``kind``: those that
        code passes to ``getattr``, those of methods, and, with a ``__getattr__``, all that the class lacks.
        """
        found = self._asked_of_kinds.get(kind)
        if found is None:
            bases, said = users_bases(kind), self._mentioned
            methods = {name for base in bases for name, member in vars(base).items() if type(member) in _METHODS}
            names = {name for name in methods if said is None or name in said}
            own = {name for base in bases for name in vars(base)}
            if "__getattr__" in own and "__setattr__" not in own:
                # A class with its own ``__setattr__`` hardly stores values in the object's ``__dict__``.
                names |= self._used.difference(*map(vars, kind.__mro__))
            # Skip names with a ``[:]`` suffix, and special methods, which Python only looks up in classes.
            found = self._asked | {name for name in names if name.isidentifier() and not name.startswith("__")}
            self._asked_of_kinds[kind] = found
        return found

    def _module(self, module: nn.Module, path: str, depth: int = 0) -> None:
        if not self._first_visit(module):
            return
        self.walk.modules.append(module)
        self.walk.parts[path] = module
        inner = vars(module)
        # A scripted module keeps these in C++ and exposes views of them that are no dictionaries.
        kinds = (inner[kind] for kind in ("_parameters", "_buffers", "_modules"))
        self.walk.containers += [items for items in kinds if isinstance(items, MAPPINGS)]
        self.walk.containers.append(inner)
        self.walk.attributes.append((module, inner))
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for parts in tables:
            for name, part in parts.items():
                if part is None:
                    self.walk.empty[f"{path}.{name}"] = parts, name
                else:
                    is_parameter = parts is tables[0] or has_own_gradient(part)
                    self._tensor(part, f"{path}.{name}", parts, name, (module, name), is_parameter=is_parameter)
        for kind in filter(inner.get, MODULE_HOOKS):
            hooks = inner[kind]
            for number, hook in hooks.items() if isinstance(hooks, (dict, Mapping)) else ():
                # Walk the values of a hook that is no plain function: a partial's arguments, an object's attributes.
                if isinstance(hook, partial) or is_user_object(hook):
                    self._value(hook, f"{path}.{kind}[{number}]", hooks, number, depth + 1, _IN_HOOK)
        for name, value in list(inner.items()):
            if name not in _MODULE_INTERNALS:
                self._attribute(value, f"{path}.{name}", inner, name, depth, module)
        self._class_values(module, path)
        for name, child in module._modules.items():
            if child is not None:
                self.walk.links.append((module._modules, name, child))
                self._module(child, f"{path}.{name}")

    def _take_found(self, known: int) -> list[str]:
        """Exclude tensors in slots after the first ``known`` (perhaps a dataset) from snapshots. Return their paths."""
        fresh = dict(islice(self.walk.slots.items(), known, None))
        held = [slot for slot in fresh.values() if not slot.is_parameter and slot.param is None]
        self.walk.found.update(id(tensor) for slot in held for tensor in slot.tensors())
        buffers = [part for module in self.walk.modules for part in module._buffers.values()]
        self.walk.found.difference_update(map(id, buffers))
        return list(fresh)

    def _walk_referents(self, value: Any, path: str, depth: int, source: Source) -> None:
        """Walk what a function, method, class, module, weak reference or buffer leads to."""
        if isinstance(value, FunctionType):
            # functools.wraps() copies ``__module__`` of the wrapped function to the user's function.
            is_own = is_users(value) or is_users_file(file_of(value.__code__, value.__globals__))
            if is_own and self._first_visit(value):
                self._function(value, path, depth, source)
        elif isinstance(value, MethodType | BuiltinMethodType):
            self._bound(value, path, depth, source)
        elif isinstance(value, torch.optim.Optimizer):
            self.walk.parts[path] = value
            if not isinstance(source[0], LRScheduler):
                self._named.append((path, unwrapped(value)))
        elif isinstance(value, partial):
            self._walk_referents(value.func, f"{path}.func", depth, source)
            self._tuple(value.args, f"{path}.args", ReadOnly(value), "args", depth, source)
            self._items(value.keywords, f"{path}.keywords", depth, source)
        elif isinstance(value, _lru_cache_wrapper):
            self._walk_referents(value.__wrapped__, f"{path}.__wrapped__", depth, source)
        elif isinstance(value, type):
            if is_users(value) and not issubclass(value, Enum) and self._first_visit(value):
                self._class(value, path, depth)
        elif isinstance(value, ModuleType):
            # A module that code names is walked by the names that the code loads from it.
            is_named = isinstance(source[0], Namespace)
            if not is_named and is_users_module(value, value.__name__) and self._first_visit(value):
                for name, item in list(vars(value).items()):
                    if isinstance(item, SCALARS) and not name.startswith("__"):
                        self._value(item, f"{path}.{name}", vars(value), name, depth + 1, (value, name))
        elif isinstance(value, MappingProxyType):
            for number, (key, item) in enumerate(value.items()):
                self._value(item, f"{path}[{key_name(key, number)}]", value, key, depth + 1, source)
        elif isinstance(value, weakref.ref):
            self.walk.objects[f"{path}()"] = Scalar(
                ComputedItem(value, lambda ref: ref() is not None), "alive", *source
            )
        elif has_contents(value):
            self.walk.scalars[f"{path}[:]"] = Scalar(ComputedItem(value, contents), "contents", *source)

    def _bound(self, method: MethodType | BuiltinMethodType, path: str, depth: int, source: Source) -> None:
        """Walk the object that a method is bound to, and its function. Built-in functions are bound to a module."""
        bound = method.__self__
        if bound is None or type(bound) is ModuleType:
            return
        if isinstance(bound, nn.Module | dict | list | deque) or is_user_object(bound):
            # The step's own object gets the name that the step's code uses for it.
            place = "self" if path == STEP else f"{path}.__self__"
            self._value(bound, place, ReadOnly(method), "__self__", depth + 1, source)
        if isinstance(method, MethodType):
            self._walk_referents(method.__func__, f"{path}.__func__", depth, source)

    def _function(self, function: FunctionType, path: str, depth: int, source: Source) -> None:
        """Walk a function's code, defaults and attributes. Its closure and globals are walked by name."""
        space = ReadOnly(function)
        self.walk.scalars[f"{path}.__code__"] = Scalar(space, "__code__", *source)
        self._value(function.__defaults__, f"{path}.__defaults__", space, "__defaults__", depth + 1, source)
        if function.__code__.co_kwonlyargcount:
            self._value(function.__kwdefaults__, f"{path}.__kwdefaults__", space, "__kwdefaults__", depth + 1, source)
        if vars(function):
            self.walk.containers.append(vars(function))
        for name, value in list(vars(function).items()):
            self._value(value, f"{path}.{name}", vars(function), name, depth + 1, (function, name))

    def _class(self, kind: type, path: str, depth: int) -> None:
        """Walk the values in a class that a place holds."""
        for members, name, value in _members(kind, kind, []):
            if type(members) is Inherited:
                self._value(value, f"{path}.{name}", members, name, depth + 1, (kind, name))
            elif not self._has_name(members, name):
                # A value that code has a name for is walked by that name only, so that it has one place.
                self.walk.places.append((members, name))
                self._value(value, f"{path}.{name}", members, name, depth + 1, (kind, name))


def _is_data(value: Any) -> bool:
    """Return True for a dataset, and for a container with many items (perhaps nested) that a step cannot write to:
    numbers, strings and objects that are not walked. Only the first and last items are checked.
    """
    kind = type(value)
    if not issubclass(kind, _CONTAINERS):
        return issubclass(kind, Dataset)
    is_long = _length(value) > _FEW or any(_length(item) > _FEW for item in _ends(value))
    return is_long and _holds_data(value, _LEVELS)


def _holds_data(value: Any, levels: int) -> bool:
    kind = type(value)
    if kind in PLAIN:
        return True
    if issubclass(kind, _CONTAINERS):
        return levels > 0 and all(_holds_data(item, levels - 1) for item in _ends(value))
    return is_of_library(kind) and not kind.__module__.startswith("torch")


def _length(value: Any) -> int:
    """Return the number of items of a container; 0 for anything else."""
    base: Any = next((base for base in _CONTAINERS if issubclass(type(value), base)), None)
    return 0 if base is None else base.__len__(value)


def _ends(value: Any) -> list[Any]:
    """Return the first and last few items of a container, or values of a dictionary; for a set the first few."""
    base: Any = next(base for base in _CONTAINERS if issubclass(type(value), base))
    items: Any = dict.values(value) if base is dict else value
    first = list(islice(iter(items) if base is dict else base.__iter__(items), _FEW))
    if base in (tuple, list):
        return [*first, *base.__getitem__(items, slice(-_FEW, None))]
    if base is set:
        return first
    return [*first, *islice(deque.__reversed__(items) if base is deque else reversed(items), _FEW)]


def _members(thing: Any, kind: type, before: list[Any]) -> Iterator[tuple[Members, str, Any]]:
    """Yield the values of ``kind`` and its user-defined bases that code finds through ``thing``: none that the
    dictionaries ``before`` or an earlier class in the method resolution order hide.
    """
    for base in users_bases(kind):
        members = Members(base) if base is thing else Inherited(base, tuple(before))
        for name, value in list(members.space.items()):
            if not name.startswith("__") and is_plain(value) and not any(name in space for space in before):
                yield members, name, value
        before.append(members.space)


def _is_entered(value: Any) -> bool:
    """Return True if a walk enters this value, or an item of this tuple, so that its identity need not be compared."""
    if issubclass(type(value), tuple):
        return any(map(_is_entered, tuple.__iter__(value)))
    return not is_proxy(value) and (issubclass(type(value), dict | list | deque) or is_user_object(value))


def _plain_items(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the items of a tuple that a walk does not enter, because they are compared as they are."""
    return tuple(item for item in tuple.__iter__(value) if issubclass(type(item), SCALARS))


def has_own_gradient(tensor: Tensor) -> bool:
    """Return True for a leaf tensor that has a gradient or requires one, as parameters do."""
    # A tensor may require a gradient only within the step, and keep its ``grad``.
    return tensor.is_leaf and (tensor.requires_grad or tensor.grad is not None)
