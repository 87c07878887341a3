"""Cases of tests with several parameters, where the full product would hold nothing that a part of it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from math import lcm
from typing import Any

import pytest

Indices = tuple[int, ...]


def each_once(lengths: Sequence[int], times: int = 1) -> list[Indices]:
    """Every index of every column in at least one case: ``times`` as many cases as the longest column is long.

    A column moves on by one when it and the shorter ones begin anew together, so that equal ones meet in other ways.
    """
    columns: dict[int, list[int]] = {}
    period = 1
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[number]
        period = lcm(period, length)
        moves = bool(columns)
        columns[number] = [(row + moves * (row // period)) % length for row in range(max(lengths) * times)]
    return list(dict.fromkeys(zip(*(columns[number] for number in range(len(lengths))), strict=True)))


def all_pairs(lengths: Sequence[int]) -> list[Indices]:
    """Every two indices of two columns together in at least one case: pairwise testing.

    Greedy: the next case is the one of the full product that has most of the pairs that are missing.
    """
    cases = list(product(*map(range, lengths)))
    pairs_of = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs_of.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing & pairs_of[case]))
        missing -= pairs_of[best]
        chosen.append(best)
    return sorted(chosen)


def each(*, times: int = 1, indirect: Sequence[str] = (), **values: Iterable[Any]) -> pytest.MarkDecorator:
    """``parametrize`` with :func:`each_once`, where what may fail depends on one of the parameters."""
    columns = _columns(values)
    return _parametrize(columns, each_once([*map(len, columns.values())], times), indirect)


def pairs(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """``parametrize`` with :func:`all_pairs`, where what may fail depends on two of the parameters."""
    columns = _columns(values)
    return _parametrize(columns, all_pairs([*map(len, columns.values())]), ())


def by_key(values: Mapping[str, Any]) -> list[Any]:
    """The values of a mapping as parameters that are named by their keys."""
    return [pytest.param(value, id=key) for key, value in values.items()]


def _columns(values: dict[str, Iterable[Any]]) -> dict[str, list[Any]]:
    return {
        name: [_as_parameter(value, f"{name}{number}") for number, value in enumerate(column)]
        for name, column in values.items()
    }


def _as_parameter(value: Any, place: str) -> Any:
    """``value`` with an id that is the same in each process: a name, a text without addresses, or its place."""
    if isinstance(value, type(pytest.param())):
        return value
    text = getattr(value, "__name__", str(value)).strip("_")
    return pytest.param(value, id=place if "<lambda>" in text or " at 0x" in text else text[:40])


def _parametrize(columns: dict[str, list[Any]], cases: list[Indices], indirect: Sequence[str]) -> pytest.MarkDecorator:
    rows = []
    for case in cases:
        parameters = [column[index] for column, index in zip(columns.values(), case, strict=True)]
        values = [value for parameter in parameters for value in parameter.values]
        marks = [mark for parameter in parameters for mark in parameter.marks]
        rows.append(pytest.param(*values, id="-".join(str(parameter.id) for parameter in parameters), marks=marks))
    return pytest.mark.parametrize(tuple(columns), rows, indirect=list(indirect))
