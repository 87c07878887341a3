"""Python values and tensor properties that code reads: compared before each replay, or refused if they change."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import IOBase
from types import MappingProxyType
from typing import Any, NoReturn

from graphplan.effects.allowed import allowing, shorten
from graphplan.effects.appended_lists import AppendedLists
from graphplan.effects.trace_pair import TracePair
from graphplan.errors import HostEffectError, HostScalarError
from graphplan.observe.source import find_load
from graphplan.observe.type_calls import calls_type
from graphplan.owners.contents import is_proxy, unseen
from graphplan.owners.slots import Scalar, Walk
from graphplan.owners.tensor_metadata import ABSENT, EXISTS, Sentinel, difference, is_there
from graphplan.owners.views import CallNumbers
from graphplan.specs.paths import Fact, Path, names
from graphplan.tensors.symbolic import Question
from graphplan.trace.changes import is_alike, is_now, same_value, told, told_apart
from graphplan.trace.symbolic_numbers import lies_of


@dataclass(frozen=True, slots=True)
class Reads:
    """Everything that the step's code may have read of its owners and does not change. Replays need it unchanged.

    Attributes:
        values: Python values by path, as they were before each traced step.
        questions: conditions computed from owners' numbers that the code has branched on, with their results. For these
            numbers, a replay compares only the results.
        metadata: properties, by path, of tensors that no operator uses but whose properties the code may read.
        lies: places of numbers that have stand-ins, see :class:`graphplan.trace.symbolic_numbers.SymbolicNumbers`.
    """

    values: Mapping[str, Any]
    questions: Mapping[Question, bool]
    metadata: Mapping[str, Any]
    lies: Mapping[str, tuple[str, bool]]

    @classmethod
    def find(cls, pair: TracePair, changed: Collection[str], *, loose: bool) -> Reads:
        """Find what both traces read at paths that the step has not ``changed``. Refuse what differs or cannot be
        compared. ``loose``: see :func:`_find_inspected`.
        """
        values: dict[str, Any] = {}
        stale: dict[str, Scalar] = {}
        appended = AppendedLists(pair)
        for path, scalar in {**pair.walk.scalars, **pair.walk.objects}.items():
            if path in changed or pair.allows(path):
                continue
            if path in appended.lengths:
                _check_length(path, appended, pair)
                continue
            if appended.hides(path, scalar) or not all(path in trace.entry_scalars for trace in pair.both):
                continue
            if pair.tracks(path) or pair.remakes(path):
                continue
            sure = pair.reads(scalar) or pair.uses(path, scalar)
            # Assigning an unchanged value counts as reading it: after other calls, the value may be another one.
            if not (sure or pair.may_read(scalar) or any(trace.reads.may_assign(scalar) for trace in pair.both)):
                continue
            old, new = (trace.entry_scalars[path] for trace in pair.both)
            if sure:
                _check_comparable(path, new)
            if (path in pair.walk.objects or not sure) and not same_value(old, new):
                # Do not compare an object that is another one each time, a container that grows, or a changed value
                # that perhaps was neither read nor assigned.
                continue
            if same_value(old, new):
                values[path] = new
            else:
                stale[path] = scalar
        if stale:
            _refuse_stale(stale, pair)
        questions = {**pair.first.symbolic.asked, **pair.second.symbolic.asked}
        metadata = _find_inspected(pair, values, appended, loose=loose)
        lies = MappingProxyType(pair.second.symbolic.lies)
        return cls(MappingProxyType(values), MappingProxyType(questions), MappingProxyType(metadata), lies)

    def changed(self, walk: Walk, values: Mapping[str, Any], when: str = "") -> str | None:
        """Describe the first of ``values``, or the first tensor, that is not as in the traces; None if all are."""
        for path, old in values.items():
            value = walk.value(path)
            if value is None or not same_value(old, value.get()):
                return _told(path, old, value, walk, when)
        now = lies_of({path: walk.scalars[path] for path in self.lies if path in walk.scalars})
        for path, (name, is_classes) in now.items():
            before, was_classes = self.lies[path]
            is_apart = before != self.lies[name][0] or (before in now and now[before][0] != name)
            if is_apart or is_classes != was_classes:
                return (
                    f"{path} is {'a number of its class' if is_classes else 'a number of an object'} now, and was "
                    f"not{when}"
                )
        for path, old in self.metadata.items():
            if not is_alike(old, walk.metadata(path)):
                return told(path, old, _found(path, walk), when)
        return None


def _told(path: str, old: Any, value: Scalar | None, walk: Walk, when: str) -> str:
    """Describe that ``path`` was ``old`` and is ``value`` now, which is None if no Python value can be read there."""
    if not (isinstance(path, Path) and path.of is Fact.LENGTH):
        return told(path, old, _found(path, walk) if value is None else value.get(), when)
    now = f"has {_extent(value.get())}" if value is not None else is_now(_found(path.place, walk))
    advice = " (if the code needs only its last item, keep that in a separate attribute)" if type(old) is int else ""
    return f"{path.place} had {_extent(old)}{when} and {now}{advice}"


def _extent(items: Any) -> str:
    return f"the keys {shorten(items)}" if isinstance(items, tuple) else f"the length {items}"


def _found(place: str, walk: Walk) -> Any:
    """Return what is at ``place`` now: a tensor's metadata, or a Python value."""
    found = walk.metadata(place)
    within = (f"{place}.", f"{place}[", f"len({place})")
    if found is ABSENT and any(path.startswith(within) for path in (*walk.slots, *walk.scalars, *walk.objects)):
        return Sentinel("an object")
    return found


def _check_length(path: str, appended: AppendedLists, pair: TracePair) -> None:
    """Refuse a step whose code reads the length of a list that the step itself appends to."""
    look = appended.look(appended.lengths[path])
    if look is not None and not pair.allows(appended.lengths[path]):
        raise HostScalarError(
            f"the step's code reads {path}, directly or indirectly, at {look}, but the step itself appends to that "
            f"list; a replay would keep one length. Count in a tensor, append after the step, or, {allowing(path)}",
            path=path,
        )


def _check_comparable(path: str, value: Any) -> None:
    """Refuse a value that the step reads and whose changes no comparison before a replay would detect."""
    if isinstance(value, Iterator) and not isinstance(value, IOBase) and not is_proxy(value):
        raise HostEffectError(
            f"the step's code reads {path}, a {type(value).__name__}: each eager step may take its next item, but a "
            "replay takes none. Take the item before the step and pass it as an argument, or, if the step takes none, "
            f"pass allow=({path!r},)",
            path=path,
        )
    hidden = unseen(value)
    if hidden is not None:
        raise HostScalarError(
            f"the step's code reads {path}, {hidden.what} is not compared before each replay, so graphplan would miss "
            f"a change. {hidden.instead}, or, if nothing changes it, pass allow=({path!r},)",
            path=path,
        )


def check_used(pair: TracePair) -> None:
    """Refuse numbers whose values code needs, such as for an operator, if they differ between the traces."""
    before, now = (trace.entry_scalars for trace in pair.both)
    used = {path for trace in pair.both for path in trace.symbolic.used} & before.keys() & now.keys()
    changed = {path for path in used if not (same_value(before[path], now[path]) or pair.allows(path))}
    stale = {path: pair.walk.scalars[path] for path in sorted(changed & pair.walk.scalars.keys())}
    if stale:
        _refuse_stale(stale, pair)


def _refuse_stale(stale: Mapping[str, Scalar], pair: TracePair) -> NoReturn:
    """Refuse values that change between two steps. One may cause another, so the message names all for ``allow=``."""
    path, scalar = next(iter(stale.items()))
    before, after = told_apart(*(trace.entry_scalars[path] for trace in pair.both))
    name = (scalar.via or scalar.attribute).removeprefix(".").removesuffix("[:]")
    used = (trace.symbolic.used.get(path) for trace in pair.both)
    found = next(filter(None, used), None) or find_load((code for code, _ in pair.second.reads.codes), name)
    instead = "Keep it in a tensor and update that in place, pass it as an argument of the step, or, "
    if any(path in trace.symbolic.used for trace in pair.both):
        needs = next(filter(None, (trace.symbolic.needs.get(path) for trace in pair.both)), "that line")
        instead = (
            f"Replays follow numbers that operators compute with (x * n), but {needs} needs the value itself. {instead}"
        )
    if type(scalar.container) is CallNumbers:
        instead = (
            "Move that code to on_train_batch_end, select the batches that run it with eager_if=, or pass variant= to "
            "get a program for each of a few cases, or, "
        )
    asking = [code for code, _ in pair.second.reads.codes if calls_type(code)]
    if asking:
        instead = f"If only type() at {find_load(asking, 'type')} needs it, use isinstance(). {instead}"
    raise HostScalarError(
        f"the step's code uses {path}{f' at {found}' if found else ''}, which is {before} before one step and {after} "
        f"before the next; a replay would keep one value. {instead}{allowing(*stale)}",
        component=scalar.component,
    )


def _find_inspected(pair: TracePair, reads: Collection[str], appended: AppendedLists, *, loose: bool) -> dict[str, Any]:
    """Return the properties, by path, of tensors of which the step's code may have read nothing else. ``reads`` are the
    paths of Python values that are compared anyway. With ``loose``, if the properties of a tensor differed before the
    two steps, only its existence is compared: code also names tensors that it only uses in branches not taken. If
    results depend on the properties, the first check reports it.
    """
    lengths = (path for path in pair.walk.objects if path not in reads and names(path, Fact.LENGTH))
    # Lists whose lengths are not compared: their items come and go.
    lists = {id(pair.walk.objects[path].container.items) for path in lengths}
    found = {}
    for path, scalar in _untouched(pair):
        if id(scalar.container) in lists or appended.hides(path, scalar):
            continue
        old, new = pair.at_entry(path)
        if is_there(old) and is_there(new) and (loose or not _has_changed(scalar, old, new)):
            if pair.reads(scalar) or pair.may_read(scalar):
                found[path] = new if same_value(old, new) and not _passes_through(scalar) else EXISTS
        elif _has_changed(scalar, old, new) and pair.reads(scalar):
            what, was, now = difference(path, old, new)
            raise HostScalarError(
                f"the step's code reads {what}, which is {was} before one step and {now} before the next; a replay "
                f"would keep one of them. Keep it the same, read it outside the step, or, {allowing(path)}",
                path=path,
            )
    return found


def changed_metadata(pair: TracePair) -> str | None:
    """Describe the first tensor whose properties changed between two traces, if code may read these; else None."""
    for path, scalar in _untouched(pair):
        old, new = pair.at_entry(path)
        if _has_changed(scalar, old, new) and pair.reads(scalar):
            return told(path, old, new, " one step before")
    return None


def _has_changed(scalar: Scalar, old: Any, new: Any) -> bool:
    """Return True if a place holds a tensor with other properties, or another kind of value, and that matters."""
    if same_value(old, new) or old is ABSENT or new is ABSENT:
        return False
    return not (_passes_through(scalar) and is_there(old) and is_there(new))


def _untouched(pair: TracePair) -> Iterator[tuple[str, Scalar]]:
    """Yield places that hold tensors, or did when the first trace began, and that neither step uses."""
    touched, walk = set[str](), pair.walk
    for trace in pair.both:
        touched.update(trace.changes.rebindings)
        touched.update(slot.path for storage in trace.externals for slot in trace.entry_slots.get(storage, ()))
    slots = {path: slot for path, slot in walk.slots.items() if slot.get() is not None}
    held = {path: walk.scalars[path] for path in pair.first.entry_metadata.keys() & walk.scalars.keys()}
    for path, place in {**slots, **held}.items():
        if path not in touched and not pair.allows(path):
            yield path, place


def _passes_through(scalar: Scalar) -> bool:
    """Return True if a tensor's properties do not matter: tensors in a deque may change in size at any time."""
    return isinstance(scalar.container, deque)
