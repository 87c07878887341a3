"""Walk owners: find every place in them that holds a tensor or a Python value, with its path.

A *slot* is a container and a key that hold a tensor, at a path such as ``optimizer.state[model.fc.weight].exp_avg``.
*Links* are references between containers on the way there: guards on both detect a replaced layer or a reloaded
optimizer. Objects of torch or Lightning are entered only if they are named as owners, or are distributions or datasets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from itertools import islice
from types import MappingProxyType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from graphplan.owners.kinds import MAPPINGS, SCALARS, has_groups, is_of_library, is_user_object
from graphplan.owners.slots import ConditionalOwner, Namespace, OwnerByAttribute, Scalar, Slot, Walk
from graphplan.owners.values import Source, ValueWalker, has_own_gradient
from graphplan.owners.views import ComputedItem, GroupCounts, ReadOnly, attributes_of
from graphplan.specs.paths import free_name

_OPTIMIZER_INTERNALS = frozenset({"state", "param_groups", "defaults", "step", "zero_grad"})


class _Walker(ValueWalker):
    def __init__(self, owners: Mapping[str, Any]) -> None:
        names = next((owner for owner in owners.values() if isinstance(owner, Namespace)), Namespace())
        mentioned = names.mentioned if names.mentioned and not names.computes else None
        super().__init__(names, mentioned)
        self._roots = {
            name: owner.thing if isinstance(owner, (ReadOnly, OwnerByAttribute, ConditionalOwner)) else owner
            for name, owner in owners.items()
            if not isinstance(owner, Namespace)
        }

    def enter(self, owner: Any, path: str) -> None:
        """Walk a named owner of any type."""
        if isinstance(owner, ReadOnly):
            for name in owner.names:
                self.walk.scalars[f"{path}.{name}"] = Scalar(owner, name, owner.thing, name)
        elif isinstance(owner, GroupCounts):
            for key in filter(owner.keys.__contains__, owner.group):
                self.walk.scalars[f"{path}.{key}"] = Scalar(owner, key, owner, path)
        elif isinstance(owner, OwnerByAttribute):
            tables: tuple[dict[str, Any], ...] = (self.walk.scalars, self.walk.slots)
            counts = list(map(len, tables))
            self.enter(owner.thing, path)
            for table, count in zip(tables, counts, strict=True):
                for name in list(islice(table, count, None)):
                    table[name] = replace(table[name], via=owner.name)
        elif isinstance(owner, Namespace):
            self._names(owner)
        elif isinstance(owner, ConditionalOwner):
            self._reached(owner, path)
        elif isinstance(owner, nn.Module):
            self._module(owner, path)
        elif has_groups(owner):
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
            self._walk_referents(owner, path, 0, (owner, path))

    def _reached(self, owner: ConditionalOwner, path: str) -> None:
        if self._used.isdisjoint(owner.names):
            return
        known = len(self.walk.slots)
        if not owner.without:
            self.enter(owner.thing, path)
        elif self._first_visit(owner.thing):
            self._attributes(owner.thing, path, 0, without=owner.without)
        self.walk.reached.update(self._take_found(known))

    def _names(self, names: Namespace) -> None:
        known = len(self.walk.slots)
        there = list(names.there())
        held = {label: value for label, _, _, value in there}
        for label, space, key, value in there:
            if not isinstance(space, MappingProxyType):
                self.walk.places.append((space, key))
            path = self._path_of(label, value, names, held)
            # The leading dot says that code uses the value as an attribute of a module or class.
            self._value(value, path, space, key, 0, (names, f".{key}" if "." in label else key))
        self._take_found(known)

    def _path_of(self, label: str, value: Any, names: Namespace, held: Mapping[str, Any]) -> str:
        """Return ``label`` as a path, renamed if the paths of another owner or variable begin with the same name."""
        root, dot, rest = label.partition(".")
        if root not in self._roots and not (dot and root in names.entries):
            return label
        holder = self._roots[root] if root in self._roots else held.get(root)
        if (holder is value and not dot) or isinstance(holder, (ModuleType, type, NoneType)):
            return label
        return free_name(root, self._roots.keys() | names.entries.keys()) + dot + rest

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        if not self._first_visit(optimizer):
            return
        self.walk.optimizers[path] = optimizer
        inner = vars(optimizer)
        # A wrapper has none of its own, but exposes those of the wrapped optimizer.
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

    def leave_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the optimizer's groups as visited, so that no other name walks them: their values are flags."""
        groups = vars(optimizer).get("param_groups", [])
        self._seen.update(map(id, (groups, *groups)))

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
                # The tensor holds a number, such as a learning rate.
                self.walk.slots[f"{path}.{key}"] = Slot(group, key, group, key, path=f"{path}.{key}")
            elif key != "params" and is_user_object(value):
                self._value(value, f"{path}.{key}", group, key, 1, (value, key))

    def _scaler(self, scaler: GradScaler, path: str) -> None:
        """Walk a scaler's tensors and constants, and its stage for each optimizer, which ``update`` records anew."""
        inner = vars(scaler)
        notes = inner.get("_per_optimizer_states", {})
        self.walk.containers += [inner, notes]
        # Callables are not state: graphplan replaces ``_maybe_opt_step`` on the instance while a step runs.
        for name, value in list(inner.items()):
            if value is not notes and not callable(value):
                self._value(value, f"{path}.{name}", inner, name, 1, (scaler, name))
        names = {id(optimizer): name for name, optimizer in self.walk.optimizers.items()}
        for number, note in notes.items():
            self.walk.containers.append(note)
            stage = f"{path}.stage[{names.get(number, 'optimizer')}]"
            self.walk.scalars[stage] = Scalar(note, "stage", scaler, "stage")

    def take_names(self) -> None:
        """Add to each place the other names and attributes that lead to its container."""
        tables: tuple[dict[str, Any], ...] = (self.walk.scalars, self.walk.objects, self.walk.slots)
        found: dict[int, tuple[str | None, tuple[Source, ...]]] = {}
        for number, leads in self._leads.items():
            name = next((name for space, name in leads.values() if isinstance(space, Namespace)), None)
            found[number] = name, tuple(lead for lead in leads.values() if not isinstance(lead[0], Namespace))
        for table in tables if found else ():
            for path, place in table.items():
                # A property of a container as a whole, such as its length, is in a Told of its own.
                whole = isinstance(place.container, ComputedItem)
                leads_here = found.get(id(place.container.items if whole else place.container))
                if leads_here is not None:
                    table[path] = replace(place, name=leads_here[0], others=leads_here[1])

    def take_rest(self) -> None:
        """Walk the hyper-parameters of optimizers that are no owners, except groups that they share with owners."""
        owned = {id(group) for optimizer in self.walk.optimizers.values() for group in optimizer.param_groups}
        for path, optimizer in self._named:
            for index, group in enumerate(vars(optimizer).get("param_groups", [])):
                for key in group.keys() - {"params"} if id(group) not in owned else ():
                    place = f"{path}.param_groups[{index}].{key}"
                    self.walk.scalars[place] = Scalar(group, key, optimizer, "param_groups")


def walk_owners(owners: Mapping[str, Any]) -> Walk:
    """Walk ``owners``: modules first, so that optimizer state is named after the modules' parameters."""
    walker = _Walker(owners)
    for owner in owners.values():
        if isinstance(owner, torch.optim.Optimizer):
            walker.leave_groups(owner)
    ranked = sorted(owners.items(), key=lambda item: _rank(item[1]))
    for name, owner in ranked:
        if isinstance(owner, Tensor):
            assert isinstance(owners, MutableMapping)
            if has_own_gradient(owner):
                walker._parameter(owner, name, owners, name, (owners, name))
            else:
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
