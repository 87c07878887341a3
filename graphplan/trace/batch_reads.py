"""Host reads of the fed batch, made before a replay instead of in it.

Whether lengths differ, which rows a mask selects, and how many, often depends only on the fed batch and on owners'
tensors that the step does not change. The operators that lead to such a read run before each replay. The values read
choose the program, and the positions that masks select are fed to it like the batch. A read that needs more than that
(a trained parameter, a random number of a device) refuses the step.

Everything after a read may depend on its value, so the operators of one trace hold for its values alone: the first
other value ends the search, and another trace may be tried. While a step is traced again or captured, its reads are
answered with the values found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import count, takewhile
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from graphplan.errors import HostSyncError
from graphplan.feed.call_arguments import BATCH_READS
from graphplan.feed.signature import leaf_key
from graphplan.owners.slots import Slot
from graphplan.tensors.copying import same_bits
from graphplan.trace.caches import Cached
from graphplan.trace.host_reads import CodePosition, HostRead, find_place
from graphplan.trace.operator_schemas import PACKING, POSITIONS, TO_COPY, OperatorCall, tensors_in


class Owned(NamedTuple):
    """An owner's tensor: the one at ``position`` among the tensors in a slot."""

    slot: Slot
    position: int

    def get(self) -> Tensor | None:
        """Return the current tensor; None if it is gone."""
        tensors = self.slot.tensors()
        return tensors[self.position] if self.position < len(tensors) else None


RESTORE, TRANSFER = "restore", "transfer"
"""The names of calls that restore a generator's state, and that copy to a device."""
BatchSource = Owned | Cached | int
"""A tensor from which reads are computed: an owner's, one in a cache, or the leaf of the batch with that index."""
_numbers = count()
_made: WeakValueDictionary[int, BatchReads] = WeakValueDictionary()


class Kind(Enum):
    """What the host reads of a tensor."""

    VALUE = auto()
    """A number, which has to equal the traced one."""
    CONTENT = auto()
    """All elements of a tensor, which have to equal the traced ones."""
    SHAPE = auto()
    """The shapes of tensors, which have to equal the traced ones. Their contents are fed to the program."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The number of a tensor, in the tensor's place among an operator's arguments."""

    number: int


class Read(NamedTuple):
    """A read: its place, and the value that the trace ``found``. ``error`` refuses a read that cannot be made before
    the step, unless replays may compare its value (``may_be_expected``). ``call`` is the position of the operator that
    reads.
    """

    place: CodePosition
    kind: Kind
    found: Any
    error: HostSyncError | None
    call: int = 0
    may_be_expected: bool = False

    def finds(self, out: Any, made: Sequence[Tensor]) -> bool:
        """Return True if an operator's result equals the value found in the trace."""
        if self.kind is Kind.VALUE:
            return out is self.found or leaf_key(out) == leaf_key(self.found)
        if self.kind is Kind.CONTENT:
            return same_bits(made[0].cpu(), self.found)
        return bool(self.content(out, made) == self.found)

    def content(self, out: Any, made: Sequence[Tensor]) -> Any:
        """Return the value for ``found`` if the operator returns ``out``, with the tensors ``made`` in it."""
        if self.kind is Kind.VALUE:
            return out
        return made[0].cpu().clone() if self.kind is Kind.CONTENT else [tuple(tensor.shape) for tensor in made]


@dataclass(frozen=True, slots=True)
class Call:
    """One operator: ``made`` are the numbers of the tensors that it returns, ``given`` and ``changed`` are storages."""

    run: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[int, ...]
    given: frozenset[int | None]
    changed: frozenset[int | None]
    writes: bool
    read: Read | None
    draws: bool = False

    @property
    def has_effect(self) -> bool:
        """Whether it runs again even if nothing depends on it: it draws, restores a state, or copies to a device."""
        return self.draws or self.name in (RESTORE, TRANSFER)

    @property
    def form(self) -> str:
        """Text that is equal for equal operators with equal arguments."""
        return repr((self.name, self.args, self.kwargs))

    @property
    def shows(self) -> bool:
        """Whether code gets the tensors that were read. The positions of a mask only go to operators."""
        return self.read is not None and self.read.kind is Kind.SHAPE and self.name != POSITIONS

    def repeat(self, known: Mapping[int, Any]) -> Any:
        """Run the operator on ``known`` tensors, by number."""
        named = {name: _filled(value, known) for name, value in self.kwargs.items()}
        return self.run(*_filled(self.args, known), **named)

    def slots(self) -> list[TensorSlot]:
        """Return the numbers of the tensors among its arguments."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, TensorSlot)]

    def renumbered(self, numbers: Mapping[int, int]) -> Call:
        """Return the operator with other numbers for its tensors."""
        args, kwargs = tree_map_only(
            TensorSlot, lambda slot: TensorSlot(numbers.get(slot.number, slot.number)), (self.args, dict(self.kwargs))
        )
        return replace(self, args=args, kwargs=kwargs, made=tuple(numbers.get(each, each) for each in self.made))


_Ran = tuple[str, Any, Sequence[Tensor], Tensor | None]
"""An operator's form, its result, the tensors in that, and the generator's state afterwards if it has an effect."""


@dataclass(slots=True)
class Search:
    """A search for the reads of one batch, given as the ``leaves`` of a call. It keeps results: execution paths that
    begin with the same operators on the same tensors, and write to none, run these operators once. ``ran`` has the
    operators of the latest execution path, by the numbers and ids of the tensors from which it starts.
    """

    leaves: Sequence[Any]
    ran: defaultdict[tuple[tuple[int, int], ...], list[_Ran]] = field(default_factory=lambda: defaultdict(list))


class BatchReads:
    """The ``reads`` of one trace in their order, and the operators that lead to them."""

    def __init__(
        self,
        calls: Sequence[Call],
        reads: Sequence[Read],
        sources: Mapping[int, BatchSource],
        beside: Sequence[tuple[int, int, int]],
    ) -> None:
        self.reads = reads
        self._calls, self._sources, self._beside = calls, sources, beside
        self._of_call = {read.call: read for read in reads}
        self._forms = [f"{call.form} {call.made}" for call in calls]
        self._owned = [source for source in sources.values() if isinstance(source, Owned)]
        self._draws = any(call.draws for call in calls)
        self._is_pure = not any(call.writes for call in calls)
        self.number = next(_numbers)
        """An identifier, unique in the process."""
        _made[self.number] = self
        self.is_outdated = False
        """Whether a later trace found other values, or came to the reads in another way."""
        self.taken = 0
        """Number of batches with the traced values."""

    @property
    def error(self) -> HostSyncError | None:
        """The error for the first read that was not made before the step."""
        return next((read.error for read in self.reads if read.error is not None), None)

    @property
    def what(self) -> str:
        """What is read, in words: the batch, owners' tensors, cached tensors, draws."""
        found = ["the batch"] * any(isinstance(source, int) for source in self._sources.values())
        found += sorted({source.slot.path for source in self._owned})
        found += ["a tensor in a cache"] * any(isinstance(source, Cached) for source in self._sources.values())
        return " and ".join(found + ["a draw on the host"] * self._draws)

    def is_among(self, others: Sequence[HostRead]) -> bool:
        """Return True if one of the reads has the place of one of ``others``: only places distinguish reads."""
        return not {read.place for read in self.reads}.isdisjoint(other.place for other in others)

    def find(self, search: Search) -> list[Tensor] | None:
        """Return the tensors that the step reads of a batch; None if values or shapes differ from the traced ones."""
        found = self._run(search, Read.finds)
        self.taken += found is not None
        return found

    def of(self, search: Search) -> BatchReads | None:
        """Return the same reads of another batch; None if code may branch differently there, and make other reads."""
        contents: dict[int, Any] = {}

        def take(read: Read, out: Any, made: Sequence[Tensor]) -> bool:
            contents[read.call] = read.content(out, made)
            return type(out) is not bool or out is read.found

        if self._run(search, take) is None:
            return None
        reads = [read._replace(found=contents[read.call]) for read in self.reads]
        return BatchReads(self._calls, reads, self._sources, self._beside)

    def _run(self, search: Search, takes: Callable[[Read, Any, Sequence[Tensor]], bool]) -> list[Tensor] | None:
        """Run the operators that lead to the reads. Return the tensors read; None if ``takes`` rejects a read."""
        state = torch.default_generator.get_state() if self._draws else None
        try:
            return self._run_calls(search, takes)
        except Exception:  # noqa: BLE001 - with such a batch, the step does not reach this operator, or raises
            return None
        finally:
            if state is not None:
                # The step has to draw the same numbers.
                torch.default_generator.set_state(state)

    def _run_calls(self, search: Search, takes: Callable[[Read, Any, Sequence[Tensor]], bool]) -> list[Tensor] | None:
        leaves = search.leaves
        if any(leaves[other].data_ptr() - leaves[one].data_ptr() != distance for one, other, distance in self._beside):
            return None
        known: dict[int, Any] = {}
        for number, source in self._sources.items():
            known[number] = leaves[source] if isinstance(source, int) else source.get()
            if not isinstance(known[number], Tensor):
                return None
        found: list[Tensor] = []
        ran = search.ran[tuple((number, id(tensor)) for number, tensor in known.items())] if self._is_pure else []
        del ran[sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], zip(ran, self._forms, strict=False))) :]
        drawn = [state for _, _, _, state in ran if state is not None]
        if drawn:
            torch.default_generator.set_state(drawn[-1])
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            for position, call in enumerate(self._calls):
                if position == len(ran):
                    out = call.repeat(known)
                    state = torch.default_generator.get_state() if call.has_effect else None
                    ran.append((self._forms[position], out, tensors_in(out), state))
                _, out, made, _ = ran[position]
                read = self._of_call.get(position)
                if read is not None and not takes(read, out, made):
                    return None
                if read is not None and read.kind is Kind.SHAPE:
                    # Later operators may write to the tensor.
                    found += made if self._is_pure else [tensor.clone() for tensor in made]
                known.update(zip(call.made, made, strict=False))
        return found

    def tensors_of(self, found: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Return, for each read, its tensors among those that :meth:`find` returns."""
        rest = iter(found)
        taken = {read.call: [next(rest) for _ in read.found] for read in self._shapes()}
        return [taken.get(read.call, ()) for read in self.reads]

    def in_order(self, given: Sequence[Sequence[Tensor]]) -> list[Tensor] | None:
        """Return the tensors that its reads have ``given`` in the step, in the order of :meth:`find`; None if
        :meth:`find` may return others.
        """
        if not self._is_pure or self._draws:
            return None
        by_call = dict(zip((read.call for read in reversed(self.reads)), reversed(given), strict=True))
        return [tensor for read in self._shapes() for tensor in by_call[read.call]]

    def _shapes(self) -> list[Read]:
        """Return the reads that give tensors, in the order of :meth:`find`."""
        return [read for _, read in sorted(self._of_call.items()) if read.kind is Kind.SHAPE]

    def is_in(self, slots: Mapping[str, Slot]) -> bool:
        """Return True if the owners' tensors from which it starts are those in ``slots``, by path."""
        held = {source.slot.path: source.slot.get() for source in self._owned}
        return all(path in slots and slots[path].get() is value for path, value in held.items())

    def differs_from(self, other: BatchReads) -> HostSyncError | None:
        """Return the error of the first read with another value than in ``other``; None if there is none."""
        pairs = zip(self.reads, other.reads, strict=False)
        return next((read.error for read, known in pairs if not _is_same(read, known)), None)

    def begins(self, other: BatchReads) -> bool:
        """Return True if ``other`` begins with these reads and operators: a step that ends early makes fewer reads."""
        others = other._sources
        if self._forms != other._forms[: len(self._forms)] or len(self.reads) > len(other.reads):
            return False
        if any(at not in others or _named(others[at]) != _named(source) for at, source in self._sources.items()):
            return False
        return {*self._beside} <= {*other._beside} and all(map(_is_same, self.reads, other.reads))


def _named(source: BatchSource) -> Any:
    """Return a value that is equal for the same source."""
    if isinstance(source, Owned):
        return source.slot.path, source.position
    return ("cached", id(source.tensor)) if isinstance(source, Cached) else source


def _is_same(one: Read, other: Read) -> bool:
    if (one.place, one.kind, one.call) != (other.place, other.kind, other.call):
        return False
    return one.finds(other.found, [other.found]) if one.kind is not Kind.SHAPE else one.found == other.found


def _filled(given: Any, known: Mapping[int, Any]) -> Any:
    if type(given) is TensorSlot:
        return known[given.number]
    if type(given) is list or type(given) is tuple:
        return type(given)([_filled(item, known) for item in given])
    return given


def is_read(call: OperatorCall) -> bool:
    """Return True if an operator reads values on the host, for its result or for the shape of that."""
    return call.reads_values() or call.has_dynamic_shape()


def contents_of(call: OperatorCall) -> list[Tensor]:
    """Return the tensor that the host needs as a whole: lengths of packed sequences, or the source of a copy there."""
    name, args = call.schema.name, call.args
    if name == PACKING:
        return [args[1]]
    target = call.kwargs.get("device") if name == TO_COPY else None
    return [args[0]] if target is not None and target.type == "cpu" and args[0].device.type != "cpu" else []


class Answer(NamedTuple):
    """A read's ``value``, or a ``call`` to run instead. ``found``: tensors read, always the same if ``is_content``."""

    value: Any = None
    call: OperatorCall | None = None
    found: Sequence[Tensor] = ()
    is_content: bool = False


class BatchAnswers:
    """The answers to the reads of a traced or captured step: values in ``reads``, and fed ``tensors``."""

    def __init__(self, reads: BatchReads, tensors: Sequence[Tensor]) -> None:
        self._answers: dict[CodePosition, list[tuple[Read, Sequence[Tensor]]]] = {}
        for read, found in zip(reads.reads, reads.tensors_of(tensors), strict=True):
            self._answers.setdefault(read.place, []).append((read, found))

    def take(self, call: OperatorCall) -> Answer | None:
        """Return the answer to a read; None for other operators, and for reads that were not made before the step."""
        if not (contents_of(call) or is_read(call)):
            return None
        answers = self._answers.get(find_place())
        if not answers:
            return None
        read, found = answers.pop(0)
        if read.kind is Kind.VALUE:
            return Answer(read.found)
        if read.kind is Kind.CONTENT:
            known, (first, *others) = read.found.clone(), call.args
            if call.schema.name == TO_COPY:
                return Answer(known, found=(known,), is_content=True)
            packed = OperatorCall(call.schema, (first, known, *others[1:]), call.kwargs, call)
            return Answer(None, packed, (known,), is_content=True)
        if call.schema.name == POSITIONS:
            # A mask with another number of dimensions is not the one that was read.
            return Answer(found, found=found) if max(call.args[0].dim(), 1) == len(found) else None
        is_single = len(call.schema.operator._schema.returns) == 1
        return Answer(found[0] if is_single else tuple(found), found=found)


def reads_in(kwargs: Mapping[str, Any]) -> tuple[BatchReads, Sequence[Tensor]] | None:
    """Return the reads made before a call, and their tensors, from its arguments; None if there are none."""
    if BATCH_READS not in kwargs:
        return None
    number, *tensors = kwargs[BATCH_READS]
    return _made[number], tensors


def answers_in(kwargs: Mapping[str, Any]) -> BatchAnswers | None:
    """Return answers for the reads made before a call, from its arguments; None if there are none."""
    found = reads_in(kwargs)
    return None if found is None else BatchAnswers(*found)


def is_right(answer: Answer, call: OperatorCall) -> bool:
    """Return True if a read gives the same as its answer."""
    if answer.is_content:
        real = [tensor.cpu() for tensor in contents_of(call)]
    else:
        out = call.schema.call(*call.args, **call.kwargs)
        if not answer.found:
            return leaf_key(out) == leaf_key(answer.value)
        real = tensors_in(out)
    return len(answer.found) == len(real) and all(map(same_bits, answer.found, real))
