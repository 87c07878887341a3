"""Reads of the fed batch on the host, made before a replay instead of in it.

Whether lengths differ, which rows a mask selects, and how many, often follow from what a step is fed alone, and from
tensors of its owners that it only reads. The operators that lead to such a read run before each replay. What they find
chooses the program, and the positions that masks select are fed to it like the batch. A read that needs more than that
(a trained parameter, a random number) refuses the step.

Everything after a read may depend on what was read, so the operators of one trace are good for its values alone: the
first other value ends the search, and another trace may be tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from graphplan.errors import HostSyncError
from graphplan.feed.call_arguments import BATCH_READS
from graphplan.feed.signature import Feed, leaf_key
from graphplan.owners.slots import Slot
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.copying import same_bits
from graphplan.tensors.storages import storage_id
from graphplan.trace.host_reads import HostRead, Place, find_place
from graphplan.trace.operator_schemas import (
    INDEXING,
    PACKING,
    TO_COPY,
    Schema,
    has_dynamic_shape,
    is_mask,
    tensors_in,
    without_masks,
    written_tensors,
)

_SELECT = "aten.masked_select.default"
_POSITIONS = "positions"
_index: Any = torch.ops.aten.index.Tensor
_LARGEST = 4096
"""Elements of a tensor that the host may read as a whole: each content of it needs a program of its own."""
_Source = Slot | int
"""A tensor to begin with: an owner's, or the leaf of the batch with that index."""
_SHARE, _FEW = 4, 32
"""The operators that lead to a read may be a quarter of the step's, or that many."""
_numbers = count()
_made: WeakValueDictionary[int, BatchReads] = WeakValueDictionary()


class Kind(Enum):
    """What is read of a batch."""

    VALUE = auto()
    """A number, which has to be the traced one."""
    CONTENT = auto()
    """All numbers in a tensor, likewise."""
    SHAPE = auto()
    """The shapes of tensors, whose contents are fed to the program."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor in an operator's arguments."""

    number: int


class _Read(NamedTuple):
    """A read: where it is, and what was ``found`` in the trace. ``error`` is what refuses it where it cannot be made
    before the step, ``call`` the position of the operator that reads.
    """

    place: Place
    kind: Kind
    found: Any
    error: HostSyncError | None
    call: int = 0

    def finds(self, out: Any, made: Sequence[Tensor]) -> bool:
        """Return True if an operator's result is what was found in the trace."""
        if self.kind is Kind.VALUE:
            return leaf_key(out) == leaf_key(self.found)
        if self.kind is Kind.CONTENT:
            return same_bits(made[0].cpu(), self.found)
        return [tuple(tensor.shape) for tensor in made] == self.found


@dataclass(frozen=True, slots=True)
class _Call:
    """One operator: ``made`` are the numbers of the tensors that it gives, ``given`` and ``changed`` storages."""

    run: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[int, ...]
    given: frozenset[int | None]
    changed: frozenset[int | None]
    writes: bool
    read: _Read | None

    @property
    def form(self) -> str:
        """What tells it from other operators, but for what it makes."""
        return repr((self.name, self.args, self.kwargs))

    @property
    def shows(self) -> bool:
        """Whether code gets hold of what was read. Positions only go to operators."""
        return self.read is not None and self.read.kind is Kind.SHAPE and self.name != _POSITIONS

    def slots(self) -> list[_Slot]:
        """The tensors that it is given."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, _Slot)]

    def renumbered(self, numbers: Mapping[int, int]) -> _Call:
        """The operator with other numbers."""
        args, kwargs = tree_map_only(
            _Slot, lambda slot: _Slot(numbers.get(slot.number, slot.number)), (self.args, dict(self.kwargs))
        )
        return replace(self, args=args, kwargs=kwargs, made=tuple(numbers.get(each, each) for each in self.made))


class _Ran(NamedTuple):
    """An operator that has run for one batch, and what it gave."""

    form: str
    out: Any
    made: Sequence[Tensor]


class Search:
    """What has run to find the reads of one batch, given as the ``leaves`` of a call: ways through a step that begin
    with the same operators have these run once.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.leaves = leaves
        self._ran: dict[tuple[Any, ...], list[_Ran]] = {}

    def ran(self, sources: tuple[Any, ...]) -> list[_Ran]:
        """The operators that the latest way from these sources began with."""
        return self._ran.setdefault(sources, [])


class BatchReads:
    """The ``reads`` of one trace in their order, and the operators that lead to them."""

    def __init__(
        self,
        calls: Sequence[_Call],
        reads: Sequence[_Read],
        sources: Mapping[int, _Source],
        twins: Sequence[tuple[int, int]],
    ) -> None:
        self.reads = reads
        self._calls, self._sources, self._twins = calls, sources, twins
        self._of_call = {read.call: read for read in reads}
        self._forms = [f"{call.form} {call.made}" for call in calls]
        self._begin = tuple(map(_named, sources.values()))
        self._is_pure = not any(call.writes for call in calls)
        self.number = next(_numbers)
        """Tells it from all others in the process."""
        _made[self.number] = self
        self.is_outdated = False
        """A later trace came to the reads in another way."""
        self.is_taken = False
        """A batch has taken this way since that was asked."""

    @property
    def error(self) -> HostSyncError | None:
        """What refuses the first read that was not made before the step."""
        return next((read.error for read in self.reads if read.error is not None), None)

    def is_among(self, others: Sequence[HostRead]) -> bool:
        """Return True if one of the reads is at the place of a read of another kind: places tell reads apart."""
        return not {read.place for read in self.reads}.isdisjoint(other.place for other in others)

    def find(self, search: Search) -> list[Tensor] | None:
        """The tensors that a step reads of a batch; None if it reads other values or shapes than the traced one."""
        try:
            found = self._find(search)
        except Exception:  # noqa: BLE001 - such a batch does not come here in the step, or the step raises
            return None
        self.is_taken |= found is not None
        return found

    def _find(self, search: Search) -> list[Tensor] | None:
        if any(search.leaves[one].data_ptr() != search.leaves[other].data_ptr() for one, other in self._twins):
            return None
        known: dict[int, Any] = {}
        for number, source in self._sources.items():
            known[number] = source.get() if isinstance(source, Slot) else search.leaves[source]
            if not isinstance(known[number], Tensor):
                return None
        found: list[Tensor] = []
        ran = search.ran(self._begin) if self._is_pure else []
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            for position, call in enumerate(self._calls):
                if len(ran) <= position or ran[position].form != self._forms[position]:
                    named = {name: _filled(value, known) for name, value in call.kwargs.items()}
                    out = call.run(*_filled(call.args, known), **named)
                    ran[position:] = [_Ran(self._forms[position], out, tensors_in(out))]
                _, out, made = ran[position]
                read = self._of_call.get(position)
                if read is not None and not read.finds(out, made):
                    return None
                if read is not None and read.kind is Kind.SHAPE:
                    # What operators write to later must not change what was found.
                    found += made if self._is_pure else [tensor.clone() for tensor in made]
                known.update(zip(call.made, made, strict=False))
        return found

    def tensors_of(self, found: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """For each read, its tensors among all that :meth:`find` gives."""
        rest, taken = list(found), dict[int, Sequence[Tensor]]()
        for position in range(len(self._calls)):
            read = self._of_call.get(position)
            size = len(read.found) if read is not None and read.kind is Kind.SHAPE else 0
            taken[position], rest = rest[:size], rest[size:]
        return [taken[read.call] for read in self.reads]

    def is_like(self, other: BatchReads) -> bool:
        """Return True if both come to the same reads by the same operators."""
        same = (self._forms, self._begin, self._twins) == (other._forms, other._begin, other._twins)
        return same and len(self.reads) == len(other.reads) and all(map(_is_same, self.reads, other.reads))


def _named(source: _Source) -> str | int:
    return source.path if isinstance(source, Slot) else source


def _is_same(one: _Read, other: _Read) -> bool:
    if (one.place, one.kind, one.call) != (other.place, other.kind, other.call):
        return False
    return one.finds(other.found, [other.found]) if one.kind is not Kind.SHAPE else one.found == other.found


def _filled(given: Any, known: Mapping[int, Any]) -> Any:
    if type(given) is _Slot:
        return known[given.number]
    if type(given) is list or type(given) is tuple:
        return type(given)([_filled(item, known) for item in given])
    return given


class BatchRecorder:
    """Follows, in one trace, what is computed from the batch alone."""

    def __init__(self, leaves: Sequence[tuple[int, Tensor]]) -> None:
        self._numbers: dict[Any, int] = {}
        """By memory and geometry: views of other views, and what autograd unpacks, are the same tensor."""
        self._known: set[int | None] = set()
        self._calls: list[_Call] = []
        self._kept: list[Tensor] = []
        """What the step does not make: no other tensor may get its memory meanwhile."""
        self.is_outdated = False
        """What was read before the step is not what is read in it."""
        self._dtype = torch.get_default_dtype()
        self._operators = 0
        self._twins: list[tuple[int, int]] = []
        """Leaves that are the same memory in the same way: the next call has to have them alike."""
        self._sources: dict[int, _Source] = {}
        self._outside: set[int | None] = set()
        """The memory of the sources, which the step does not make."""
        self._owned: dict[int | None, range] = {}
        """The memory of those that owners have, and where it lies."""
        self._changed: dict[int | None, range] = {}
        """The memory that the step writes to."""
        self._ambiguous: set[int | None] = set()
        """Memory that is both an owner's and fed: the next call may be fed something else."""
        for index, leaf in leaves:
            if storage_id(leaf) is not None:
                self._begin_with(leaf, index)

    def meet(self, tensor: Tensor, slots: Sequence[Slot]) -> None:
        """Take in a tensor of an owner, which is in one of ``slots``, unless it is trained: its values change."""
        storage = storage_id(tensor)
        if slots and storage in self._outside:
            self._ambiguous.add(storage)
        for slot in slots:
            held = slot.get()
            # By now there may be another tensor.
            is_there = type(held) in PLAIN_KINDS and storage_id(held) == storage
            if storage not in self._outside and is_there and not held.requires_grad:
                self._owned[storage] = _range_of(held)
                self._begin_with(held, slot)

    def _begin_with(self, tensor: Tensor, source: _Source) -> None:
        if not _is_plain(tensor):
            return
        number = self._number(tensor)
        first = self._sources.setdefault(number, source)
        if first is not source and isinstance(first, int) and isinstance(source, int):
            self._twins.append((first, source))
        self._known.add(storage_id(tensor))
        self._outside.add(storage_id(tensor))

    def reads(self) -> BatchReads | None:
        """The reads of the trace, and what leads to them; None if there are none."""
        calls = [call for call, _ in self._leading_to(None)]
        reads = any(call.read is not None for call in calls)
        return _made_once(calls, self._sources, self._twins) if reads else None

    def impossible(self) -> list[HostSyncError]:
        """The refusals of reads that cannot be made before the step: of what it changes itself, or that take long."""
        unknown = self._ambiguous | {
            storage
            for storage, memory in self._owned.items()
            if any(max(memory.start, other.start) < min(memory.stop, other.stop) for other in self._changed.values())
        }
        reads = [call.read for call in self._calls if call.read is not None]
        limit = max(_FEW, self._operators // _SHARE)
        found = []
        for read in reads:
            leading = self._leading_to(read)
            is_known = all(unknown.isdisjoint(needed) for _, needed in leading)
            if read.error is not None and not (is_known and len(leading) <= limit):
                found.append(read.error)
        return found

    def _leading_to(self, read: _Read | None) -> list[tuple[_Call, frozenset[int | None]]]:
        """The operators that lead to ``read``, or to all reads, with the memory that each needs."""
        needed: set[int | None] = set()
        calls: list[tuple[_Call, frozenset[int | None]]] = []
        for call in reversed(self._calls):
            is_asked = call.read is not None and (read is None or call.read is read)
            if is_asked or not needed.isdisjoint(call.changed):
                calls.append((call, call.given | call.changed))
                needed |= call.given | call.changed
        return calls[::-1]

    def note(self, schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Take in an operator that is no read, after it has run."""
        given, made = tensors_in([*args, *kwargs.values()]), tensors_in(out)
        written = {storage_id(tensor): tensor for tensor in written_tensors(schema, args, dict(kwargs))}
        self._operators += 1
        self._changed.update((storage, _range_of(tensor)) for storage, tensor in written.items() if storage is not None)
        follows = schema.is_certain and torch.get_default_dtype() == self._dtype and all(map(self._has, given))
        if not (follows and all(map(_is_plain, made)) and self._outside.isdisjoint(written)):
            self._known -= written.keys()
        elif made or written:
            self._add(schema.call, schema.name, args, kwargs, made, set(written))

    def note_constant(self, made: Tensor, value: Tensor) -> None:
        """Take in a tensor that was made of Python's numbers."""
        name = f"constant {value.dtype} {value.device} {tuple(value.shape)} {value.tolist()}"
        self._add(value.clone, name, (), {}, [made])

    def read(
        self,
        schema: Schema,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        error: Callable[[], HostSyncError] | None = None,
    ) -> bool:
        """Take in a read; False if it needs more than the batch. Operators that use masks are noted beside it.
        ``error`` makes what refuses it.
        """
        place, masks, contents = find_place(), masks_of(schema, args), contents_of(schema, args, kwargs)
        given = contents or masks or tensors_in([*args, *kwargs.values()])
        if not given or not all(map(self._has, given)) or not (masks or contents or schema.is_certain):
            return False
        if contents and contents[0].numel() > _LARGEST:
            return False
        refusal = None if error is None else error()
        if contents:
            read = _Read(place, Kind.CONTENT, contents[0].detach().cpu().clone(), refusal)
            self._add(_itself, "content", (contents[0],), {}, [], read=read)
        elif masks:
            found = _positions_among(masks_among(schema, args))
            self._kept += found
            read = _Read(place, Kind.SHAPE, [tuple(tensor.shape) for tensor in found], refusal)
            self._add(_positions_among, _POSITIONS, (masks_among(schema, args),), {}, found, read=read)
        elif schema.reads_values:
            self._add(schema.call, schema.name, args, kwargs, [], read=_Read(place, Kind.VALUE, out, refusal))
        else:
            made = tensors_in(out)
            read = _Read(place, Kind.SHAPE, [tuple(tensor.shape) for tensor in made], refusal)
            self._add(schema.call, schema.name, args, kwargs, made, read=read)
        return True

    def takes(self, answer: Answer, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Take in a read that was made before the step; False if it gives something else now."""
        value = None if answer.value is None else answer.value[0]
        if not (is_right(answer, schema, args, kwargs) and self.read(schema, args, kwargs, value)):
            self.is_outdated = True
            return False
        if answer.is_content and answer.value is not None:
            self.note(schema, args, kwargs, value)
        return True

    def _has(self, tensor: Tensor) -> bool:
        is_known = _is_plain(tensor) and storage_id(tensor) in self._known
        return is_known and _geometry(tensor) in self._numbers

    def _number(self, tensor: Tensor) -> int:
        return self._numbers.setdefault(_geometry(tensor), len(self._numbers))

    def _add(
        self,
        run: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        made: Sequence[Tensor],
        written: set[int | None] | None = None,
        read: _Read | None = None,
    ) -> None:
        given = frozenset(map(storage_id, tensors_in([*args, *kwargs.values()])))
        slots, named = tree_map_only(Tensor, lambda tensor: _Slot(self._number(tensor)), (args, dict(kwargs)))
        changed = frozenset(map(storage_id, made)) | (written or set())
        self._known |= changed
        numbers = tuple(map(self._number, made))
        self._calls.append(_Call(run, name, slots, named, numbers, given, changed, bool(written), read))


def _made_once(calls: Sequence[_Call], sources: Mapping[int, _Source], twins: Sequence[tuple[int, int]]) -> BatchReads:
    """What runs equal operators once, with tensors numbered by their first appearance: a mask that is used three times
    is read once.
    """
    given = {slot.number for call in calls for slot in call.slots()}
    used = {number: source for number, source in sources.items() if number in given}
    numbers: dict[int, int] = {number: at for at, number in enumerate(used)}
    merges = not any(call.writes for call in calls)
    kept: list[_Call] = []
    by_form: dict[str, int] = {}
    reads: list[_Read] = []
    for call in calls:
        new = call.renumbered(numbers)
        position = by_form.get(new.form) if merges and not call.shows else None
        if position is None:
            position = by_form[new.form] = len(kept)
            for number in call.made:
                numbers.setdefault(number, max(numbers.values(), default=-1) + 1)
            kept.append(call.renumbered(numbers))
        numbers.update(zip(call.made, kept[position].made, strict=True))
        if call.read is not None:
            reads.append(call.read._replace(call=position))
    return BatchReads(kept, reads, dict(enumerate(used.values())), [pair for pair in twins if pair[0] in used.values()])


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    place = storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
    return (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _is_plain(tensor: Tensor) -> bool:
    return not tensor.is_nested and tensor.layout is torch.strided


def _range_of(tensor: Tensor) -> range:
    """The addresses of a tensor's memory."""
    memory = tensor.untyped_storage()
    return range(memory.data_ptr(), memory.data_ptr() + memory.nbytes())


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def is_read(schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator's results follow from a read alone."""
    is_dynamic = schema.may_synchronize and has_dynamic_shape(schema, args, kwargs)
    return schema.reads_values or (is_dynamic and not masks_of(schema, args))


def masks_of(schema: Schema, args: Sequence[Any]) -> list[Tensor]:
    """The masks that decide on the shape of what an operator gives."""
    return [mask for mask in masks_among(schema, args) if mask is not None]


def masks_among(schema: Schema, args: Sequence[Any]) -> list[Tensor | None]:
    """The masks of an operator in their places, with None in the places of other indices."""
    if schema.name in INDEXING:
        return [index if is_mask(index) else None for index in args[1]]
    return [args[1]] if schema.name == _SELECT and args[0].shape == args[1].shape else []


def contents_of(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensor of which the host needs all numbers: lengths of packed sequences, and what is copied to the host."""
    if schema.name == PACKING:
        return [args[1]]
    target = kwargs.get("device") if schema.name == TO_COPY else None
    return [args[0]] if target is not None and target.type == "cpu" and args[0].device.type != "cpu" else []


def _positions_among(masks: Sequence[Tensor | None]) -> list[Tensor]:
    return [position for position in without_masks(masks) if position is not None]


class Answer(NamedTuple):
    """What a read gives: its ``value`` in a tuple, or an operator to run instead with its arguments. ``found`` are the
    tensors that were read; with ``is_content`` they are always the same.
    """

    value: tuple[Any] | None
    operator: Any = None
    args: tuple[Any, ...] = ()
    found: Sequence[Tensor] = ()
    is_content: bool = False


class BatchAnswers:
    """Answers the reads of a step that is traced again or captured: with the values that its program was chosen by, and
    the ``tensors`` that it is fed.
    """

    def __init__(self, reads: BatchReads, tensors: Sequence[Tensor]) -> None:
        self._answers: dict[Place, list[tuple[_Read, Sequence[Tensor]]]] = {}
        self._taken: Counter[Place] = Counter()
        for read, found in zip(reads.reads, reads.tensors_of(tensors), strict=True):
            self._answers.setdefault(read.place, []).append((read, found))

    def take(self, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
        """The answer to a read; None for other operators, and for reads that were none when the batch was looked at."""
        masks = masks_of(schema, args)
        if masks and not has_dynamic_shape(schema, args, kwargs):
            return None
        if not (masks or contents_of(schema, args, kwargs) or is_read(schema, args, kwargs)):
            return None
        place = find_place()
        number, answers = self._taken[place], self._answers.get(place, ())
        if number >= len(answers):
            return None
        self._taken[place] += 1
        read, found = answers[number]
        if read.kind is Kind.VALUE:
            return Answer((read.found,))
        if read.kind is Kind.CONTENT:
            known = read.found.clone()
            if schema.name == TO_COPY:
                return Answer((known,), found=(known,), is_content=True)
            return Answer(None, schema.operator, (args[0], known, *args[2:]), (known,), is_content=True)
        if masks and sum(mask.dim() for mask in masks) != len(found):
            # Another mask than the one that was read.
            return None
        if not masks:
            is_single = len(schema.operator._schema.returns) == 1
            return Answer((found[0] if is_single else tuple(found),), found=found)
        if schema.name == _SELECT:
            return Answer(None, _index, (args[0], list(found)), found)
        return Answer(None, schema.operator, (args[0], _with_positions(args[1], found), *args[2:]), found)


def _with_positions(indices: Sequence[Tensor | None], found: Sequence[Tensor]) -> list[Tensor | None]:
    """``indices`` with positions in the place of masks, as many for each as it has dimensions."""
    following = iter(found)
    made: list[Tensor | None] = []
    for index in indices:
        made += [next(following) for _ in range(index.dim())] if index is not None and is_mask(index) else [index]
    return made


def reads_in(kwargs: Mapping[str, Any]) -> tuple[BatchReads, Sequence[Tensor]] | None:
    """What was read before a call, among its arguments; None if nothing was."""
    if BATCH_READS not in kwargs:
        return None
    number, *tensors = kwargs[BATCH_READS]
    return _made[number], tensors


def recorder_of(feed: Feed) -> BatchRecorder:
    """A recorder for a step that is fed so. What was read before it is no part of the batch."""
    found = reads_in(feed.given[1]) if feed.given is not None else None
    size = len(feed.leaves) - (0 if found is None else 1 + len(found[1]))
    return BatchRecorder([(index, leaf) for index, leaf in feed.tensors() if index < size])


def answers_in(kwargs: Mapping[str, Any]) -> BatchAnswers | None:
    """The answers among the arguments of a call."""
    found = reads_in(kwargs)
    return None if found is None else BatchAnswers(*found)


def is_right(answer: Answer, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a read gives what it is answered with."""
    masks = masks_among(schema, args)
    if answer.is_content:
        real = [tensor.cpu() for tensor in contents_of(schema, args, kwargs)]
    elif any(mask is not None for mask in masks):
        real = _positions_among(masks)
    else:
        out = schema.call(*args, **kwargs)
        real = tensors_in(out)
        if answer.value is not None and not answer.found:
            return leaf_key(out) == leaf_key(answer.value[0])
    return len(answer.found) == len(real) and all(map(same_bits, answer.found, real))
