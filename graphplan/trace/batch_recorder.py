"""A recorder, for a trace, of values computed from the batch alone: see :mod:`graphplan.trace.batch_reads`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphplan.errors import HostSyncError
from graphplan.feed.signature import Feed, is_dense
from graphplan.owners.slots import Slot
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.storages import storage_id
from graphplan.trace.batch_reads import (
    Answer,
    BatchReads,
    BatchSource,
    Call,
    Kind,
    Owned,
    Read,
    contents_of,
    is_right,
    reads_in,
)
from graphplan.trace.caches import Cached, find_cached
from graphplan.trace.call_recorder import CallRecorder
from graphplan.trace.host_reads import CodePosition, begins_slice, find_place
from graphplan.trace.operator_schemas import LIKE_OPERATORS, PACKING, OperatorCall, tensors_in

_LARGEST = 4096
"""Maximum elements of a tensor that the host may read as a whole: each different content needs its own program."""
_SHARE, _FEW = 4, 32
"""Maximum operators that lead to a read: a quarter of the step's, or 32 if that is more."""
_VAIN = 2
"""Stop deferring integers after this many traces in which that did not help: one may be that of a full queue."""
_LOOKS = 4
"""Maximum traces that search caches for tensors; a search without a find is the last. If each step makes a tensor anew,
each search finds another one.
"""


class _Leaf(NamedTuple):
    """A leaf: its index, its number, its storage, and the address of its first element."""

    leaf: int
    number: int
    storage: int | None
    begin: int


@dataclass(slots=True)
class EarlierReads:
    """What the traces of a step learn about its reads for later traces.

    Attributes:
        expected: places and kinds of reads that cannot be made before the step, so that replays compare their values.
        deferred_places: places where the step reads an integer that it changes (``int(self.pointer)``). The read is
            deferred, since its value differs in each step.
        useless_deferrals: traces in a row in which no deferred integer began a slice, or code needed the value of one.
        deferring_stopped: whether these were too many, or C code got a deferred integer, where it needs a real one.
        cached: tensors in caches of functions, by id, on which reads without another explanation depend.
        looks: number of searches for these.
    """

    expected: set[tuple[CodePosition, Kind]] = field(default_factory=set)
    deferred_places: set[CodePosition] = field(default_factory=set)
    useless_deferrals: int = 0
    deferring_stopped: bool = False
    cached: dict[int, Cached] = field(default_factory=dict)
    looks: int = 0

    def stop_waiting(self) -> bool:
        """Stop deferring integers. Return True if any were deferred."""
        did = bool(self.deferred_places)
        self.deferred_places.clear()
        self.deferring_stopped |= did
        return did


class BatchRecorder(CallRecorder):
    """A recorder, for one trace, of values computed from the batch, from existing tensors that the step does not train,
    and from torch's draws on the host before the first one that cannot be repeated.
    """

    def __init__(self, leaves: Sequence[tuple[int, Tensor]], earlier: EarlierReads) -> None:
        super().__init__()
        self._draws = True
        self.earlier = earlier
        self._unowned: list[weakref.ref[Tensor]] = []
        """Tensors that no owner holds."""
        self._of_unowned: set[int | None] = set()
        """Storages of these, and of what is computed from these and known tensors alone."""
        self.needs_another_trace = False
        """Whether another trace is needed, in which cached tensors are known, or a read is deferred."""
        self.is_outdated = False
        """Whether a read in the step gives something else than the one made before it."""
        self.twins: dict[int | None, Tensor] = {}
        """Positions found by a repeated read, by storage, mapped to those found first: further steps read them once."""
        self._given: list[Sequence[Tensor]] = []
        """The tensors that each read gave, if any."""
        self._is_packed = False
        """Whether lengths for packing were read: in further steps, packing would get them in host memory."""
        self._beyond: set[CodePosition] = set()
        """Places of reads that need more than the batch."""
        self._beginning: set[CodePosition] = set()
        """Places where the step reads an integer that may begin a slice."""
        self._operators = 0
        self._places: list[_Leaf] = []
        self._sources: dict[int, BatchSource] = {}
        self._met: dict[int | None, Sequence[Slot]] = {}
        """Owners' storages that the current operator is the first to use, with their slots."""
        self._owned: set[int | None] = set()
        """Owners' storages on which reads may depend."""
        self._ambiguous: set[int | None] = set()
        """Storages that are fed and also held by an owner: the next call may be fed something else."""
        for index, leaf in leaves:
            if storage_id(leaf) is not None and is_dense(leaf):
                self._sources.setdefault(self._begin_with(leaf), index)
                if leaf.numel():
                    self._places.append(_Leaf(index, self._number(leaf), storage_id(leaf), leaf.data_ptr()))

    def meet(self, tensor: Tensor, slots: Sequence[Slot]) -> None:
        """Record the first use of a tensor, which owners hold in ``slots``, unless it is trained: its values change."""
        storage = storage_id(tensor)
        if storage in self._known and storage not in self._outside:
            # It is the result of a read.
            return
        if storage in self._outside:
            if slots:
                self._ambiguous.add(storage)
        elif slots:
            # Wait for the operator: if it writes the tensor, as the optimizer does with most, slots need no look-up.
            self._met[storage] = slots
            self._outside.add(storage)
        elif (cached := self.earlier.cached.get(id(tensor))) is not None:
            self._begin_at(storage, [(tensor, cached)])
        elif tensor.numel() <= _LARGEST and not tensor.requires_grad:
            self._unowned.append(weakref.ref(tensor))
            self._of_unowned.add(storage)

    def _begin_at(self, storage: int | None, found: Iterable[tuple[Tensor, BatchSource]]) -> None:
        """Start from the first tensor ``found`` that still has ``storage``: a step may swap tensors between slots."""
        for held, source in found:
            is_here = storage_id(held) == storage
            if is_here and type(held) in PLAIN_KINDS and not held.requires_grad and is_dense(held):
                self._owned.add(storage)
                self._sources.setdefault(self._begin_with(held), source)
                return

    def has(self, tensor: Tensor) -> bool:
        """See :class:`CallRecorder`."""
        if self._met:
            self._begin_with_met()
        return super().has(tensor)

    def _begin_with_met(self) -> None:
        """Look up the tensors met. Before the next operator, the step may put others in their slots."""
        met, self._met = self._met, {}
        for storage, slots in met.items():
            owned = ((leaf, Owned(slot, at)) for slot in slots for at, leaf in enumerate(slot.tensors()))
            self._begin_at(storage, owned)

    def _let_go(self, written: Collection[int | None]) -> None:
        super()._let_go(written)
        self._of_unowned.difference_update(written)
        for storage in written:
            self._met.pop(storage, None)

    def reads(self) -> BatchReads | None:
        """Return the reads of the trace, with the operators that lead to them; None if there are none."""
        calls = self._leading_to(self._is_made_before)
        if any(call.draws for call in calls):
            # A draw depends on how many numbers were drawn before: keep all draws up to the last read.
            calls = self._leading_to(lambda call: self._is_made_before(call) or call.has_effect)
            while not self._is_made_before(calls[-1]):
                calls.pop()
        return _made_once(calls, self._sources, self._places) if calls else None

    def _is_made_before(self, call: Call) -> bool:
        """Return True for a read to make before the step. Replays compare the values at ``expected`` places."""
        read = call.read
        return read is not None and (read.place, read.kind) not in self.earlier.expected

    def impossible(self, changed: Collection[int | None]) -> list[Read]:
        """Return the reads that cannot be made before the step. They need too many operators, storages that the step
        has ``changed``, or memory that may be other memory in the next call, or share a place with such a read.
        """
        reads = [call.read for call in self._calls if call.read is not None and call.read.error is not None]
        limit = max(_FEW, self._operators // _SHARE)
        found = []
        for read in reads:
            leading, needed = self._needed_for(read)
            owned = needed & self._owned
            # Storages written before the read are unknown already; these are written after it.
            is_state = read.kind is Kind.VALUE and not owned.isdisjoint(changed)
            are_others = (read.may_be_expected and is_state) or not needed.isdisjoint(self._ambiguous)
            if len(leading) > limit or are_others or read.place in self._beyond:
                found.append(read)
        return found

    def _needed_for(self, read: Read) -> tuple[list[Call], frozenset[int | None]]:
        """Return the operators that lead to a read, and the storages that they use."""
        leading = self._leading_to(lambda call: call.read is read)
        return leading, frozenset[int | None]().union(*(call.given | call.changed for call in leading))

    def note_waited(self, *, for_good: bool) -> None:
        """Count a trace with deferred integers. If deferring does not help, programs for single values are better."""
        self.earlier.useless_deferrals = 0 if for_good else self.earlier.useless_deferrals + 1
        self.needs_another_trace |= not for_good
        if self.earlier.useless_deferrals >= _VAIN:
            self.earlier.stop_waiting()

    def defer_integers(self, changed: Collection[int | None]) -> None:
        """Defer, from the next trace on, integer reads that may begin a slice and depend on ``changed`` storages."""
        earlier, before = self.earlier, len(self.earlier.deferred_places)
        reads = [call.read for call in self._calls if call.read is not None and call.read.place in self._beginning]
        owned = self._owned.intersection(changed)
        if owned and not earlier.deferring_stopped:
            earlier.deferred_places.update(
                read.place for read in reads if not owned.isdisjoint(self._needed_for(read)[1])
            )
        self.needs_another_trace |= len(earlier.deferred_places) > before

    def note(self, call: OperatorCall, made: list[Tensor], given: list[Tensor]) -> None:
        """See :class:`CallRecorder`; :meth:`read` records reads."""
        self._operators += 1
        if self._is_beyond(call, given):
            if self._met:
                self._begin_with_met()
            return
        before, needs_unowned = len(self._calls), self._needs_unowned(given)
        super().note(call, made, given)
        if self._met:
            self._begin_with_met()
        if len(self._calls) > before:
            return
        if needs_unowned and self._may_repeat(call, made):
            self._of_unowned.update(map(storage_id, made))
        if _draws_on_host(call, made):
            # This draw cannot be repeated, and later draws depend on how many numbers it takes.
            self._draws = False

    def _is_beyond(self, call: OperatorCall, given: Sequence[Tensor]) -> bool:
        """Return True if an operator uses an unknown tensor and has no effect that matters here. Most are like that."""
        schema = call.schema
        if schema.may_write or schema.is_random or schema.name in LIKE_OPERATORS:
            return False
        known, met, unowned = self._known, self._met, self._of_unowned
        for tensor in given:
            storage = storage_id(tensor)
            if not (storage in known or storage in met or storage in unowned):
                return True
        return False

    def _needs_unowned(self, given: Sequence[Tensor]) -> bool:
        """Return True if some of ``given`` come from tensors without an owner, and all others are known."""
        unowned = self._of_unowned
        if not unowned or unowned.isdisjoint(map(storage_id, given)):
            return False
        return all(storage_id(tensor) in unowned or self.has(tensor) for tensor in given)

    def _may_repeat(self, call: OperatorCall, made: Sequence[Tensor]) -> bool:
        return call.schema.is_certain or (self._draws and call.schema.is_native and _draws_on_host(call, made))

    def read(
        self,
        call: OperatorCall,
        out: Any,
        error: Callable[[], HostSyncError] | None = None,
        *,
        may_be_expected: bool = False,
    ) -> bool:
        """Record a read; ``error`` makes its refusal. Return False if neither this trace nor the next can use it."""
        place = find_place()
        if type(out) is int and begins_slice():
            self._beginning.add(place)
        if self._take(call, out, place, error, may_be_expected=may_be_expected):
            return True
        self._beyond.add(place)
        if self._needs_unowned(contents_of(call) or call.tensors()):
            self._look_in_caches()
        return self.needs_another_trace

    def _look_in_caches(self) -> None:
        """Search caches for tensors on which reads may depend, for the next trace."""
        tensors = [tensor for ref in self._unowned if (tensor := ref()) is not None]
        self._unowned = []
        if tensors and self.earlier.looks < _LOOKS:
            found = find_cached(tensors)
            # A search takes as long as some steps: do not repeat one without a find.
            self.earlier.looks = self.earlier.looks + 1 if found else _LOOKS
            self.earlier.cached |= found
            self.needs_another_trace |= bool(found)

    def _take(
        self,
        call: OperatorCall,
        out: Any,
        place: CodePosition,
        error: Callable[[], HostSyncError] | None,
        *,
        may_be_expected: bool,
    ) -> bool:
        schema, contents = call.schema, contents_of(call)
        given = contents or call.tensors()
        if not given or not all(map(self.has, given)) or not (contents or schema.is_certain):
            return False
        if contents and contents[0].numel() > _LARGEST:
            return False
        if type(out) is float and not out.is_integer():
            leading = self._leading_to(lambda _: False, map(storage_id, given))
            if any(call.draws for call in leading):
                # The same fraction is hardly ever drawn again, so a program for its value would not be used.
                return False
        refusal, made = None if error is None else error(), list[Tensor]()
        if contents:
            read = Read(place, Kind.CONTENT, contents[0].detach().cpu().clone(), refusal)
            self._add(Tensor.detach, "content", (contents[0],), {}, [], read=read)
            self._is_packed |= schema.name == PACKING
        elif (place, Kind.VALUE if call.reads_values() else Kind.SHAPE) in self.earlier.expected:
            return False
        elif call.reads_values():
            read = Read(place, Kind.VALUE, out, refusal, may_be_expected=may_be_expected)
            self._add(schema.call, schema.name, call.args, call.kwargs, [], read=read)
        else:
            made = tensors_in(out)
            shapes = [tuple(tensor.shape) for tensor in made]
            read = Read(place, Kind.SHAPE, shapes, refusal, may_be_expected=may_be_expected)
            self._add(schema.call, schema.name, call.args, call.kwargs, made, read=read)
            if not self._calls[-1].shows:
                self._find_twins(made)
        # Aliases: the step may have its own tensors require gradients, or change their shape.
        self._given.append([tensor.detach() for tensor in made])
        return True

    def _find_twins(self, made: Sequence[Tensor]) -> None:
        """Find an earlier read that equals the latest one, which ``made`` tensors: both give the same positions."""
        reads = self.reads() if any(self._given) else None
        if reads is not None:
            *before, latest = reads.reads
            same = (given for read, given in zip(before, self._given, strict=True) if read.call == latest.call)
            self.twins.update(zip(map(storage_id, made), next(same, ()), strict=False))

    def found(self, reads: BatchReads) -> list[Tensor] | None:
        """Return the tensors that the step has read, as :meth:`BatchReads.find` returns them for further steps; None if
        the step has worked with others than further steps are fed.
        """
        return None if self._is_packed else reads.in_order(self._given)

    def takes(self, answer: Answer, call: OperatorCall) -> bool:
        """Record a read that was made before the step. Return False if it gives something else now."""
        if not (is_right(answer, call) and self.read(call, answer.value)):
            self.is_outdated = True
            return False
        if answer.is_content and answer.call is None:
            self.note(call, tensors_in(answer.value), call.tensors())
        return True


def _made_once(calls: Sequence[Call], sources: Mapping[int, BatchSource], places: Sequence[_Leaf]) -> BatchReads:
    """Merge equal operators: a mask that is used twice is read once. Results are numbered by first appearance, sources
    below 0 in the order of first use, so that an execution path with more reads begins with the same numbers.
    """
    given = {slot.number for call in calls for slot in call.slots()}
    used = {-1 - at: number for at, number in enumerate(sources) if number in given}
    made = {number for call in calls for number in call.made}
    numbers = {number: own for own, number in used.items()}
    merges = not any(call.writes or call.has_effect for call in calls)
    kept: list[Call] = []
    by_form: dict[str, int] = {}
    reads: list[Read] = []
    for call in calls:
        new = call.renumbered(numbers)
        position = by_form.get(new.form) if merges and not call.shows else None
        if position is None:
            position = by_form[new.form] = len(kept)
            for number in call.made:
                numbers.setdefault(number, max((-1, *numbers.values())) + 1)
            kept.append(call.renumbered(numbers))
        numbers.update(zip(call.made, kept[position].made, strict=True))
        if call.read is not None:
            reads.append(call.read._replace(call=position))
    return BatchReads(kept, reads, {own: sources[number] for own, number in used.items()}, _beside(places, given, made))


def _beside(places: Sequence[_Leaf], given: set[int], made: set[int]) -> list[tuple[int, int, int]]:
    """Return the distances in bytes between ``given`` leaves that share memory, by index, if leaves have the same
    number, or the step ``made`` one as a view of another: the next call must have the same distances.
    """
    by_memory: dict[int | None, list[_Leaf]] = {}
    for place in places:
        if place.number in given:
            by_memory.setdefault(place.storage, []).append(place)
    found = []
    for first, *others in by_memory.values():
        numbers = {first.number, *(other.number for other in others)}
        if len(numbers) <= len(others) or not made.isdisjoint(numbers):
            found += [(first.leaf, other.leaf, other.begin - first.begin) for other in others]
    return found


def _draws_on_host(call: OperatorCall, made: Sequence[Tensor]) -> bool:
    """Return True if an operator draws from torch's default CPU generator."""
    if not call.schema.is_random or any(tensor.device.type != "cpu" for tensor in made):
        return False
    return not any(isinstance(given, torch.Generator) for given in (*call.args, *call.kwargs.values()))


def recorder_of(feed: Feed, earlier: EarlierReads) -> BatchRecorder:
    """Return a recorder for ``feed``, without the reads made before the step. The step's traces extend ``earlier``."""
    found = reads_in(feed.given[1]) if feed.given is not None else None
    size = len(feed.leaves) - (0 if found is None else 1 + len(found[1]))
    leaves = [(index, leaf) for index, leaf in feed.tensors() if index < size]
    return BatchRecorder(leaves, earlier)
