"""Is what a program depends on still where it was? Before every replay, flat comparisons over prebuilt lists, all in
one call: what containers hold, by identity, Python values that the step's code reads, where adopted memory lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_not
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphplan.compare.comparing import Checks, Row, contents_of, facts_of, row_of
from graphplan.effects.reads import Reads
from graphplan.observe.comparisons import come_out_alike
from graphplan.owners.slots import Scalar, Slot, Walk, tensor_leaves
from graphplan.owners.tensor_metadata import TensorMetadata, metadata_of
from graphplan.owners.views import Inherited, Members, Numbers, attributes_of, home, present
from graphplan.plan.plan import Plan
from graphplan.specs.paths import Path
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.dtensors import is_sharded, local
from graphplan.trace.changes import is_alike, same_value

Place = tuple[Any, Any, Any]
"""A container, a key in it, and what lies there."""
_Scalars = Sequence[tuple[str, Scalar]]


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
        self._links = walk.links
        self._missing = list(walk.empty.values())
        read = [(path, value) for path in plan.reads.values if (value := walk.value(path)) is not None]
        self._reads = plan.reads
        places = [(slot.container, slot.key, slot.get()) for slot in slots]
        self._shown = _Metadata(plan.reads.metadata, walk)
        holders = [[place.container for place in places] for places in (slots, self._shown.slots, dict(read).values())]
        links = _used_links(walk, plan, *holders)
        self._shared = _with_other_names(links)
        structure = [*links, *((parts, name, None) for parts, name in self._missing)]
        places += structure
        things = [thing for thing, _ in walk.attributes]
        # Code that asks a tensor of another class for an attribute may find its class's where it has none.
        self._marked = [(path, inner) for path, inner, kind in walk.marks if kind not in PLAIN_KINDS]
        self._marks = [len(inner) for _, inner in self._marked]
        # Those of modules are part of the program's key.
        self._things = [thing for thing in things if not issubclass(type(thing), Module)]
        self._types = list(map(type, self._things))
        by_path = dict(walk.parameters.values())
        self._grad_params = [by_path[path] for path in plan.entry_grads if path in by_path]
        self._grads = [entry_grads.get(Path.gradient(path)) for path in plan.entry_grads if path in by_path]
        # An attribute of the instance's own would stand before the class's.
        inherited = [value for _, value in read if type(value.container) is Inherited]
        dicts = [(inner, v.key) for v in inherited if (inner := attributes_of(v.owner)) is not None]
        rows_of_structure: list[Row] = [
            ("none_there", [inner for inner, _ in dicts], [key for _, key in dicts]),
            ("same_lengths", [inner for _, inner in self._marked], self._marks),
            ("same_types", self._things, self._types),
            *self._rows_of_values(read, values),
        ]
        self.rows: list[Row] = [
            *_rows_of_places(places),
            *rows_of_structure,
            ("same_attributes", self._grad_params, ["grad"] * len(self._grads), self._grads),
            *self._rows_of_tensors(slots, list(extra)),
            *([("same_results", [self._shown.hold], [True])] if plan.reads.metadata else []),
        ]
        self._checks = Checks(self.rows)
        self._structure = Checks([*_rows_of_places(structure), *rows_of_structure])

    def _rows_of_values(self, read: _Scalars, known: Mapping[str, Any]) -> list[Row]:
        """Python values that the step's code reads; ``known``: what they were."""
        # What an object shows as attributes is looked up there, without a detour.
        compared = [pair for pair in read if pair[0] in self._reads.comparisons]
        read = [pair for pair in read if pair[0] not in self._reads.comparisons]
        shown = [pair for pair in read if type(pair[1].container) is Numbers]
        items = [pair for pair in read if type(pair[1].container) is not Numbers]
        groups = (shown, items, compared)
        self._labels = [path for group in groups for path, _ in group]
        self._values = [[known[path] if path in known else value.get() for path, value in group] for group in groups]
        self.compares = {path: (value, self._reads.comparisons[path]) for path, value in compared}
        """Numbers that the step's code only compares, and how."""
        self.compared_values = dict(zip(self.compares, self._values[2], strict=True))
        keys = [[value.key for _, value in group] for group in groups]
        # Read the fastest way that makes nothing anew.
        found = [value.container for _, value in items]
        spaces = [c.space if isinstance(c, Members) else present(c) for c in found]
        return [
            ("equal_attributes", [v.container.thing for _, v in shown], keys[0], self._values[0], same_value),
            ("equal_items", spaces, keys[1], self._values[1], same_value),
            _row_of_comparisons(compared, self._values[2], self._reads),
        ]

    def _rows_of_tensors(self, slots: Sequence[Slot], extra: list[Tensor]) -> list[Row]:
        """Where tensors lie, and what they are like."""
        held = [tensor for slot in slots for tensor in tensor_leaves(slot.get())]
        grads = [local(grad) for grad in self._grads if grad is not None]
        tensors = list({id(tensor): tensor for tensor in [*held, *extra, *grads]}.values())
        self.compared = frozenset(map(id, tensors))
        """Tensors of which everything is compared, by identity."""
        sharded = [value for value in (*(slot.get() for slot in slots), *self._grads) if is_sharded(value)]
        return [*_rows_of_shards(sharded), row_of(tensors, placed=True)]

    def gradients_fit(self) -> bool:
        """Return True if gradients exist where the program reads them, and are None where it makes new ones."""
        fit = all((p.grad is None) == (g is None) for p, g in zip(self._grad_params, self._grads, strict=True))
        return fit and self._shown.gradients_are_there()

    def hold(self) -> bool:
        """Return True if nothing has changed."""
        return _hold(self._checks)

    def structure_holds(self) -> bool:
        """Return True if containers and Python values are unchanged, so that slots are found without a walk."""
        return _hold(self._structure)

    def changed_structure(self) -> str | None:
        """The first layer, parameter or buffer that came, went or was replaced, described."""
        for container, key, child in self._links:
            if isinstance(child, Module) and Slot(container, key).get() is not child:
                return f"the {type(child).__name__} {key!r} was replaced or removed"
        for container, key, child in self._shared:
            if Slot(container, key).get() is not child:
                return f"{key!r} was one of several names of a {type(child).__name__}, and is not now"
        for parts, name in self._missing:
            if parts.get(name) is not None:
                return f"{name!r} was None at capture and is there now"
        for thing, kind in zip(self._things, self._types, strict=True):
            if type(thing) is not kind:
                return f"an object was a {kind.__name__} at capture and is a {type(thing).__name__} now"
        for (path, inner), count in zip(self._marked, self._marks, strict=True):
            if len(inner) != count:
                return f"{path} had {count} attributes of its own at capture and has {len(inner)} now"
        return None

    @property
    def values(self) -> dict[str, Any]:
        """The Python values that the program was captured with, by path."""
        return dict(zip(self._labels, chain(*self._values), strict=True))


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
        single = [(metadata, slot) for metadata, slot in found if isinstance(metadata, TensorMetadata)]
        self._others = [(metadata, slot) for metadata, slot in found if not isinstance(metadata, TensorMetadata)]
        self._metadata, self._single = [metadata for metadata, _ in single], [slot for _, slot in single]
        self._kinds = [metadata.kind for metadata in self._metadata]
        self._facts: Any = None

    def hold(self) -> bool:
        """Return True if all tensors exist and have the properties that they had."""
        if not self._is_whole or not self.gradients_are_there():
            return False
        tensors = [slot.get() for slot in self._single]
        if self._facts is None or list(map(type, tensors)) != self._kinds or not self._facts.fit(tensors):
            if not all(map(same_value, self._metadata, map(metadata_of, tensors))):
                return False
            self._facts = facts_of(tensors, placed=False)
        return all(is_alike(metadata, metadata_of(slot.get())) for metadata, slot in self._others)

    def gradients_are_there(self) -> bool:
        """Return True if the gradients exist whose existence alone the code reads."""
        return all(slot.param.grad is not None for slot in self.slots if slot.param is not None)


def _rows_of_shards(sharded: list[Any]) -> list[Row]:
    """A comparison that holds while DTensors have the shards that they had. It does not refer to the guards, which
    would then keep the owners' tensors until the next garbage collection: whether a tensor's memory is used elsewhere
    is told from how many tensors have it.
    """
    shards = list(map(local, sharded))
    return [("same_results", [lambda: not any(map(is_not, map(local, sharded), shards))], [True])] if sharded else []


def _row_of_comparisons(compared: _Scalars, known: list[Any], reads: Reads) -> Row:
    """A comparison that holds while the step's comparisons of numbers come out as they did for the ``known`` ones,
    which are then those of now.
    """
    made = [reads.comparisons[path] for path, _ in compared]

    def hold() -> bool:
        now = [value.get() for _, value in compared]
        if now != known:
            if not all(map(come_out_alike, made, known, now)):
                return False
            known[:] = now
        return True

    return ("same_results", [hold] if compared else [], [True] if compared else [])


def _hold(checks: Any) -> bool:
    try:
        return bool(checks.hold())
    except (KeyError, IndexError, RuntimeError, AttributeError):
        # A key that is gone, or a Python value that became a tensor.
        return False


def _used_links(walk: Walk, plan: Plan, *containers: Iterable[Any]) -> list[Place]:
    """Links to modules, and to what holds anything that the program uses, counts or fills, directly or further down.

    Others may come and go: a scheduler's list of rates is another one after each step.
    """
    used = {id(home(container)) for group in containers for container in group}
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


def _with_other_names(links: Iterable[Place]) -> list[Place]:
    """Links to containers that others of ``links`` lead to, too: what is in them was found by one of these names."""
    containers = [link for link in links if not isinstance(link[2], Tensor | Module)]
    names = Counter(id(child) for _, _, child in containers)
    return [link for link in containers if names[id(link[2])] > 1]


def _rows_of_places(places: list[Place]) -> list[Row]:
    """Comparisons of what lies in containers."""
    whole, places = _take_whole(places)
    # Reading a missing key of a defaultdict would make it: dictionaries are asked by their own get.
    in_dicts = _columns(place for place in places if isinstance(place[0], dict))
    in_others = _columns(place for place in places if not isinstance(place[0], dict))
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


def _columns(rows: Iterable[tuple[Any, Any, Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    kept = list(rows)
    return [row[0] for row in kept], [row[1] for row in kept], [row[2] for row in kept]
