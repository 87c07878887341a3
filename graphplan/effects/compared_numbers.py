"""Which numbers the step's code only compares, and with what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from types import CodeType
from typing import Any

from graphplan.effects.trace_pair import TracePair
from graphplan.observe.comparisons import NUMBERS, Attribute, Comparison, comparisons_in
from graphplan.owners.slots import Namespace, Scalar
from graphplan.owners.views import Numbers, attributes_of
from graphplan.trace.changes import same_value

_Codes = dict[tuple[int, int], tuple[CodeType, int]]
_Found = list[tuple[Comparison, int]]


def find_comparisons(pair: TracePair) -> dict[str, tuple[Comparison, ...]]:
    """By path, the comparisons with each number among the owners' values with which code does nothing else."""
    if any(trace.reads.dynamic for trace in pair.both):
        return {}
    found = {}
    before, now = (trace.entry_scalars for trace in pair.both)
    codes: _Codes = {(id(c), owner): (c, owner) for trace in pair.both for c, owner in trace.reads.codes}
    of_all = cache(partial(_comparisons_of_all, codes=list(codes.values())))
    attributes = {path: scalar for path, scalar in pair.walk.scalars.items() if _is_attribute(scalar)}
    for path, scalar in attributes.items():
        if type(before.get(path)) not in NUMBERS:
            continue
        methods = [code for trace in pair.both for code in trace.reads.methods_on.get(id(scalar.owner), ())]
        comparisons = _comparisons_with(scalar, of_all(scalar.attribute), methods)
        if comparisons is not None:
            found[path] = comparisons
    others = {
        (id(scalar.owner), scalar.attribute): now[path]
        for path, scalar in attributes.items()
        if path in now and not pair.allows(path) and same_value(before.get(path), now[path])
    }
    resolved = {path: _with_numbers(comparisons, others) for path, comparisons in found.items()}
    return {path: comparisons for path, comparisons in resolved.items() if comparisons is not None}


def _is_attribute(scalar: Scalar) -> bool:
    """Return True if the number is an attribute's value itself, not in something that the attribute leads to."""
    if isinstance(scalar.owner, Namespace) or scalar.name is not None or scalar.key != scalar.attribute:
        return False
    if type(scalar.container) is Numbers:
        return True
    inner = attributes_of(scalar.owner)
    return inner is not None and inner.get(scalar.attribute) is scalar.get()


def _comparisons_of_all(name: str, codes: Iterable[tuple[CodeType, int]]) -> _Found | None:
    """The comparisons that code of the user and of packages makes with any object's attribute of that name, each with
    the id of the object whose method makes it; None if there is none such, or it does more.
    """
    found: list[tuple[Comparison, int]] | None = None
    for code, owner in codes:
        if name in code.co_names or name in code.co_consts:
            comparisons = comparisons_in(code, name)
            if comparisons is None:
                return None
            found = [*(found or ()), *((comparison, owner) for comparison in comparisons)]
    return found


def _comparisons_with(scalar: Scalar, of_all: _Found | None, methods: Iterable[CodeType]) -> _Found | None:
    """The comparisons of all code, methods of libraries with their own attributes; None if some code does more."""
    if of_all is None:
        return None
    found, name = list(of_all), scalar.attribute
    for code in {id(code): code for code in methods if name in code.co_names}.values():
        comparisons = comparisons_in(code, name, of_self=True)
        if comparisons is None:
            return None
        found += [(comparison, id(scalar.owner)) for comparison in comparisons]
    return found


def _with_numbers(
    comparisons: Iterable[tuple[Comparison, int]], numbers: dict[tuple[int, str], Any]
) -> tuple[Comparison, ...] | None:
    """The comparisons with the values of the attributes that they name, which are guarded; None if one is not known."""
    found = []
    for comparison, owner in comparisons:
        other = comparison.other
        if isinstance(other, Attribute):
            other = numbers.get((owner, other.name))
            if type(other) not in NUMBERS:
                return None
        found.append(replace(comparison, other=other))
    return tuple(dict.fromkeys(found))
