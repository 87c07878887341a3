"""Walking owners: every place in them that holds a tensor or a Python value, with its path.

A *slot* is a container and a key that hold a tensor; its path is such as ``model.bn.running_mean`` or
``optimizer.state[model.fc.weight].exp_avg``. *Links* are the chain of containers that leads to a slot: a guard that
checks links and slots sees a replaced layer or a reloaded optimizer, which a kept list of tensors would not.

Walking knows modules, optimizers, gradient scalers, and plain objects, dicts, lists and tuples; it does not enter
objects of torch or Lightning that it was not given by name.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace
from enum import Enum
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from graphplan.owners.records import (
    Contents,
    Extent,
    Namespace,
    Numbers,
    Scalar,
    Slot,
    Via,
    Walk,
    tensor_leaves,
)

SCALARS = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = ("graphplan", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy")
_FOREIGN = (sys.stdlib_module_names | {*_LIBRARIES}) - {"argparse", "types", "__main__"}
"""Packages whose objects are not walked; plain namespaces of the standard library are the user's own."""
_ATOMS = (type, ModuleType, Enum, partial)
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
_MAX_DEPTH = 6
_MAX_ITEMS = 4096


class _Walker:
    def __init__(self) -> None:
        self.walk = Walk()
        self._seen: set[int] = set()

    def enter(self, owner: Any, path: str) -> None:
        """Walk a named owner, whatever its type."""
        if isinstance(owner, Numbers):
            for name in owner.names:
                self.walk.scalars[f"{path}.{name}"] = Scalar(owner, name, owner.thing, name, owner.via)
        elif isinstance(owner, Via):
            known = set(self.walk.scalars)
            self.enter(owner.thing, path)
            for name in self.walk.scalars.keys() - known:
                self.walk.scalars[name] = replace(self.walk.scalars[name], via=owner.name)
        elif isinstance(owner, Namespace):
            self._names(owner)
        elif isinstance(owner, nn.Module):
            self._module(owner, path)
        elif isinstance(owner, torch.optim.Optimizer):
            self._optimizer(owner, path)
        elif isinstance(owner, GradScaler):
            self._scaler(owner, path)
        elif isinstance(owner, MutableMapping | list):
            self._items(owner, path, 0, (owner, path))
        elif isinstance(owner, set | deque):
            self._contents(owner, path, (owner, path))
        elif hasattr(owner, "__dict__"):
            self._object(owner, path, 0)

    def _names(self, names: Namespace) -> None:
        known = set(self.walk.slots)
        for label, (space, key) in names.entries.items():
            try:
                value = space[key]
            except KeyError:
                continue
            if not isinstance(space, MappingProxyType):
                self.walk.places.append((space, key))
            # What a module or a class holds is used as an attribute, which the dot says.
            self._value(value, label, space, key, 0, (names, f".{key}" if "." in label else key))
        fresh = [slot for path, slot in self.walk.slots.items() if path not in known and not slot.is_parameter]
        self.walk.found.update(id(tensor) for slot in fresh if slot.param is None for tensor in slot.tensors())
        modules = [part for module in self.walk.modules for part in module._buffers.values()]
        self.walk.found.difference_update(map(id, modules))

    def _first_visit(self, thing: Any) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        return True

    def _module(self, module: nn.Module, path: str, depth: int = 0) -> None:
        if not self._first_visit(module):
            return
        self.walk.modules.append(module)
        inner = vars(module)
        # A scripted module keeps its own in C++ and shows views of that.
        kinds = (inner[kind] for kind in ("_parameters", "_buffers", "_modules"))
        self.walk.containers += [items for items in kinds if isinstance(items, MutableMapping)]
        self.walk.containers.append(inner)
        for name, param in module._parameters.items():
            if param is not None:
                self._parameter(param, f"{path}.{name}", module._parameters, name)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self._slot(f"{path}.{name}", module._buffers, name)
        for name, value in list(inner.items()):
            if name not in _MODULE_INTERNALS and name != "training":
                self._value(value, f"{path}.{name}", inner, name, depth + 1, (module, name))
        self._class_values(module, path)
        for name, child in module._modules.items():
            if child is not None:
                self.walk.links.append((module._modules, name, child))
                self._module(child, f"{path}.{name}")

    def _class_values(self, thing: Any, path: str) -> None:
        """Python values that the user's classes hold for ``thing``, unless it has its own."""
        for kind in type(thing).__mro__:
            if kind.__module__.split(".")[0] in _FOREIGN:
                continue
            for name, value in vars(kind).items():
                known = f"{path}.{name}" in self.walk.scalars or name in vars(thing)
                if isinstance(value, SCALARS) and not name.startswith("__") and not known:
                    self.walk.scalars[f"{path}.{name}"] = Scalar(Numbers(kind, (name,)), name, thing, name)

    def _parameter(self, param: nn.Parameter, path: str, container: Any, key: Any) -> None:
        self.walk.slots[path] = Slot(path, container, key, is_parameter=True)
        if id(param) not in self.walk.parameters:
            self.walk.parameters[id(param)] = (path, param)
            if param.requires_grad or param.grad is not None:
                self.walk.slots[f"{path}.grad"] = Slot(f"{path}.grad", None, None, param=param)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        if not self._first_visit(optimizer):
            return
        self.walk.optimizers[path] = optimizer
        inner = vars(optimizer)
        state, groups = inner["state"], inner["param_groups"]
        self.walk.links += [(inner, "state", state), (inner, "param_groups", groups)]
        self.walk.containers += [inner, state, groups]
        for index, group in enumerate(groups):
            self._group(group, f"{path}.param_groups[{index}]", groups, index)
        for owner, values in state.items():
            known = self.walk.parameters.get(id(owner))
            name = known[0] if known else str(owner)
            self.walk.links.append((state, owner, values))
            if isinstance(values, MutableMapping):
                self._items(values, f"{path}.state[{name}]", 1, (optimizer, "state"))
        for name, value in list(inner.items()):
            own = name in ("state", "param_groups", "defaults") or name.startswith("_optimizer_")
            if isinstance(value, (Tensor, list, dict, *SCALARS)) and not own:
                self._value(value, f"{path}.{name}", inner, name, 1, (optimizer, name))

    def _group(self, group: dict[str, Any], path: str, groups: list[Any], index: int) -> None:
        params = group["params"]
        self.walk.links += [(groups, index, group), (group, "params", params)]
        self.walk.containers += [group, params]
        for number, param in enumerate(params):
            self.walk.links.append((params, number, param))
            if id(param) not in self.walk.parameters:
                self._parameter(param, f"{path}.params[{number}]", params, number)
        for key, value in group.items():
            if key != "params" and isinstance(value, Tensor):
                self._slot(f"{path}.{key}", group, key)

    def _scaler(self, scaler: GradScaler, path: str) -> None:
        """A scaler's tensors and constants, and how far it has come with each optimizer.

        Its notes on the optimizers are new ones after every ``update``, so nothing leads through them.
        """
        inner = vars(scaler)
        notes = inner.get("_per_optimizer_states", {})
        self.walk.containers += [inner, notes]
        for name, value in list(inner.items()):
            # Callables are no state of a scaler: its own decision may be replaced while a step runs.
            if value is not notes and not callable(value):
                self._value(value, f"{path}.{name}", inner, name, 1, (scaler, name))
        names = {id(optimizer): name for name, optimizer in self.walk.optimizers.items()}
        for number, note in notes.items():
            self.walk.containers.append(note)
            stage = f"{path}.stage[{names.get(number, 'optimizer')}]"
            self.walk.scalars[stage] = Scalar(note, "stage", scaler, "stage")

    def _slot(self, path: str, container: Any, key: Any) -> None:
        self.walk.slots[path] = Slot(path, container, key)

    def _items(
        self, items: MutableMapping[Any, Any] | list[Any], path: str, depth: int, source: tuple[Any, str]
    ) -> None:
        if not self._first_visit(items):
            return
        self.walk.containers.append(items)
        if not isinstance(source[0], torch.optim.Optimizer):
            self.walk.objects[f"len({path})"] = Scalar(Extent(items), "len", *source)
        dotted = isinstance(items, MutableMapping)
        if isinstance(items, list):
            self.walk.lists[path] = items
        pairs: Iterable[tuple[Any, Any]] = items.items() if isinstance(items, MutableMapping) else enumerate(items)
        for count, (key, value) in enumerate(list(pairs)):
            if count >= _MAX_ITEMS:
                break
            name = f"{path}.{key}" if dotted and isinstance(key, str) else f"{path}[{_key_name(key)}]"
            self._value(value, name, items, key, depth + 1, source)

    def _contents(self, items: set[Any] | deque[Any], path: str, source: tuple[Any, str]) -> None:
        self.walk.containers.append(items)
        self.walk.scalars[path] = Scalar(Contents(items), "contents", *source)

    def _object(self, thing: Any, path: str, depth: int) -> None:
        if not self._first_visit(thing):
            return
        inner = vars(thing)
        self.walk.containers.append(inner)
        for name, value in list(inner.items()):
            self._value(value, f"{path}.{name}", inner, name, depth + 1, (thing, name))
        self._class_values(thing, path)

    def _value(self, value: Any, path: str, container: Any, key: Any, depth: int, source: tuple[Any, str]) -> None:
        if _is_gone(value):
            return
        if isinstance(value, nn.Parameter):
            self._parameter(value, path, container, key)
        elif isinstance(value, Tensor) or (isinstance(value, tuple) and tensor_leaves(value)):
            self._slot(path, container, key)
        elif depth > _MAX_DEPTH:
            return
        elif isinstance(value, nn.Module):
            self.walk.links.append((container, key, value))
            self._module(value, path, depth)
        elif isinstance(value, dict | list):
            self.walk.links.append((container, key, value))
            self._items(value, path, depth, source)
        elif isinstance(value, set | deque):
            self.walk.links.append((container, key, value))
            self._contents(value, path, source)
        elif isinstance(value, tuple):
            self.walk.scalars[path] = Scalar(container, key, *source)
            for number, item in enumerate(value):
                if not isinstance(item, SCALARS):
                    self._value(item, f"{path}[{number}]", value, number, depth + 1, source)
        elif is_user_object(value):
            self.walk.links.append((container, key, value))
            self.walk.objects[path] = Scalar(container, key, *source)
            self._object(value, path, depth)
        else:
            # Numbers and strings, but also functions, types, dtypes: whatever a step's code can tell apart.
            self.walk.scalars[path] = Scalar(container, key, *source)


def _is_gone(value: Any) -> bool:
    """Whether ``value`` stands for something that is no longer there."""
    try:
        return type(value) in ProxyTypes and value.__class__ is None
    except ReferenceError:
        return True


def _key_name(key: Any) -> str:
    return repr(key) if isinstance(key, str | int) else type(key).__name__


def is_user_object(value: Any) -> bool:
    """Whether ``value``'s attributes are walked: an instance of a class that is not a library's."""
    if isinstance(value, LRScheduler):
        return True
    if isinstance(value, torch.optim.Optimizer):
        # It is walked as an optimizer where it is an owner, whoever wrote it.
        return False
    root = type(value).__module__.split(".")[0]
    # The attributes of an alias such as tuple[int, str] are those of its class, which is no dictionary.
    inner = getattr(value, "__dict__", None)
    return isinstance(inner, dict) and root not in _FOREIGN and not isinstance(value, _ATOMS)


def walk_owners(owners: Mapping[str, Any]) -> Walk:
    """Walk ``owners``: modules first, so that optimizers can name their state after the modules' parameters."""
    walker = _Walker()
    ranked = sorted(owners.items(), key=lambda item: _rank(item[1]))
    for name, owner in ranked:
        if isinstance(owner, Tensor):
            assert isinstance(owners, MutableMapping)
            walker._value(owner, name, owners, name, 0, (owners, name))
        else:
            walker.enter(owner, name)
    return walker.walk


def _rank(owner: Any) -> int:
    if isinstance(owner, nn.Module):
        return 0
    if isinstance(owner, torch.optim.Optimizer):
        return 1
    return 3 if isinstance(owner, Namespace) else 2
