"""Which numbers the step's code only compares, and with what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import CodeType
from typing import Any

from graphplan.compiler.effects import is_allowed
from graphplan.owners import Namespace, Numbers, Scalar, Walk, attributes_of
from graphplan.tracer import Trace, same_value
from graphplan.tracer.comparisons import NUMBERS, Attribute, Comparison, comparisons_in

_Codes = dict[tuple[int, int], tuple[CodeType, int]]


def find_comparisons(
    first: Trace, second: Trace, walk: Walk, allow: Iterable[str]
) -> dict[str, tuple[Comparison, ...]]:
    """By path, the comparisons with each number among the owners' values with which code does nothing else."""
    if first.reads.dynamic or second.reads.dynamic:
        return {}
    found = {}
    codes: _Codes = {(id(c), owner): (c, owner) for trace in (first, second) for c, owner in trace.reads.codes}
    for path, scalar in walk.scalars.items():
        if type(first.entry_scalars.get(path)) not in NUMBERS or not _is_attribute(scalar):
            continue
        own = {code for trace in (first, second) for code in trace.reads.methods_on.get(id(scalar.owner), ())}
        comparisons = _comparisons_with(scalar, codes, own)
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


def _comparisons_with(scalar: Scalar, codes: _Codes, own: Iterable[CodeType]) -> list[tuple[Comparison, int]] | None:
    """The comparisons of all code, each with the id of the object whose method makes it; None if some code does more:
    that of the user and of packages with any object's attribute, that of libraries with its own ``self``'s.
    """
    name = scalar.attribute
    found: list[tuple[Comparison, int]] = []
    loads = False
    for code, owner in codes.values():
        if name in code.co_names or name in code.co_consts:
            comparisons = comparisons_in(code, name)
            if comparisons is None:
                return None
            loads = True
            found += [(comparison, owner) for comparison in comparisons]
    for code in own:
        comparisons = comparisons_in(code, name, of_self=True) if name in code.co_names else frozenset()
        if comparisons is None:
            return None
        found += [(comparison, id(scalar.owner)) for comparison in comparisons]
    return found if loads else None


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
