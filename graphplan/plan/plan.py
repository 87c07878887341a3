"""The immutable plan of one step: externals by role, carries, effects and results, and the plan as text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphplan.backends.backend import TracedValues
from graphplan.effects.host_changes import Holder
from graphplan.effects.reads import Reads
from graphplan.effects.rebindings import Rebindings
from graphplan.feed.signature import Feed
from graphplan.observe.host_draws import Draw
from graphplan.optimizers.rates import LearningRates
from graphplan.owners.slots import Walk
from graphplan.owners.walk import walk_owners
from graphplan.specs.paths import Fact, names
from graphplan.specs.policy import Policy
from graphplan.specs.roles import External, Footprint, Role, TensorSpec
from graphplan.tensors.deferred import NumberForm
from graphplan.tensors.storages import storage_id
from graphplan.trace.host_reads import CodePosition
from graphplan.trace.symbolic_numbers import NumberTensor

COLUMNS = ("name", "role", "tensor", "storage", "change")
"""Columns of a plan's table."""
DRAWS = "draws random numbers "
"""Prefix of facts about operators that may draw random numbers."""


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf of the step's result, by ``kind``. ``"tensor"``: a new tensor of geometry ``spec`` with the attributes
    ``marks``. ``"input"``: leaf ``index`` of the feed. ``"owned"``: the tensor in the slot ``path``. ``"read"``: a
    number that ``value`` computes from device reads, or a host copy of geometry ``spec``. ``"literal"``: ``value``.
    """

    kind: str
    index: int | None = None
    path: str | None = None
    value: Any = None
    spec: TensorSpec | None = None
    marks: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Handles:
    """References to the step itself, shared by all of its plans: programs run its ``function``, walk its ``owners``
    and use the device learning ``rates`` of its optimizers.
    """

    function: Callable[[], Callable[..., Any]]
    owners: Callable[[], Mapping[str, Any]]
    rates: LearningRates

    def walk(self) -> Walk:
        """Walk the owners as they are now."""
        return walk_owners(self.owners())


@dataclass(frozen=True, eq=False)
class Plan:
    """The tensors that one step uses and the effects that it has, from traces of real calls. Plans compare by identity.

    Examples:
        >>> import torch
        >>> from graphplan import compile_plan
        >>> plan = compile_plan(lambda x: x.sin() + x.sin(), torch.ones(3))
        >>> plan.launches, plan.operators["aten.sin.default"]
        (3, 2)

    Attributes:
        name: the step function's qualified name.
        form: a hash of the step's operators and their operands, without shapes and numbers.
        feed: structure and signature of the step's arguments.
        externals: every tensor from outside the step, each with one role.
        rebindings: slots that the step binds to other tensors.
        counters: Python numbers that every step raises by the same amount, by path.
        numbers: Python numbers that every step computes from device reads or from numbers of its owners, by path.
        appends: how many items every step appends to lists and deques, by path.
        assignments: Python values that every step assigns, the same each time, by path.
        left: modes, flags, values in parameter groups and torch switches that the step leaves changed, by path.
        renewed: paths of values in objects that every step makes anew, without a look at their old values.
        outputs: leaves of the step's result; ``output_structure`` rebuilds it from them.
        entry_grads: per parameter path, what ``.grad`` must be before the step: ``"none"`` or ``"kept"``; a parameter
            that is missing here may have any gradient, since the step drops it unread.
        host_facts: host work of a step, with source lines: random draws, constants made from Python values.
        operators: how often one eager step launches each operator, by name.
        footprint: bytes of the tensors that one eager step makes on its device.
        traced: what recordings get from the traces: permitted host reads, generator states that the step saves and
            restores (as activation checkpointing does), constants, draws on the host.
        reads: Python values and tensor metadata of its owners that the step's code may have read.
        twins: paths of further slots that share memory with owned externals.
        joined: groups of slots that shared memory when the step began.
        device: the device of the step.
        last_operators: the last operators that the step launches, with their source lines.
        communicates: whether collectives are among the step's operators.
        rounding: relative error of rounding to the coarsest floating-point type that the step computes in.
        may_reorder: whether autograd's engine may run the operators in another order on another step (see
            :func:`graphplan.plan.difference.is_reordered`), or the device may sum in another order.
        undone: paths of tensors that the step changes before the last value that it branches on: a replay that ends
            there restores them.
        defers: whether numbers or copies that the step reads from the device were deferred in its traces.
        integer_places: the places where ``int(tensor)`` was deferred.
        tables: names of containers that had stand-ins in the traces.
        symbolic: the classes, by path, of owners' numbers that had stand-ins in the traces, and of truth values that
            the step branches on.
        filled: tensors that hold such numbers, or numbers computed from them.
        drawn: the step's draws from Python's and NumPy's generators; a replay makes them before it begins.
        kept: fed tensors whose memory the step may also read under another name.
        single: whether it was made from one trace, so that the check of the first replay takes the place of a second.
        handles: the step itself.
        conditions: the modes and flags under which it was made, if it belongs to no graphed step.
    """

    name: str
    form: int
    feed: Feed
    externals: tuple[External, ...]
    rebindings: Rebindings
    counters: Mapping[str, int | float]
    numbers: Mapping[str, NumberForm]
    appends: Mapping[str, int]
    assignments: Mapping[str, Any]
    left: Mapping[str, Any]
    outputs: tuple[Output, ...]
    output_structure: Any
    entry_grads: Mapping[str, str]
    operators: Mapping[str, int]
    footprint: Footprint
    traced: TracedValues
    reads: Reads
    twins: frozenset[str]
    joined: tuple[frozenset[Holder], ...]
    device: torch.device
    host_facts: tuple[str, ...]
    last_operators: tuple[str, ...]
    communicates: bool
    rounding: float
    may_reorder: bool
    undone: frozenset[str]
    defers: bool
    integer_places: frozenset[CodePosition]
    renewed: frozenset[str]
    tables: frozenset[str]
    symbolic: Mapping[str, type]
    filled: tuple[NumberTensor, ...]
    drawn: tuple[Draw, ...]
    kept: tuple[Tensor, ...]
    single: bool
    handles: Handles
    conditions: tuple[Any, ...] = ()

    def by_role(self, role: Role) -> tuple[External, ...]:
        """Externals of one role."""
        return tuple(external for external in self.externals if external.role is role)

    @property
    def launches(self) -> int:
        """Operators that one eager step launches."""
        return sum(self.operators.values())

    @property
    def draws(self) -> list[str]:
        """The places in ``host_facts`` of operators that may draw random numbers."""
        return [fact.removeprefix(DRAWS) for fact in self.host_facts if fact.startswith(DRAWS)]

    @property
    def host_reads(self) -> list[str]:
        """Values that the step asserts (a replay does not) and values that it branches on, with source lines."""
        places = dict.fromkeys(str(read.place) for read in self.traced.reads if read.asserted)
        asserted = [f"asserts a tensor's value, in eager steps and checks only, at {place}" for place in places]
        return asserted + [
            f"branches on a tensor's value, which replays compare, at {place}" for place in self.branches
        ]

    @property
    def branches(self) -> list[str]:
        """Places, with source lines, where the step branches on a device value; a replay compares the value."""
        return list(dict.fromkeys(str(read.place) for read in self.traced.reads if read.expected))

    @property
    def tells_gradients(self) -> bool:
        """Return True if the step depends on which gradients exist when it begins."""
        return bool(self.entry_grads) or any(names(path, Fact.GRADIENT) for path in self.reads.metadata)

    def untouched(self, walk: Walk) -> set[str]:
        """Return paths of tensors that a library's object (a dataset, say) leads to and that the step does not use."""
        if not walk.reached:
            return set()
        return walk.reached - {external.path for external in self.externals} - {*self.rebindings.paths}

    def changed_tensors(self, walk: Walk) -> list[Tensor]:
        """Return the tensors in ``walk`` that the step changes in place."""
        slots = [walk.slots[e.path] for e in self.externals if e.mutated and e.path in walk.slots]
        return [tensor for slot in slots for tensor in slot.tensors()]

    def may_share_memory(self, one: str, other: str) -> bool:
        """Return True if the step's results do not depend on whether two slots share memory: it replaces the tensor of
        one, and replaces that of the other or does not write to it.
        """
        replaced = self.rebindings.replaced
        written = {external.path for external in self.externals if external.mutated} - replaced
        return not replaced.isdisjoint((one, other)) and written.isdisjoint((one, other))

    def shared_leaf(self, feed: Feed, walk: Walk) -> int | None:
        """Return the first leaf of the feed that shares memory with a tensor that the step writes to."""
        paths = walk.slots.keys() & {e.path for e in self.externals if e.mutated} - self.rebindings.replaced
        changed = {storage_id(tensor) for path in paths for tensor in walk.slots[path].tensors()}
        return next((index for index, leaf in feed.tensors() if storage_id(leaf) in changed), None)

    @property
    def inputs(self) -> tuple[External, ...]:
        """Externals from the feed."""
        return self.by_role(Role.INPUT)

    @property
    def params(self) -> tuple[External, ...]:
        """Parameters, and buffers and constants that are only read."""
        return self.by_role(Role.PARAM)

    @property
    def state(self) -> tuple[External, ...]:
        """Tensors that the step itself changes from step to step."""
        return self.by_role(Role.STATE)

    def table(self, policy: Policy | None = None) -> str:
        """Return the plan as text: one line per external with its role, spec, storage under ``policy``, and change."""
        policy = policy or Policy.train()
        rows = [COLUMNS, *self.rows(policy)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        counts = ", ".join(f"{len(self.by_role(role))} {role}" for role in Role)
        head = f"plan of {self.name} on {self.device}: {counts}; {self.launches} launches per eager step"
        return "\n".join([head, *lines, *self._footnotes()])

    def rows(self, policy: Policy) -> list[tuple[str, ...]]:
        """Return one row of texts per external, in the order of :data:`COLUMNS`."""
        rows: list[tuple[str, ...]] = []
        for external in self.externals:
            is_static = external.role in policy.static_roles
            storage = "copied in" if external.role in policy.copy_roles else "adopted" if is_static else "uncovered"
            change = "carried" if external.carried else "mutated" if external.mutated else ""
            rows.append((external.name, str(external.role), str(external.spec), storage, change))
        return rows

    def _footnotes(self) -> list[str]:
        notes = [f"carried: {path}" for path in self.rebindings.carries]
        notes += [f"rebound: {path}" for path in self.rebindings.fresh if not names(path, Fact.GRADIENT)]
        values, metadata = self.reads.values, self.reads.metadata
        compared = dict.fromkeys(path for question in self.reads.questions for path in question.paths)
        if values:
            notes.append(f"guarded: {len(values)} Python values that the step reads ({_few(values)})")
        if metadata:
            notes.append(f"guarded: {len(metadata)} tensors of which the step reads no values ({_few(metadata)})")
        if compared:
            notes.append(f"guarded: how the step branches on {len(compared)} numbers ({_few(compared)})")
        notes += [f"counted: {path} += {delta}" for path, delta in self.counters.items()]
        notes += [f"computed: {path}" for path in self.numbers]
        notes += [f"appended: {path} (+{count})" for path, count in self.appends.items()]
        notes += [f"left: {path} = {value!r}" for path, value in self.left.items()]
        return notes + [f"note: {fact}" for fact in (*self.host_facts, *self.host_reads)]

    def __str__(self) -> str:
        return self.table()


def _few(paths: Collection[str]) -> str:
    return ", ".join(list(paths)[:6]) + (", …" if len(paths) > 6 else "")
