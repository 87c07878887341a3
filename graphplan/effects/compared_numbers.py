"""Which numbers the step's code only compares, and with what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from inspect import getattr_static
from types import CodeType
from typing import Any

from graphplan.effects.trace_pair import TracePair
from graphplan.environment.origin import is_library
from graphplan.observe.comparisons import COMPARABLE, NUMBERS, Comparison, Reference, comparisons_in
from graphplan.owners.slots import Namespace, Scalar
from graphplan.owners.views import Numbers, attributes_of
from graphplan.trace.changes import same_value


def find_comparisons(pair: TracePair) -> dict[str, tuple[Comparison, ...]]:
    """By path, the comparisons with each number among the owners' values with which code does nothing else."""
    if any(trace.reads.dynamic for trace in pair.both):
        return {}
    before, now = (trace.entry_scalars for trace in pair.both)
    attributes = {path: scalar for path, scalar in pair.walk.scalars.items() if _is_attribute(scalar)}
    objects = _Objects(attributes)

    def number_at(owner: int, names: tuple[str, ...]) -> Any:
        """The number to which ``names`` lead from an object, if it stays; None if that is not known."""
        for path in objects.paths(owner, names):
            if path in now and not pair.allows(path) and same_value(before.get(path), now[path]):
                return now[path]
        return None

    codes = {(id(code), owner): (code, owner) for trace in pair.both for code, owner in trace.reads.codes}
    of_all = cache(partial(_comparisons_in, codes.values()))
    found = {}
    for path, scalar in attributes.items():
        # What no code of the user's or of packages names is no number that is only compared. Of truth values those that
        # an object computes are asked for each time; others are compared faster by value.
        kinds = COMPARABLE if type(scalar.container) is Numbers else NUMBERS
        made = of_all(scalar.attribute) if type(before.get(path)) in kinds else None
        if made is not None:
            own = {id(code): code for trace in pair.both for code in trace.reads.methods_on.get(id(scalar.owner), ())}
            methods = [(code, id(scalar.owner)) for code in own.values() if scalar.attribute in code.co_names]
            more = _comparisons_in(methods, scalar.attribute, of_self=True) if methods else []
            comparisons = None if more is None else _with_numbers([*made, *more], number_at)
            if comparisons is not None:
                found[path] = comparisons
    return found


def _is_attribute(scalar: Scalar) -> bool:
    """Return True if the number is an attribute's value itself, not in something that the attribute leads to."""
    if isinstance(scalar.owner, Namespace) or scalar.name is not None or scalar.key != scalar.attribute:
        return False
    return type(scalar.container) is Numbers or scalar.container is attributes_of(scalar.owner)


def _comparisons_in(
    codes: Iterable[tuple[CodeType, int]], name: str, *, of_self: bool = False
) -> list[tuple[Comparison, int]] | None:
    """The comparisons with any object's attribute ``name``, or that of ``self``, each with the id of the object whose
    method makes it. None if one of the codes does more, or none of them names it.
    """
    naming = [(code, owner) for code, owner in codes if name in code.co_names or name in code.co_consts]
    made = [(comparisons_in(code, name, of_self=of_self), owner) for code, owner in naming]
    if not made or any(comparisons is None for comparisons, _ in made):
        return None
    return [(comparison, owner) for comparisons, owner in made for comparison in comparisons or ()]


def _with_numbers(
    comparisons: Iterable[tuple[Comparison, int]], number_at: Callable[[int, tuple[str, ...]], Any]
) -> tuple[Comparison, ...] | None:
    """The comparisons with the numbers that they name, which are guarded; None if one is not known."""
    found = []
    for comparison, owner in comparisons:

        def number(other: Any, owner: int = owner) -> Any:
            return number_at(owner, other.names) if isinstance(other, Reference) else other

        steps = tuple((symbol, number(operand)) for symbol, operand in comparison.steps)
        made = replace(comparison, other=number(comparison.other), steps=steps)
        named = [made.other] if isinstance(comparison.other, Reference) else []
        if any(type(value) not in NUMBERS for value in (*named, *(operand for _, operand in steps))):
            return None
        if any(symbol in ("%", "//") and operand == 0 for symbol, operand in steps):
            return None
        found.append(made)
    return tuple(dict.fromkeys(found))


class _Objects:
    """The objects that have ``attributes``, by identity, and how the paths of what they lead to begin."""

    def __init__(self, attributes: Mapping[str, Scalar]) -> None:
        self._found: dict[int, tuple[Any, set[str]]] = {}
        for path, scalar in attributes.items():
            thing = scalar.container.thing if type(scalar.container) is Numbers else scalar.owner
            self._found.setdefault(id(thing), (thing, set()))[1].add(path.removesuffix(scalar.attribute))

    def paths(self, owner: int, names: Sequence[str]) -> Iterator[str]:
        """The paths of what ``names`` lead to from an object, which may be an owner of its own (the Trainer)."""
        thing, homes = self._found.get(owner, (None, set[str]()))
        first, *others = names
        # A property of Lightning's or torch's gives what lies in an attribute with an underscore before its name.
        known = (first, f"_{first}") if _is_librarys_property(type(thing), first) else (first,)
        for name in known:
            for home in homes:
                yield home + ".".join((name, *others))
            behind = (attributes_of(thing) or {}).get(name)
            if others and id(behind) in self._found:
                yield from self.paths(id(behind), others)


def _is_librarys_property(kind: type, name: str) -> bool:
    found: Any = getattr_static(kind, name, None)
    code = getattr(found.fget, "__code__", None) if isinstance(found, property) else None
    return code is not None and is_library(code.co_filename)
