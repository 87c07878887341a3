"""The records of a traced step, and the refusals that ``graphplan check`` collects while planning goes on."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphplan.environment.devices import set_generator
from graphplan.errors import LearningRateError, RefusalError
from graphplan.observe.executed_code import ExecutedCode
from graphplan.observe.profile import Reads
from graphplan.observe.source import Source, find_source
from graphplan.owners.slots import Slot, Walk
from graphplan.specs.roles import Footprint, TensorSpec
from graphplan.tensors.attributes import is_freed
from graphplan.tensors.storages import is_memory_shared, put_back, storage_id, whole_storage
from graphplan.trace.batch_recorder import BatchRecorder
from graphplan.trace.changes import Changes
from graphplan.trace.collectives import is_collective
from graphplan.trace.deferred_reads import DeferredReads
from graphplan.trace.host_reads import HostRead
from graphplan.trace.host_transfers import HostProgram, Transfer
from graphplan.trace.operands import Operand
from graphplan.trace.rng import SavedStates
from graphplan.trace.symbolic_numbers import NumberTensor, SymbolicNumbers

_MOST = 64
"""Maximum number of collected refusals: a step that reads the device in a loop over rows has one text for each row."""
_collected: list[dict[str, RefusalError]] = []


@contextmanager
def collecting() -> Iterator[dict[str, RefusalError]]:
    """Collect the refusals, by text, of the steps that any thread traces in the block."""
    found: dict[str, RefusalError] = {}
    _collected.append(found)
    try:
        yield found
    finally:
        _collected.remove(found)


def collect(error: RefusalError) -> bool:
    """Collect ``error`` if a :func:`collecting` block is active. Return True if so: planning then goes on."""
    if not _collected:
        return False
    found = _collected[-1]
    if len(found) < _MOST:
        found.setdefault(str(error), error)
    return True


@dataclass(slots=True, eq=False)
class Operator:
    """One dispatched operator. ``operands`` are ``("external" | "internal", number)`` in argument order, numbered by
    first appearance; ``offsets`` are the storage offsets of the external ones; ``scalars`` are the other arguments by
    name; ``launches`` is False for views and allocations; ``threaded``: the autograd engine ran it in a thread of its
    own; ``replaces_read``: in its place, an eager step reads a number, or makes a tensor of that number.
    """

    name: str
    operands: tuple[Operand, ...]
    offsets: tuple[int, ...]
    scalars: tuple[tuple[str, Any], ...]
    source: Source
    launches: bool
    constant: Tensor | None
    random: bool
    threaded: bool
    replaces_read: bool = False


@dataclass(slots=True)
class TracedExternal:
    """A storage that existed before the step, and the tensor through which the step first used it (held alive)."""

    tensor: Tensor
    operator: str
    source: Source
    mutated: bool = False
    mutated_by: str = ""
    mutated_at: Source | None = None
    communicated: bool = False
    is_scripted: bool = False
    """Whether scripted code used it first, without getting it as an argument."""
    is_temporary: bool = False
    """Whether scripted code made it from a host number, and nothing refers to it any more: ``tensor`` is a copy."""
    _storage: torch.UntypedStorage | None = None

    def detect_temporary(self) -> None:
        """Set :attr:`is_temporary`. Keep the storage, so that its address is not used again."""
        tensor = self.tensor
        is_number = type(tensor) is Tensor and not tensor.dim() and tensor.device.type == "cpu"
        if not (self.is_scripted and is_number) or self.mutated:
            return
        self._storage = tensor.untyped_storage()
        reference, copy, is_shared = weakref.ref(tensor), tensor.detach().clone(), is_memory_shared(tensor)
        self.tensor = copy
        del tensor
        held = reference()
        self.is_temporary = held is None and not is_shared
        self.tensor = copy if held is None else held

    @property
    def is_buffer_of_collective(self) -> bool:
        """Whether the step overwrites it and passes it to a collective, so that its earlier contents do not matter."""
        fills = self.operator.endswith((".out", ".copy_.default")) or is_collective(self.operator)
        return self.communicated and fills and (self.operator, self.source) == (self.mutated_by, self.mutated_at)


@dataclass(slots=True)
class Trace:
    """Facts of one real step. ``leaf_storages`` has the storage identity of each tensor leaf by index.

    ``batch`` records what is computed from the batch alone, if the step may read such values before it runs.
    ``deferred`` delays reads of numbers until code needs their values.

    ``graph_elsewhere``: a thread other than the step's ran operators with gradients enabled, as the autograd engine
    does in double backward. Recomputed activations do not count.
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
    uncopied: set[int | None] = field(default_factory=set)
    """Storages of the entry slots of which no snapshot has copies, so that they are copied before the first write."""
    gathered: set[int | None] = field(default_factory=set)
    entry_paths: frozenset[str] = frozenset()
    entry_scalars: dict[str, Any] = field(default_factory=dict)
    entry_metadata: dict[str, Any] = field(default_factory=dict)
    read_before: set[str] = field(default_factory=set)
    """Paths of values whose container the step replaces, and whose old value its code may have read."""
    reads: Reads = field(default_factory=Reads)
    unowned_gradients: list[str] = field(default_factory=list)
    leaves: set[str] = field(default_factory=set)
    """Paths of tensors that get gradients in the step although they are no parameters."""
    host_reads: list[HostRead] = field(default_factory=list)
    expects: bool = True
    """Whether the step may read truth values on the host: replays then compare them with the trace."""
    undone: frozenset[int] = frozenset()
    """Storages of externals that the step has changed before the last of these reads."""
    batch: BatchRecorder | None = None
    is_unlikely: bool = False
    """Whether a draw has led the step to a branch that most steps do not take."""
    needs_another_trace: bool = False
    """Whether the next trace handles reads in another way, so that the facts of this one do not count."""
    deferred: DeferredReads = field(default_factory=partial(DeferredReads, defers=False))
    draws: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    """Paths of tensors with a gradient that the step made and left or returned."""
    states: SavedStates = field(default_factory=SavedStates)
    """The generator states that the step saved and restored."""
    prints: list[str] = field(default_factory=list)
    executed: ExecutedCode = field(default_factory=ExecutedCode)
    operator_draws: list[tuple[torch.Generator, Source]] = field(default_factory=list)
    """The generator and the source of each random operator that is given a generator."""
    device: torch.device | None = None
    dtypes: set[torch.dtype] = field(default_factory=set)
    footprint: Footprint = field(default_factory=Footprint)
    device_constants: list[Tensor] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    host_program: HostProgram | None = None
    """The operators that repeat the step's draws on the host and its copies from there to the device."""
    graph_elsewhere: bool = False
    derives_here: bool = False
    """Whether the step uses derivatives of :mod:`graphplan.trace.derivatives`."""
    derives_otherwise: bool = False
    """Whether autograd records an operator whose derivative has another formula in traces than in eager steps."""
    own_states: list[Tensor] = field(default_factory=list)
    """External tensors with random state that torch keeps for operators, such as the dropout of cuDNN's RNNs."""
    uncopied_writes: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Written tensors that no snapshot has: the tensor, an alias with its geometry before the step, its whole storage,
    and a copy of that.
    """
    unowned_generator_states: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators that the step draws from, without torch's default ones."""
        return list({id(generator): generator for generator, _ in self.operator_draws}.values())

    @property
    def symbolic(self) -> SymbolicNumbers:
        """The owners' numbers that stand-ins replaced in this step."""
        return self.deferred.symbolic

    def repeated(self) -> tuple[Sequence[Operator], Mapping[Operand, NumberTensor]]:
        """Return the operators, which an eager step should run again, and their operands that stand for numbers."""
        found = (self.symbolic.given.get(id(each.tensor)) for each in self.externals.values())
        return self.operators, {("external", at): number for at, number in enumerate(found) if number is not None}

    def find_owned(self, tensors: Iterable[Tensor], walk: Walk) -> None:
        """Record new slots of the owners, found in a ``walk`` after the step, that hold one of ``tensors``."""
        storages = set(map(storage_id, tensors))
        new = (slot for path, slot in walk.slots.items() if path not in self.entry_paths)
        for slot in list(new):
            for storage in storages.intersection(map(storage_id, slot.tensors())):
                assert storage is not None
                self.entry_slots.setdefault(storage, []).append(slot)
                self.entry_paths |= {slot.path}

    def refuse(self, error: RefusalError) -> None:
        """Note that the step cannot be replayed. The first refusal counts, unless a later one says that the step's own
        code uses a learning rate: an eager step would have seen a number there.
        """
        first = self.violation
        if not collect(error) and (
            first is None or (type(error) is LearningRateError and type(first) is not type(error))
        ):
            self.violation = error

    def violate(self, error: type[RefusalError], message: str, *, component: str | None = None) -> None:
        """Refuse the step with an error of this class; the first refusal counts."""
        if self.violation is None:
            self.refuse(error(message, component=component or find_source().component))

    def note_write(self, tensor: Tensor) -> None:
        """Record that the step is about to write to the memory of ``tensor``, of which no snapshot has a copy."""
        whole = whole_storage(tensor)
        self.uncopied_writes.append((tensor, tensor.detach(), whole, whole.clone()))

    def undo_uncopied_writes(self) -> None:
        """Restore the tensors and generators that the step changed and that no snapshot has: gradients, and what no
        owner holds.
        """
        with torch.no_grad():
            for tensor, before, whole, value in self.uncopied_writes:
                if not is_freed(before):
                    whole.copy_(value)
                    put_back(tensor, before)
        for generator, state in self.unowned_generator_states:
            set_generator(generator, state)

    def moved_since(self, before: Trace) -> str | None:
        """Return the first path whose storage differs from ``before``, except where that step replaced a tensor."""
        then, now = (
            {slot.path: storage for storage, slots in trace.entry_slots.items() for slot in slots if slot.param is None}
            for trace in (before, self)
        )
        replaced = {path for path, change in before.changes.rebindings.items() if change.before is not None}
        paths = sorted((then.keys() | now.keys()) - replaced)
        return next((path for path in paths if then.get(path) != now.get(path)), None)

    @property
    def rounding(self) -> float:
        """Relative rounding error of the coarsest floating-point type used, at most that of bfloat16; 0 without any."""
        steps = [torch.finfo(dtype).eps for dtype in self.dtypes if dtype.is_floating_point]
        return min(max(steps, default=0.0), torch.finfo(torch.bfloat16).eps) / 2


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor that the step returned: ``leaf`` or ``path`` if it was fed or is owned, else one that the step made,
    with attributes. ``is_copied``: a host copy whose values no code needed. Unread fed values are leaves, too.
    """

    leaf: int | None = None
    path: str | None = None
    spec: TensorSpec | None = None
    marks: tuple[tuple[str, Any], ...] = ()
    is_copied: bool = False
