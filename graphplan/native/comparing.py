"""Comparisons of many things at once, by identity: in C++ where that was built, else by Python's own C loops.

Both say the same; see :mod:`graphplan.native.building`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import contains, getitem, is_not
from typing import Any

from graphplan.native.building import load


def _same_items(containers: Sequence[Any], keys: Sequence[Any], values: Sequence[Any]) -> bool:
    """Whether ``container[key]`` is still the value, everywhere."""
    return not any(map(is_not, map(getitem, containers, keys), values))


def _same_attributes(things: Sequence[Any], names: Sequence[str], values: Sequence[Any]) -> bool:
    """Whether the attribute of that name is still the value, everywhere."""
    return not any(map(is_not, map(getattr, things, names), values))


def _same_values(dicts: Sequence[dict[Any, Any]], keys: Sequence[Any], values: Sequence[Any]) -> bool:
    """Whether what the dictionaries themselves hold is still the value, None if nothing."""
    return not any(map(is_not, map(dict.get, dicts, keys), values))


def _none_there(dicts: Sequence[dict[Any, Any]], keys: Sequence[Any]) -> bool:
    """Whether no dictionary has its key."""
    return not any(map(contains, dicts, keys))


def _same_types(things: Sequence[Any], types: Sequence[type]) -> bool:
    """Whether everything is of its type."""
    return not any(map(is_not, map(type, things), types))


def _same_lengths(containers: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Whether everything has its length."""
    return list(map(len, containers)) == lengths


_built: Any = load()
same_items = getattr(_built, "same_items", _same_items)
same_attributes = getattr(_built, "same_attributes", _same_attributes)
same_values = getattr(_built, "same_values", _same_values)
none_there = getattr(_built, "none_there", _none_there)
same_types = getattr(_built, "same_types", _same_types)
same_lengths = getattr(_built, "same_lengths", _same_lengths)
Tensors: Any = getattr(_built, "Tensors", None)
"""``Tensors(list, placed).fit(list)``: types, dtypes, devices, shapes, strides and ``requires_grad`` of dense tensors,
and their addresses if ``placed``. None where it was not built.
"""


def facts_of(tensors: Sequence[Any], *, placed: bool) -> Any:
    """``Tensors`` of these; None if they cannot be compared so."""
    if Tensors is None:
        return None
    try:
        return Tensors(list(tensors), placed)
    except (TypeError, RuntimeError):
        # Sparse and nested tensors, and wrappers such as DTensor.
        return None
