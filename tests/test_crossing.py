"""Parts of crossings hold what they are said to hold."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product
from math import prod

import pytest

from tests.crossing import all_pairs, by_key, each, each_once, pairs

LENGTHS = [(3,), (3, 2), (2, 2, 3), (6, 3, 2, 2), (4, 4), (25, 2, 2), (18, 6)]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_value_is_in_a_case(lengths: tuple[int, ...], times: int) -> None:
    cases = each_once(lengths, times)
    assert len(cases) == min(max(lengths) * times, prod(lengths))
    for number, length in enumerate(lengths):
        assert {case[number] for case in cases} == set(range(length))


def test_columns_of_one_length_do_not_always_meet_alike() -> None:
    assert len({case[1:] for case in each_once((25, 2, 2))}) == 4
    assert len(each_once((18, 6), times=2)) == 36


@pytest.mark.parametrize("lengths", LENGTHS[1:], ids=str)
def test_every_two_values_are_in_a_case(lengths: tuple[int, ...]) -> None:
    cases = all_pairs(lengths)
    assert len(set(cases)) == len(cases)
    for first, second in combinations(range(len(lengths)), 2):
        found = {(case[first], case[second]) for case in cases}
        assert found == set(product(range(lengths[first]), range(lengths[second])))


def test_pairs_are_far_fewer_than_the_product() -> None:
    assert len(all_pairs((6, 3, 2, 2))) <= 20


def test_cases_are_named_and_marked() -> None:
    skipped = pytest.param(2, id="two", marks=pytest.mark.skip)
    (single, double) = each(name=by_key({"a": 1, "b": 2}), other=[len, skipped]).args[1]
    assert (single.values, single.id) == ((1, len), "a-len")
    assert (double.values, double.id, len(double.marks)) == ((2, 2), "b-two", 1)
    assert len(pairs(x=[1, 2], y=[True, None]).args[1]) == 4


def test_ids_have_no_addresses() -> None:
    """Processes that share tests out have to agree on their names."""
    cases = each(make=[lambda: 1, partial(_named), _named, {"a": 1}]).args[1]
    assert [case.id for case in cases] == ["make0", "make1", "named", "{'a': 1}"]


def _named() -> None:
    """Has a name."""
