"""Guards: before every replay, one call compares prebuilt flat lists with the current state. They compare the items of
containers by identity, Python values that the step's code reads, and the addresses of adopted memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_not
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphplan.compare.comparing import Checks, Row, contents_of, facts_of, row_of, rows_of
from graphplan.observe.host_draws import peek
from graphplan.owners.slots import Item, Scalar, Slot, Walk, is_optimizer_state, item_by_attribute, tensor_leaves
from graphplan.owners.tensor_metadata import TensorMetadata, metadata_of
from graphplan.owners.views import CallNumbers, ComputedItem, attributes_of, extent, home
from graphplan.plan.plan import Plan
from graphplan.specs.paths import Path
from graphplan.tensors.dtensors import is_sharded, local
from graphplan.tensors.symbolic import answers_hold
from graphplan.trace.changes import is_alike, same_value

_MISSED = (LookupError, RuntimeError, AttributeError, TypeError, ArithmeticError)
"""Errors of a lookup if a key is gone, a Python value became a tensor, or a number became something else."""
Place = tuple[Any, Any, Any]
"""A container, a key in it, and the value there."""


class Guards:
    """The guards of one program: for ``slots`` and ``extra`` tensors that it adopted, the links of ``walk``, and Python
    values by path, compared with ``values`` from the capture or else with the current ones. ``entry_grads`` are the
    gradients that the step accumulates into, by path. ``moving`` are paths of values in lists and dictionaries that
    were replaced by others with the same items. ``like`` are earlier guards for the same walk.
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
        moving: Collection[str] = (),
        like: Guards | None = None,
    ) -> None:
        slots = [slot for slot in slots if slot.param is None]
        read = {path: value for path in plan.reads.values if (value := walk.value(path)) is not None}
        self.values = {path: values[path] if path in values else value.get() for path, value in read.items()}
        """The Python values that the program was captured with, by path."""
        asked = {path for question in plan.reads.questions for path in question.paths}
        symbolic = {path: item_by_attribute(place) for path in plan.symbolic if (place := walk.value(path)) is not None}
        # Numbers given as arguments are always integers: only their branches are guarded.
        symbolic = {
            path: place for path, place in symbolic.items() if path in asked or type(place.container) is not CallNumbers
        }
        self._shown = _Metadata(plan.reads.metadata, walk)
        self.ask: Callable[[], bool] | None = None
        """Return True if the step would take the recorded branches with the owners' current numbers."""
        # For lists that each step may replace, `ask` compares lengths together with the values.
        fixed = {path: item_by_attribute(place) for path, place in read.items() if path in moving}
        lists = {id(place.items) for place in (*symbolic.values(), *fixed.values()) if isinstance(place, Item)}
        told = [path for path, place in read.items() if isinstance(place.container, ComputedItem)]
        others = {path for path in told if id(home(read[path].container)) in lists}
        read = {path: place for path, place in read.items() if path not in others and path not in fixed}
        used = (*slots, *self._shown.slots, *read.values(), *symbolic.values(), *fixed.values())
        containers = [place.container for place in used]
        self._links: _Links = _Links(walk, plan, containers) if like is None else like._links
        self.renewed, self._structure_places = self._links.renewed, self._links.places
        # Classes of modules are part of the program's key.
        self._types = [(thing, type(thing)) for thing, _ in walk.attributes if not issubclass(type(thing), Module)]
        params = [(path, param) for path, param in walk.parameters.values() if path in plan.entry_grads]
        self._grads = [(param, entry_grads.get(Path.gradient(path))) for path, param in params]
        structure = rows_of([
            *(("same_types", *pair) for pair in self._types),
            *(row for path, source in read.items() for row in source.rows(self.values[path])),
        ])  # fmt: skip
        structure = [(*row, same_value) if row[0].startswith("equal") else row for row in structure]
        asking: list[Row] = []
        if symbolic or fixed or plan.drawn or not plan.symbolic.keys() <= walk.scalars.keys():
            pairs = [(place, self.values[path]) for path, place in fixed.items()]
            self.ask = _asking(plan, symbolic, pairs, walk)
            asking = [("same_results", [self.ask], [True])]
        places = [*((slot.container, slot.key, slot.get()) for slot in slots), *self._structure_places]
        self.rows: list[Row] = [
            *_rows_of_places(places),
            *structure,
            *rows_of(("same_attributes", param, "grad", grad) for param, grad in self._grads),
            *self._rows_of_tensors(slots, list(extra)),
            *([("same_results", [self._shown.hold], [True])] if plan.reads.metadata else []),
        ]
        """All comparisons except :attr:`ask`."""
        self._checks = Checks([*asking, *self.rows])
        self._structure = Checks([*_rows_of_places(self._structure_places), *structure, *asking])

    def _rows_of_tensors(self, slots: Sequence[Slot], extra: list[Tensor]) -> list[Row]:
        """Return comparisons of addresses and geometry; only of addresses for optimizer state, whose geometry stays."""
        grads = [grad for _, grad in self._grads]
        held = {id(tensor): tensor for tensor in (*extra, *(local(grad) for grad in grads if grad is not None))}
        state: dict[int, Tensor] = {}
        for slot in slots:
            found = state if is_optimizer_state(slot.path) else held
            found.update((id(tensor), tensor) for tensor in tensor_leaves(slot.get()))
        tensors, lying = list(held.values()), [tensor for tensor in state.values() if id(tensor) not in held]
        self.compared = frozenset(held)
        """The ids of tensors whose address and geometry are both compared."""
        sharded = [value for value in (*(slot.get() for slot in slots), *grads) if is_sharded(value)]
        return [*_rows_of_shards(sharded), row_of(tensors, placed=True), row_of(lying, placed=True, alone=True)]

    def gradients_fit(self) -> bool:
        """Return True if gradients exist that the program reads, and are None where it makes new ones."""
        fit = all((param.grad is None) == (grad is None) for param, grad in self._grads)
        return fit and self._shown.gradients_are_there()

    def hold(self) -> bool:
        """Return True if nothing has changed."""
        return holds(self._checks)

    def structure_holds(self) -> bool:
        """Return True if containers and Python values are unchanged, so that slots need no new walk."""
        return holds(self._structure)

    def changed_structure(self) -> str | None:
        """Describe the first layer, parameter or buffer that was added, removed or replaced."""
        for container, key, child in self._structure_places:
            if Slot(container, key).get() is child:
                continue
            if child is None:
                return f"{key!r} was None at capture and is there now"
            if isinstance(child, Module):
                return f"the {type(child).__name__} {key!r} was replaced or removed"
            if self._links.names[id(child)] > 1 and self._are_split(child):
                return f"{key!r} was one of several names of a {type(child).__name__}, and is not now"
        for thing, kind in self._types:
            if type(thing) is not kind:
                return f"an object was a {kind.__name__} at capture and is a {type(thing).__name__} now"
        return None

    def _are_split(self, child: Any) -> bool:
        """Return True if the names of a container now lead to different objects."""
        numbers = [number for number, (_, _, held) in enumerate(self._structure_places) if held is child]
        return len({id(self._held_now(number)) for number in numbers}) > 1

    def _held_now(self, number: int) -> Any:
        """Return what the place with this number holds now, in the container that has replaced that of the capture if
        the step makes both anew. Outer containers come before inner ones.
        """
        container, key, _ = self._structure_places[number]
        outer = (before for before in range(number) if self._structure_places[before][2] is container)
        return Slot(next(map(self._held_now, outer), container), key).get()


class _Links:
    """The links of a walk that a plan uses, with names without a value, and those to objects that each step renews."""

    def __init__(self, walk: Walk, plan: Plan, containers: Iterable[Any]) -> None:
        used = _used_links(walk, plan, containers)
        self.renewed = _renewed_links(walk, plan)
        self.places = [*used, *((parts, name, None) for parts, name in walk.empty.values())]
        self.names = Counter(id(child) for _, _, child in used if not isinstance(child, Tensor | Module))
        """The number of links to each container: its items were found under the name of one of them."""


class _Metadata:
    """Comparison of tensors whose metadata alone the step's code reads with their metadata in the traces (``known``,
    by path). It keeps no reference to the tensors: code may bind another one before each step.
    """

    def __init__(self, known: Mapping[str, Any], walk: Walk) -> None:
        found = [(metadata, walk.slots[path]) for path, metadata in known.items() if path in walk.slots]
        self.slots = [slot for _, slot in found]
        self._is_whole = len(found) == len(known)
        # Single tensors are compared in one call; the rest are tuples, or tensors that only have to exist.
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
        """Return True if all gradients exist whose existence the code reads."""
        return all(slot.param.grad is not None for slot in self.slots if slot.param is not None)


def _are_alike(known: Iterable[tuple[Any, Slot]]) -> bool:
    return all(is_alike(metadata, metadata_of(slot.get())) for metadata, slot in known)


def _rows_of_shards(sharded: list[Any]) -> list[Row]:
    """Return a comparison that holds while DTensors have the same shards. It must not refer to the guards: a reference
    cycle would keep the owners' tensors until the next garbage collection, and these would count as further users of
    their memory.
    """
    shards = list(map(local, sharded))
    return [("same_results", [lambda: not any(map(is_not, map(local, sharded), shards))], [True])] if sharded else []


def _asking(
    plan: Plan, symbolic: Mapping[str, Scalar], fixed: Sequence[tuple[Scalar, Any]], walk: Walk
) -> Callable[[], bool]:
    """Return a function that returns True if numbers at ``symbolic`` places have their former classes, the step's
    branches on them have their former outcomes, and ``fixed`` places have their former values.
    """
    places, known = list(symbolic.values()), list[Any]()
    items = [place for place in (*places, *(place for place, _ in fixed)) if isinstance(place, Item)]
    sizes = [(place, extent(place.items)) for place in items]
    is_whole = plan.symbolic.keys() <= walk.scalars.keys()
    kinds, questions = [plan.symbolic[path] for path in symbolic], plan.reads.questions
    draws = plan.drawn if questions else ()

    def ask() -> bool:
        try:
            now = [place.get() for place in places]
            if not is_whole or list(map(type, now)) != kinds:
                return False
            if questions and (draws or now != known):
                if not answers_hold(questions, {**dict(zip(symbolic, now, strict=True)), **peek(draws)}):
                    return False
                known[:] = now
            is_alike = all(same_value(place.get(), value) for place, value in fixed)
            return is_alike and all(extent(place.items) == size for place, size in sizes)
        except _MISSED:
            return False

    return ask


def holds(checks: Any) -> bool:
    """Return True if the comparisons hold; False also if a container or a key is gone."""
    try:
        return bool(checks.hold())
    except _MISSED:
        return False


def _used_links(walk: Walk, plan: Plan, containers: Iterable[Any]) -> list[Place]:
    """Return the links to modules and to containers that hold, at any depth, a value that the program reads or writes.

    Other links may change: a scheduler makes a new list of learning rates after each step.
    """
    used = {id(home(container)) for container in containers}
    paths = [*plan.rebindings.paths, *plan.counters, *plan.assignments, *plan.numbers]
    used |= {id(place.container) for path in paths if (place := walk.place(path)) is not None}
    used |= {id(walk.lists[path]) for path in plan.appends if path in walk.lists}
    kept: list[Place] = []
    for container, key, child in reversed(walk.links):
        inner = attributes_of(child)
        if issubclass(type(child), Tensor | Module) or id(child) in used or (inner is not None and id(inner) in used):
            used.add(id(home(container)))
            kept.append((container, key, child))
    return kept[::-1]


def _renewed_links(walk: Walk, plan: Plan) -> list[Place]:
    """Return the links in dictionaries to objects that each step makes anew, with nothing else in or below them."""
    if not plan.renewed:
        return []
    renewed, others = set[int](), set[int]()
    for path, place in (*walk.scalars.items(), *walk.slots.items()):
        (renewed if path in plan.renewed else others).add(id(home(place.container)))
    found: list[Place] = []
    for container, key, child in reversed(walk.links):
        inner = {id(child), id(attributes_of(child))}
        if renewed.isdisjoint(inner) or not others.isdisjoint(inner):
            others.add(id(home(container)))
        elif type(container) is dict:
            found.append((container, key, child))
    return found


def _rows_of_places(places: list[Place]) -> list[Row]:
    whole, places = _take_whole(places)
    # Use `dict.get`: indexing a defaultdict would insert a missing key.
    kinds = ("same_values" if isinstance(container, dict) else "same_items" for container, _, _ in places)
    return [*contents_of(whole), *rows_of((kind, *place) for kind, place in zip(kinds, places, strict=True))]


def _take_whole(places: list[Place]) -> tuple[list[Any], list[Place]]:
    """Return dictionaries and lists with all items guarded (compared without key lookups), and the other places."""
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
