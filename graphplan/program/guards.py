"""Is what a program depends on still where it was? Before every replay, flat comparisons over prebuilt lists, all in
one call: what containers hold, by identity, Python values that the step's code reads, where adopted memory lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import is_not
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphplan.compare.comparing import Checks, Column, Row, columns, contents_of, facts_of, row_of
from graphplan.observe.comparisons import Comparison, come_out_alike
from graphplan.owners.slots import Scalar, Slot, Walk, tensor_leaves
from graphplan.owners.tensor_metadata import TensorMetadata, metadata_of
from graphplan.owners.views import Inherited, attributes_of, home
from graphplan.plan.plan import Plan
from graphplan.specs.paths import Path
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.dtensors import is_sharded, local
from graphplan.trace.changes import is_alike, same_value

Place = tuple[Any, Any, Any]
"""A container, a key in it, and what lies there."""


class Guards:
    """Identity and address checks of one program.

    Args:
        slots: the slots that the program adopted.
        walk: the walk they come from; its links are checked too.
        plan: says what gradients must be on entry and which Python values the step reads.
        extra: unowned tensors that the plan keeps.
        values: what those Python values were at capture, by path; of others, what they are now counts.
        entry_grads: by path, the gradients that the step accumulates into.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        walk: Walk,
        plan: Plan,
        extra: Sequence[Tensor],
        values: Mapping[str, Any],
        *,
        entry_grads: Mapping[str, Tensor | None],
    ) -> None:
        slots = [slot for slot in slots if slot.param is None]
        read = {path: value for path in plan.reads.values if (value := walk.value(path)) is not None}
        self._reads = plan.reads
        self._shown = _Metadata(plan.reads.metadata, walk)
        holders = [place.container for place in (*slots, *self._shown.slots, *read.values())]
        links = _used_links(walk, plan, holders)
        self._structure_places = [*links, *((parts, name, None) for parts, name in walk.empty.values())]
        self._names = Counter(id(child) for _, _, child in links if not isinstance(child, Tensor | Module))
        """How many links lead to each container: what is in it was found by the name of one of them."""
        # Those of modules are part of the program's key.
        things = [thing for thing, _ in walk.attributes if not issubclass(type(thing), Module)]
        self._types = Column("same_types", [("an object", thing) for thing in things])
        # Code that asks a tensor of another class for an attribute may find its class's where it has none.
        marks = [(path, inner) for path, inner, kind in walk.marks if kind not in PLAIN_KINDS]
        self._marks = Column("same_lengths", marks)
        self._known = list(self._types.read()), list(self._marks.read())
        by_path = dict(walk.parameters.values())
        gradients = [(Path.gradient(path), by_path[path], "grad") for path in plan.entry_grads if path in by_path]
        self._grads = Column("same_attributes", gradients)
        self._entry_grads = [entry_grads.get(path) for path in self._grads.paths]
        # An attribute of the instance's own would stand before the class's.
        inherited = [value for value in read.values() if type(value.container) is Inherited]
        dicts = [(inner, v.key) for v in inherited if (inner := attributes_of(v.owner)) is not None]
        rows_of_structure: list[Row] = [
            ("none_there", *columns(dicts, 2)),
            self._marks.row(),
            self._types.row(),
            *self._rows_of_values(read, values),
        ]
        places = [*((slot.container, slot.key, slot.get()) for slot in slots), *self._structure_places]
        self.rows: list[Row] = [
            *_rows_of_places(places),
            *rows_of_structure,
            self._grads.row(self._entry_grads),
            *self._rows_of_tensors(slots, list(extra)),
            *([("same_results", [self._shown.hold], [True])] if plan.reads.metadata else []),
        ]
        self._checks = Checks(self.rows)
        self._structure = Checks([*_rows_of_places(self._structure_places), *rows_of_structure])

    def _rows_of_values(self, read: Mapping[str, Scalar], known: Mapping[str, Any]) -> list[Row]:
        """Python values that the step's code reads; ``known``: what they were."""
        compared = {path: read[path] for path in self._reads.comparisons if path in read}
        places: dict[str, list[Any]] = {}
        for path, value in read.items():
            if path not in compared:
                kind, *where = value.look_up()
                places.setdefault(kind, []).append((path, *where))
        alike = [Column(kind, found) for kind, found in places.items()]
        groups = [*(column.paths for column in alike), list(compared)]
        self._values = [(paths, [known[p] if p in known else read[p].get() for p in paths]) for paths in groups]
        self.compares = {path: (value, self._reads.comparisons[path]) for path, value in compared.items()}
        """Numbers that the step's code only compares, and how."""
        rows = [column.row(values, same_value) for column, (_, values) in zip(alike, self._values, strict=False)]
        return [*rows, _row_of_comparisons(self.compares.values(), self._values[-1][1])]

    def _rows_of_tensors(self, slots: Sequence[Slot], extra: list[Tensor]) -> list[Row]:
        """Where tensors lie, and what they are like."""
        held = [tensor for slot in slots for tensor in tensor_leaves(slot.get())]
        grads = [local(grad) for grad in self._entry_grads if grad is not None]
        tensors = list({id(tensor): tensor for tensor in [*held, *extra, *grads]}.values())
        self.compared = frozenset(map(id, tensors))
        """Tensors of which everything is compared, by identity."""
        sharded = [value for value in (*(slot.get() for slot in slots), *self._entry_grads) if is_sharded(value)]
        return [*_rows_of_shards(sharded), row_of(tensors, placed=True)]

    def gradients_fit(self) -> bool:
        """Return True if gradients exist where the program reads them, and are None where it makes new ones."""
        pairs = zip(self._grads.read(), self._entry_grads, strict=True)
        return all((now is None) == (grad is None) for now, grad in pairs) and self._shown.gradients_are_there()

    def hold(self) -> bool:
        """Return True if nothing has changed."""
        return _hold(self._checks)

    def structure_holds(self) -> bool:
        """Return True if containers and Python values are unchanged, so that slots are found without a walk."""
        return _hold(self._structure)

    def changed_structure(self) -> str | None:
        """The first layer, parameter or buffer that came, went or was replaced, described."""
        for container, key, child in self._structure_places:
            if Slot(container, key).get() is child:
                continue
            if child is None:
                return f"{key!r} was None at capture and is there now"
            if isinstance(child, Module):
                return f"the {type(child).__name__} {key!r} was replaced or removed"
            if self._names[id(child)] > 1:
                return f"{key!r} was one of several names of a {type(child).__name__}, and is not now"
        types, counts = self._known
        for kind, now in zip(types, self._types.read(), strict=True):
            if now is not kind:
                return f"an object was a {kind.__name__} at capture and is a {now.__name__} now"
        for path, count, left in zip(self._marks.paths, counts, self._marks.read(), strict=True):
            if left != count:
                return f"{path} had {count} attributes of its own at capture and has {left} now"
        return None

    @property
    def values(self) -> dict[str, Any]:
        """The Python values that the program was captured with, by path."""
        return {path: value for group in self._values for path, value in zip(*group, strict=True)}


class _Metadata:
    """What tensors are like that the step's code only looks at, compared with what they were like in the traces. They
    are not held: the host may put another one there before each step, and as long as it is alike that does not matter.

    Args:
        known: what they were like, by path.
        walk: says where they lie now.
    """

    def __init__(self, known: Mapping[str, Any], walk: Walk) -> None:
        found = [(metadata, walk.slots[path]) for path, metadata in known.items() if path in walk.slots]
        self.slots = [slot for _, slot in found]
        self._is_whole = len(found) == len(known)
        # Single tensors are compared in one call; others are tuples, or only have to be there.
        self._single = [pair for pair in found if isinstance(pair[0], TensorMetadata)]
        self._others = [pair for pair in found if not isinstance(pair[0], TensorMetadata)]
        self._kinds = [metadata.kind for metadata, _ in self._single]
        self._facts: Any = None

    def hold(self) -> bool:
        """Return True if all tensors exist and have the properties that they had."""
        if not self._is_whole or not self.gradients_are_there():
            return False
        tensors = [slot.get() for _, slot in self._single]
        if self._facts is None or list(map(type, tensors)) != self._kinds or not self._facts.fit(tensors):
            if not _are_alike(self._single):
                return False
            self._facts = facts_of(tensors, placed=False)
        return _are_alike(self._others)

    def gradients_are_there(self) -> bool:
        """Return True if the gradients exist whose existence alone the code reads."""
        return all(slot.param.grad is not None for slot in self.slots if slot.param is not None)


def _are_alike(known: Iterable[tuple[Any, Slot]]) -> bool:
    return all(is_alike(metadata, metadata_of(slot.get())) for metadata, slot in known)


def _rows_of_shards(sharded: list[Any]) -> list[Row]:
    """A comparison that holds while DTensors have the shards that they had. It does not refer to the guards, which
    would then keep the owners' tensors until the next garbage collection: whether a tensor's memory is used elsewhere
    is told from how many tensors have it.
    """
    shards = list(map(local, sharded))
    return [("same_results", [lambda: not any(map(is_not, map(local, sharded), shards))], [True])] if sharded else []


def _row_of_comparisons(compares: Iterable[tuple[Scalar, tuple[Comparison, ...]]], known: list[Any]) -> Row:
    """A comparison that holds while the step's comparisons of numbers come out as they did for the ``known`` ones,
    which are then those of now.
    """
    numbers, made = columns(compares, 2)

    def hold() -> bool:
        now = [number.get() for number in numbers]
        if now != known:
            if not all(map(come_out_alike, made, known, now)):
                return False
            known[:] = now
        return True

    return ("same_results", [hold] if numbers else [], [True] if numbers else [])


def _hold(checks: Any) -> bool:
    try:
        return bool(checks.hold())
    except (KeyError, IndexError, RuntimeError, AttributeError):
        # A key that is gone, or a Python value that became a tensor.
        return False


def _used_links(walk: Walk, plan: Plan, containers: Iterable[Any]) -> list[Place]:
    """Links to modules, and to what holds anything that the program uses, counts or fills, directly or further down.

    Others may come and go: a scheduler's list of rates is another one after each step.
    """
    used = {id(home(container)) for container in containers}
    numbers = [*(c.path for c in plan.counters), *(a.path for a in plan.assignments), *(n.path for n in plan.numbers)]
    paths = [*plan.rebindings.paths, *numbers]
    used |= {id(place.container) for path in paths if (place := walk.place(path)) is not None}
    used |= {id(walk.lists[append.path]) for append in plan.appends if append.path in walk.lists}
    kept: list[Place] = []
    for container, key, child in reversed(walk.links):
        inner = attributes_of(child)
        if issubclass(type(child), Tensor | Module) or id(child) in used or (inner is not None and id(inner) in used):
            used.add(id(home(container)))
            kept.append((container, key, child))
    return kept[::-1]


def _rows_of_places(places: list[Place]) -> list[Row]:
    """Comparisons of what lies in containers."""
    whole, places = _take_whole(places)
    # Reading a missing key of a defaultdict would make it: dictionaries are asked by their own get.
    in_dicts = columns((place for place in places if isinstance(place[0], dict)), 3)
    in_others = columns((place for place in places if not isinstance(place[0], dict)), 3)
    return [*contents_of(whole), ("same_values", *in_dicts), ("same_items", *in_others)]


def _take_whole(places: list[Place]) -> tuple[list[Any], list[Place]]:
    """Dictionaries and lists all of whose items are guarded, which are compared without looking keys up, and the places
    that are left.
    """
    groups: dict[int, list[Place]] = {}
    for place in places:
        groups.setdefault(id(place[0]), []).append(place)
    whole: list[Any] = []
    left: list[Place] = []
    for group in groups.values():
        container = group[0][0]
        if isinstance(container, dict):
            guarded = {id(key) for _, key, _ in group}
            is_whole = all(id(key) in guarded for key in container)
        else:
            is_whole = type(container) is list and len({key for _, key, _ in group}) == len(container)
        if is_whole:
            whole.append(container)
        else:
            left += group
    return whole, left
