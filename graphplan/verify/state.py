"""The state after a step: tensors, Python values, random generators and results, by path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.environment.devices import default_generators
from graphplan.owners.flags import Flags
from graphplan.owners.kinds import PLAIN
from graphplan.owners.slots import Walk
from graphplan.specs.paths import Path
from graphplan.tensors.attributes import has_memory, is_freed
from graphplan.tensors.dtensors import local

_GENERATOR = "torch's random generator"
Leaves = Sequence[tuple[str, Any]]  # A result's leaves by name, of :func:`graphplan.tensors.trees.named_leaves`.


@dataclass(frozen=True, slots=True)
class State:
    """Everything that can be compared after a step. Results are among the tensors and values, as ``result…``."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def collect_tensors(
    walk: Walk,
    result: Leaves,
    extra: Mapping[str, Tensor],
    generators: Iterable[torch.Generator],
    allowed: Callable[[str], bool],
) -> dict[str, Tensor]:
    """Return the current tensors of owners, ``result``, ``extra``, torch's default generators and ``generators``."""
    tensors = {name: local(leaf) for name, leaf in result if isinstance(leaf, Tensor)}
    tensors.update(tensors_of(walk, allowed))
    tensors.update(extra)
    for number, generator in enumerate([*default_generators(), *generators]):
        tensors[f"{_GENERATOR} of {generator.device} ({number})"] = generator.get_state()
    held = {path: tensor for path, tensor in tensors.items() if has_memory(tensor)}
    return {path: tensor for path, tensor in held.items() if tensor.layout is torch.strided and not is_freed(tensor)}


def collect_values(
    walk: Walk, result: Leaves, allowed: Callable[[str], bool], fed: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the current Python values of owners and ``result``, flags of owners and ``fed``, and torch's switches."""
    values = {name: leaf for name, leaf in result if not isinstance(leaf, Tensor)}
    for path, scalar in walk.scalars.items():
        if not scalar.is_stored_here or allowed(path):
            continue
        values.update((name, part) for name, part in _parts(path, scalar.get()) if not issubclass(type(part), Tensor))
    flags = Flags(walk, fed).read().items()
    values.update((path, flag) for path, flag in flags if not (isinstance(flag, Tensor) or allowed(path)))
    values.update({Path.length(path): len(items) for path, items in walk.lists.items() if not allowed(path)})
    return values


def tensors_of(walk: Walk, is_left_out: Callable[[str], bool] = lambda path: False) -> dict[str, Tensor]:
    """Return the tensors that are now in the walk's slots, by path; several in one slot are numbered."""
    found: dict[str, Tensor] = {}
    for path, slot in walk.slots.items():
        if is_left_out(path):
            continue
        leaves = slot.tensors()
        if len(leaves) == 1:
            found[path] = leaves[0]
        else:
            found.update((f"{path}[{number}]", tensor) for number, tensor in enumerate(leaves))
    for path, scalar in walk.scalars.items():
        if not is_left_out(path) and type(value := scalar.get()) not in PLAIN:
            found.update((name, part) for name, part in _parts(path, value) if issubclass(type(part), Tensor))
    return found


def _parts(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Return the value of a scalar by path; for a tuple of containers with tensors, its leaves."""
    if type(value) is not tuple or all(type(item) in PLAIN for item in value):
        return [(path, value)]
    leaves = pytree.tree_flatten_with_path(value)[0]
    # Use type(), not isinstance(): an object's ``__class__`` may raise.
    if not any(issubclass(type(leaf), Tensor) for _, leaf in leaves):
        return [(path, value)]
    return [(f"{path}{pytree.keystr(keys)}", leaf) for keys, leaf in leaves]
