"""Settings that a step may leave changed: modes of modules, ``requires_grad``, values in parameter groups, torch's
global switches. They are part of a program's key: all its replays begin, and so end, with the same settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from graphplan.environment.switches import NAMES, SWITCHES, read_all, set_some
from graphplan.owners.slots import Walk, is_optimizer_state
from graphplan.owners.tensor_metadata import Sentinel
from graphplan.owners.views import Setting

_CONTAINERS = (list, dict, set)
COMPUTED = Sentinel("a result's")
"""The ``requires_grad`` of a non-leaf tensor, which cannot be set."""


class _Asking(Setting):
    """The ``requires_grad`` flag of a tensor."""

    def __getitem__(self, name: str) -> Any:
        return self.thing.requires_grad if self.thing.is_leaf else COMPUTED

    def __setitem__(self, name: str, value: Any) -> None:
        if self.thing.is_leaf and value is not COMPUTED:
            self.thing.requires_grad = value


class Flags:
    """The places of all settings. ``walk`` is over the owners; ``fed`` are further tensors, by name."""

    def __init__(self, walk: Walk, fed: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        self._places: dict[str, tuple[Any, str]] = {}
        for path, module in walk.parts.items():
            if isinstance(module, nn.Module) and hasattr(module, "training"):
                # A scripted module keeps its mode in C++.
                space = vars(module) if "training" in vars(module) else Setting(module)
                self._places[f"{path}.training"] = space, "training"
        for path, tensor in (*_tensors(walk), *fed.items()):
            self._places[f"{path}.requires_grad"] = _Asking(tensor), "requires_grad"
        self._groups = {
            f"{path}.param_groups[{index}].": group
            for path, optimizer in walk.optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
        }

    def read(self) -> dict[str, Any]:
        """Return the current values by path."""
        with torch._C.DisableTorchFunctionSubclass():
            found = {path: container[key] for path, (container, key) in self._places.items()}
        for path, group in self._groups.items():
            found.update((f"{path}{key}", _kept(value)) for key, value in group.items() if key != "params")
        return {**found, **dict(zip(NAMES, read_all(), strict=True))}

    def assign(self, values: Mapping[str, Any]) -> None:
        """Set the places to ``values`` that :meth:`read` returned, except containers and places that cannot be set."""
        with torch._C.DisableTorchFunctionSubclass():
            for path in values.keys() & self._places.keys():
                (container, key), value = self._places[path], values[path]
                if container[key] is not value:
                    container[key] = value
        others = {path: values[path] for path in values.keys() - self._places.keys()}
        for prefix, group in self._groups.items():
            own = {path.removeprefix(prefix): value for path, value in others.items() if path.startswith(prefix)}
            group.update((key, value) for key, value in own.items() if type(value) not in _CONTAINERS)
        switches = {name: others[name] for name in NAMES if name in others}
        if switches:
            set_some(switches)


def is_assignable(path: str, value: Any) -> bool:
    """Return True if :meth:`Flags.assign` can set ``path`` to ``value`` after each step."""
    if path in NAMES:
        return SWITCHES[NAMES.index(path)].set is not None
    return type(value) not in _CONTAINERS and not isinstance(value, Tensor)


def _tensors(walk: Walk) -> Iterator[tuple[str, Tensor]]:
    yield from walk.parameters.values()
    for path, slot in walk.slots.items():
        if not slot.is_parameter and slot.param is None and not is_optimizer_state(path):
            for number, tensor in enumerate(slot.tensors()):
                yield f"{path}[{number}]" if number else path, tensor


def _kept(value: Any) -> Any:
    """Return ``value``, or a copy of a container, which code may change in place."""
    return type(value)(value) if type(value) in _CONTAINERS else value
