"""Frozen records of a traced step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphplan.errors import RefusalError
from graphplan.owners import Slot
from graphplan.tracer.changes import Changes
from graphplan.tracer.profile import Reads
from graphplan.tracer.source import Source
from graphplan.tracer.spaces import Ran


@dataclass(frozen=True, slots=True)
class Operator:
    """One dispatched operator. ``operands`` are ``("external" | "internal", number)`` in argument order, numbered by
    first appearance; ``scalars`` are the other arguments by name; ``launches`` is False for views and allocations.
    """

    name: str
    operands: tuple[tuple[str, int], ...]
    scalars: tuple[tuple[str, Any], ...]
    source: Source
    launches: bool
    constant: Tensor | None = None
    random: bool = False


@dataclass(slots=True)
class TracedExternal:
    """A storage that existed before the step, through the tensor that first brought it in (held alive)."""

    tensor: Tensor
    operator: str
    source: Source
    mutated: bool = False
    mutated_by: str = ""
    mutated_at: Source | None = None


@dataclass(slots=True)
class Trace:
    """Facts of one real step. ``leaf_storages`` has the storage identity of each tensor leaf by index;
    ``generator_states`` say where the generators stood, which are others than torch's default ones.
    """

    operators: list[Operator] = field(default_factory=list)
    externals: dict[int, TracedExternal] = field(default_factory=dict)
    leaf_storages: dict[int, int] = field(default_factory=dict)
    output_leaves: list[Any] = field(default_factory=list)
    output_names: list[str] = field(default_factory=list)
    output_storages: set[int | None] = field(default_factory=set)
    output_structure: Any = None
    changes: Changes = field(default_factory=Changes)
    violation: RefusalError | None = None
    entry_slots: dict[int, list[Slot]] = field(default_factory=dict)
    found: set[int | None] = field(default_factory=set)
    entry_paths: frozenset[str] = frozenset()
    entry_scalars: dict[str, Any] = field(default_factory=dict)
    reads: Reads = field(default_factory=Reads)
    ran: Ran = field(default_factory=Ran)
    generators: list[torch.Generator] = field(default_factory=list)
    generator_states: list[Tensor] = field(default_factory=list)
    device: torch.device | None = None
    device_constants: list[Tensor] = field(default_factory=list)
    unowned_writes: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def undo_unowned(self) -> None:
        """Put back what the step changed and no snapshot has: tensors that nobody owns or that only a name in the code
        leads to, and generators.
        """
        with torch.no_grad():
            for tensor, value in self.unowned_writes:
                tensor.detach().copy_(value)
        for generator, state in zip(self.generators, self.generator_states, strict=True):
            generator.set_state(state)

    @property
    def launches(self) -> int:
        """Operators that the device would run: views and allocations are free."""
        return sum(op.launches for op in self.operators)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """Stands for a tensor that the step returned: ``leaf`` or ``path`` if it is one that went in, else internal."""

    leaf: int | None = None
    path: str | None = None
