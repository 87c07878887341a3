"""Which numbers the step's code only compares, and with what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from types import CodeType
from typing import Any

from graphplan.effects.allowed import is_allowed
from graphplan.observe.comparisons import NUMBERS, Attribute, Comparison, comparisons_in
from graphplan.owners.slots import Namespace, Scalar, Walk
from graphplan.owners.views import Numbers, attributes_of
from graphplan.trace.changes import same_value
from graphplan.trace.records import Trace

_Codes = dict[tuple[int, int], tuple[CodeType, int]]
_Found = list[tuple[Comparison, int]]


def find_comparisons(
    first: Trace, second: Trace, walk: Walk, allow: Iterable[str]
) -> dict[str, tuple[Comparison, ...]]:
    """By path, the comparisons with each number among the owners' values with which code does nothing else."""
    if first.reads.dynamic or second.reads.dynamic:
        return {}
    found = {}
    codes: _Codes = {(id(c), owner): (c, owner) for trace in (first, second) for c, owner in trace.reads.codes}
    of_all = cache(partial(_comparisons_of_all, codes=list(codes.values())))
    for path, scalar in walk.scalars.items():
        if type(first.entry_scalars.get(path)) not in NUMBERS or not _is_attribute(scalar):
            continue
        methods = [code for trace in (first, second) for code in trace.reads.methods_on.get(id(scalar.owner), ())]
        comparisons = _comparisons_with(scalar, of_all(scalar.attribute), methods)
        if comparisons is not None:
            found[path] = comparisons
    others = {
        (id(scalar.owner), scalar.attribute): second.entry_scalars[path]
        for path, scalar in walk.scalars.items()
        if path in second.entry_scalars
        and _is_attribute(scalar)
        and not is_allowed(path, allow)
        and same_value(first.entry_scalars.get(path), second.entry_scalars[path])
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
