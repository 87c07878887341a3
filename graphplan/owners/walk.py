"""Walking owners: every place in them that holds a tensor or a Python value, with its path.

A *slot* is a container and a key that hold a tensor; its path is such as ``model.bn.running_mean`` or
``optimizer.state[model.fc.weight].exp_avg``. *Links* are the chain of containers that leads to a slot: a guard that
checks links and slots sees a replaced layer or a reloaded optimizer, which a kept list of tensors would not.

Walking knows modules, optimizers, gradient scalers, and plain objects, dicts, lists and tuples; it does not enter
objects of torch or Lightning that it was not given by name, but for distributions and datasets.

Longer than most rooms: one walker, whose methods for the kinds of owners call each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils import _pytree as pytree

from graphplan.owners.kinds import MAPPINGS, SCALARS, is_of_library, is_of_no_length, is_plain_code, is_user_object
from graphplan.owners.naming import free_name
from graphplan.owners.referents import Source
from graphplan.owners.slots import Namespace, Reached, Scalar, Slot, Via, Walk
from graphplan.owners.value_walk import Values
from graphplan.owners.views import Extent, Length, Numbers, Rest, Room, Setting, attributes_of
from graphplan.specs.paths import Path

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OPTIMIZER_INTERNALS = frozenset({"state", "param_groups", "defaults", "step", "zero_grad"})
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}


class _Walker(Values):
    def __init__(self, owners: Mapping[str, Any]) -> None:
        super().__init__()
        names = [owner for owner in owners.values() if isinstance(owner, Namespace)]
        self._used = frozenset[str]().union(*(owner.attributes for owner in names))
        self._roots = {
            name: owner.thing if isinstance(owner, (Numbers, Via, Reached)) else owner
            for name, owner in owners.items()
            if not isinstance(owner, Namespace)
        }

    def enter(self, owner: Any, path: str) -> None:
        """Walk a named owner, whatever its type."""
        if isinstance(owner, Numbers):
            for name in owner.names:
                self.walk.scalars[f"{path}.{name}"] = Scalar(owner, name, owner.thing, name, owner.via)
        elif isinstance(owner, Via):
            known = {*self.walk.scalars, *self.walk.slots}
            self.enter(owner.thing, path)
            tables: tuple[dict[str, Any], ...] = (self.walk.scalars, self.walk.slots)
            for table in tables:
                for name in table.keys() - known:
                    table[name] = replace(table[name], via=owner.name)
        elif isinstance(owner, Namespace):
            self._names(owner)
        elif isinstance(owner, Reached):
            self._reached(owner, path)
        elif isinstance(owner, nn.Module):
            self._module(owner, path)
        elif isinstance(owner, torch.optim.Optimizer):
            self._optimizer(owner, path)
        elif isinstance(owner, GradScaler):
            self._scaler(owner, path)
        elif isinstance(owner, (*MAPPINGS, list, deque)):
            self._items(owner, path, 0, (owner, path))
        elif isinstance(owner, set):
            self._contents(owner, path, (owner, path))
        elif attributes_of(owner) is not None or is_user_object(owner):
            self._object(owner, path, 0)
        else:
            self._behind(owner, path, 0, (owner, path))

    def _reached(self, owner: Reached, path: str) -> None:
        if owner.names.isdisjoint(self._used):
            return
        known = set(self.walk.slots)
        if not owner.without:
            self.enter(owner.thing, path)
        elif self._first_visit(owner.thing):
            self._attributes(owner.thing, path, 0, without=owner.without)
        self.walk.reached |= self.walk.slots.keys() - known
        self._take_found(known)

    def _take_found(self, known: Collection[str]) -> None:
        """Tensors in slots other than ``known`` may be a whole dataset: they are not copied."""
        fresh = [slot for path, slot in self.walk.slots.items() if path not in known and not slot.is_parameter]
        self.walk.found.update(id(tensor) for slot in fresh if slot.param is None for tensor in slot.tensors())
        modules = [part for module in self.walk.modules for part in module._buffers.values()]
        self.walk.found.difference_update(map(id, modules))

    def _names(self, names: Namespace) -> None:
        known = set(self.walk.slots)
        for label, space, key, value in names.there():
            if not isinstance(space, MappingProxyType):
                self.walk.places.append((space, key))
            settled = names.settled.get(label)
            if settled is not None and settled[0] is value:
                self.walk.scalars[label] = settled[1]
                continue
            path = self._path_of(label, value, names)
            # What a module or a class holds is used as an attribute, which the dot says.
            self._value(value, path, space, key, 0, (names, f".{key}" if "." in label else key))
            if path == label and is_plain_code(value):
                names.settled[label] = value, self.walk.scalars[label]
        self._take_found(known)

    def _path_of(self, label: str, value: Any, names: Namespace) -> str:
        """``label``, but what the owner of that name holds, or the variable of that name, is at paths of its own."""
        root, dot, rest = label.partition(".")
        if root not in self._roots and not (dot and root in names.entries):
            return label
        holder = self._roots[root] if root in self._roots else names.held(root)
        if (holder is value and not dot) or isinstance(holder, (ModuleType, type, NoneType)):
            return label
        return free_name(root, self._roots.keys() | names.entries.keys()) + dot + rest

    def _module(self, module: nn.Module, path: str, depth: int = 0) -> None:
        if not self._first_visit(module):
            return
        self.walk.modules.append(module)
        self.walk.module_paths.append(path)
        self.walk.parts[path] = module
        inner = vars(module)
        # A scripted module keeps its own in C++ and shows views of that.
        kinds = (inner[kind] for kind in ("_parameters", "_buffers", "_modules"))
        self.walk.containers += [items for items in kinds if isinstance(items, MAPPINGS)]
        self.walk.containers.append(inner)
        self.walk.attributes.append((module, inner))
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for parts in tables:
            for name, part in parts.items():
                if part is None:
                    self.walk.empty[f"{path}.{name}"] = parts, name
                elif parts is tables[0]:
                    self._parameter(part, f"{path}.{name}", parts, name, (module, name))
                else:
                    self._slot(f"{path}.{name}", parts, name, (module, name))
                    self._marks(part, f"{path}.{name}")
        for kind in _HOOKS:
            for number, hook in inner.get(kind, {}).items() if isinstance(inner.get(kind), (dict, Mapping)) else ():
                self._hook(hook, f"{path}.{kind}[{number}]", inner[kind], number, depth)
        for name, value in list(inner.items()):
            if name not in _MODULE_INTERNALS and name != "training":
                self._value(value, f"{path}.{name}", inner, name, depth + 1, (module, name))
        self._class_values(module, path)
        if isinstance(module, torch.jit.ScriptModule):
            self._scripted(module, path)
        for name, child in module._modules.items():
            if child is not None:
                self.walk.links.append((module._modules, name, child))
                self._module(child, f"{path}.{name}")

    def _loader(self, loader: Any, path: str, depth: int, source: Source) -> None:
        """Its length, and those attributes that code names: a dataset may be large, and an iterator has workers."""
        is_used = isinstance(source[0], Namespace) or source[1].removeprefix(".") in self._used
        if not is_used or not self._first_visit(loader):
            return
        known = set(self.walk.slots)
        if not is_of_no_length(loader):
            self.walk.objects[Path.length(path)] = Scalar(Length(loader), "len", *source)
        for name, value in list(vars(loader).items()):
            if name in self._used:
                self._value(value, f"{path}.{name}", vars(loader), name, depth + 1, (loader, name))
        self.walk.reached |= self.walk.slots.keys() - known
        self._take_found(known)

    def _scripted(self, module: torch.jit.ScriptModule, path: str) -> None:
        """What a scripted module keeps in C++, where its code reads it: no bytecode names that."""
        known = getattr(module, "_concrete_type", None)
        for name in known.get_attributes() if known is not None else ("training",):
            place, value = f"{path}.{name}", getattr(module, name)
            if type(value) is Tensor and name not in module._buffers and name not in module._parameters:
                self.walk.slots[place] = Slot(Setting(module), name, module, name, path=place, name=name)
            elif all(isinstance(leaf, SCALARS) for leaf in pytree.tree_leaves(value)):
                self.walk.scalars[place] = Scalar(Numbers(module, (name,)), name, module, name, name=name)

    def _hook(self, hook: Any, path: str, hooks: Any, number: int, depth: int) -> None:
        """What a hook has that is no plain function: a partial's arguments, an object's attributes."""
        if isinstance(hook, partial) or is_user_object(hook):
            self._value(hook, path, hooks, number, depth + 1, (hooks, "hook"))

    def _parameter(self, param: nn.Parameter, path: str, container: Any, key: Any, source: Source) -> None:
        self.walk.slots[path] = Slot(container, key, *source, path=path, is_parameter=True)
        if id(param) not in self.walk.parameters:
            self._marks(param, path)
            self.walk.parameters[id(param)] = (path, param)
            if param.requires_grad or param.grad is not None:
                place = Path.gradient(path)
                self.walk.slots[place] = Slot(None, None, param, "grad", path=place, param=param)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        if not self._first_visit(optimizer):
            return
        self.walk.optimizers[path] = optimizer
        inner = vars(optimizer)
        # A wrapper shows those of the optimizer that it keeps.
        state, groups = (inner.get(name, empty) for name, empty in (("state", {}), ("param_groups", [])))
        self.walk.links += [(inner, name, inner[name]) for name in ("state", "param_groups") if name in inner]
        self.walk.containers += [inner, state, groups]
        for index, group in enumerate(groups):
            self._group(group, f"{path}.param_groups[{index}]", groups, index)
        for owner, values in state.items():
            known = self.walk.parameters.get(id(owner))
            name = known[0] if known else str(owner)
            if isinstance(values, MAPPINGS):
                self.walk.links.append((state, owner, values))
                self._items(values, f"{path}.state[{name}]", 1, (optimizer, "state"))
            else:
                self._value(values, f"{path}.state[{name}]", state, owner, 1, (optimizer, "state"))
        for name, value in list(inner.items()):
            own = name in _OPTIMIZER_INTERNALS or name.startswith("_optimizer_")
            if not own and (isinstance(value, (Tensor, list, dict, *SCALARS)) or not is_of_library(type(optimizer))):
                self._value(value, f"{path}.{name}", inner, name, 1, (optimizer, name))

    def take_names(self) -> None:
        """Names that code has for containers of owners, for what lies in these."""
        tables: tuple[dict[str, Any], ...] = (self.walk.scalars, self.walk.objects, self.walk.slots)
        for table in tables if self._names_of else ():
            for path, place in table.items():
                # What is seen of a container as a whole, its length for one, has a space of its own.
                whole = isinstance(place.container, Extent | Rest | Room)
                name = self._names_of.get(id(place.container.items if whole else place.container))
                if name is not None:
                    table[path] = replace(place, name=name)

    def take_rest(self) -> None:
        """Hyper-parameters of optimizers that no owner is, but the step's code can come to; and what weakly referenced
        objects alone hold: the walk does not go there.
        """
        self.walk.objects |= {path: scalar for path, thing, scalar in self._weakly_held if id(thing) not in self._seen}
        for path, optimizer in self._named:
            for index, group in enumerate([] if optimizer in self.walk.optimizers.values() else optimizer.param_groups):
                for key in group.keys() - {"params"}:
                    place = f"{path}.param_groups[{index}].{key}"
                    self.walk.scalars[place] = Scalar(group, key, optimizer, "param_groups")

    def _group(self, group: dict[str, Any], path: str, groups: list[Any], index: int) -> None:
        params = group["params"]
        self.walk.links += [(groups, index, group), (group, "params", params)]
        self.walk.containers += [group, params]
        for number, param in enumerate(params):
            self.walk.links.append((params, number, param))
            if id(param) not in self.walk.parameters:
                self._parameter(param, f"{path}.params[{number}]", params, number, (group, "params"))
        for key, value in group.items():
            if key != "params" and isinstance(value, Tensor):
                self._slot(f"{path}.{key}", group, key, (group, key))
            elif key != "params" and is_user_object(value):
                self._value(value, f"{path}.{key}", group, key, 1, (value, key))

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


def walk_owners(owners: Mapping[str, Any]) -> Walk:
    """Walk ``owners``: modules first, so that optimizers can name their state after the modules' parameters."""
    walker = _Walker(owners)
    ranked = sorted(owners.items(), key=lambda item: _rank(item[1]))
    for name, owner in ranked:
        if isinstance(owner, Tensor):
            assert isinstance(owners, MutableMapping)
            walker._value(owner, name, owners, name, 0, (owners, name))
        else:
            walker.enter(owner, name)
    walker.take_rest()
    walker.take_names()
    return walker.walk


def _rank(owner: Any) -> int:
    if isinstance(owner, nn.Module):
        return 0
    if isinstance(owner, torch.optim.Optimizer):
        return 1
    return 3 if isinstance(owner, Namespace) else 2
