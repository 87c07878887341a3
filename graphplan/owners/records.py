"""What a walk over owners finds: slots, scalars, and everything else that leads to them."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Container = MutableMapping[Any, Any] | list[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place that holds a tensor, or a tuple with tensors in it. ``param`` is set for ``.grad`` slots."""

    path: str
    container: Any
    key: Any
    is_parameter: bool = False
    param: Tensor | None = None

    def get(self) -> Any:
        """What the slot holds now; None if it is gone."""
        if self.param is not None:
            return self.param.grad
        try:
            return self.container[self.key]
        except (KeyError, IndexError):
            return None

    def set(self, value: Any) -> None:
        """Bind ``value`` here."""
        if self.param is not None:
            self.param.grad = value
        else:
            self.container[self.key] = value

    def tensors(self) -> list[Tensor]:
        """The tensor leaves of what the slot holds now."""
        return tensor_leaves(self.get())


def tensor_leaves(value: Any) -> list[Tensor]:
    """Tensors in ``value``: itself, or the leaves of a (nested) tuple."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return []


@dataclass(frozen=True, slots=True)
class Scalar:
    """A place that holds a Python value; ``owner.attribute`` is the attribute that leads to it."""

    container: Any
    key: Any
    owner: Any
    attribute: str

    def get(self) -> Any:
        """The value now."""
        return self.container[self.key]


class Numbers:
    """Python values that some object shows as attributes, properties included: read, guarded, never written."""

    def __init__(self, thing: Any, names: Iterable[str]) -> None:
        self.thing = thing
        self.names = tuple(names)

    def __getitem__(self, name: str) -> Any:
        return getattr(self.thing, name)


@dataclass(slots=True)
class Walk:
    """All that a walk over owners found, in walking order."""

    slots: dict[str, Slot] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)
    links: list[tuple[Any, Any, Any]] = field(default_factory=list)
    containers: list[Container] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    parameters: dict[int, tuple[str, nn.Parameter]] = field(default_factory=dict)

    def place(self, path: str) -> Slot | None:
        """The slot of that path, also where it holds a Python value (None, say) at the moment."""
        slot, scalar = self.slots.get(path), self.scalars.get(path)
        if slot is None and scalar is not None:
            return Slot(path, scalar.container, scalar.key)
        return slot

    def by_storage(self) -> dict[int, list[Slot]]:
        """Slots grouped by the identity of the storage behind them."""
        groups: dict[int, list[Slot]] = {}
        for slot in self.slots.values():
            for tensor in slot.tensors():
                key = storage_id(tensor)
                if key is not None:
                    groups.setdefault(key, []).append(slot)
        return groups


def storage_id(tensor: Tensor) -> int | None:
    """Identity of the storage behind ``tensor``; None if it has none (sparse, opaque)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def is_optimizer_state(path: str) -> bool:
    """Whether ``path`` is a slot of an optimizer's ``state``."""
    return ".state[" in path
