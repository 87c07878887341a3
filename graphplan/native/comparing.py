"""Comparisons of many things at once, by identity: in C++ where that was built, else by Python's own C loops.

Both say the same; see :mod:`graphplan.native.building`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, contains, getitem, is_not, mod
from typing import Any

from torch import Tensor

from graphplan.native.building import load

Row = tuple[Any, ...]
"""The name of a comparison, and what it compares: lists of one length."""
_keys = dict.__iter__
_identity_of = attrgetter("_cdata")


def _same_items(containers: Sequence[Any], keys: Sequence[Any], values: Sequence[Any]) -> bool:
    """Whether ``container[key]`` is still the value, everywhere."""
    return not any(map(is_not, map(getitem, containers, keys), values))


def _equal_items(
    containers: Sequence[Any], keys: Sequence[Any], values: list[Any], equal: Callable[[Any, Any], bool]
) -> bool:
    """Whether ``container[key]`` is still as good as the value, everywhere; ``values`` are then what was found."""
    return _are_equal(list(map(getitem, containers, keys)), values, equal)


def _equal_attributes(
    things: Sequence[Any], names: Sequence[str], values: list[Any], equal: Callable[[Any, Any], bool]
) -> bool:
    """:func:`_equal_items` of attributes."""
    return _are_equal(list(map(getattr, things, names)), values, equal)


def _are_equal(now: list[Any], values: list[Any], equal: Callable[[Any, Any], bool]) -> bool:
    if any(map(is_not, now, values)):
        if not all(map(equal, now, values)):
            return False
        values[:] = now
    return True


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


def contents_of(containers: Sequence[Any]) -> list[Row]:
    """Comparisons of all that dictionaries and lists hold now."""
    dicts = [container for container in containers if isinstance(container, dict)]
    lists = [container for container in containers if isinstance(container, list)]
    keys, values = list(chain.from_iterable(map(_keys, dicts))), list(chain.from_iterable(map(dict.values, dicts)))
    return [
        ("same_dicts", dicts, list(map(len, dicts)), keys, values),
        ("same_lists", lists, list(map(len, lists)), list(chain.from_iterable(lists))),
    ]


def _same_dicts(
    dicts: Sequence[dict[Any, Any]], lengths: Sequence[int], keys: Sequence[Any], values: Sequence[Any]
) -> bool:
    """Whether dictionaries hold what they held: so many items each, all keys in order, all values in order."""
    return (
        list(map(len, dicts)) == lengths
        and not any(map(is_not, chain.from_iterable(map(dict.values, dicts)), values))
        and not any(map(is_not, chain.from_iterable(map(_keys, dicts)), keys))
    )


def _same_lists(lists: Sequence[list[Any]], lengths: Sequence[int], items: Sequence[Any]) -> bool:
    """Whether lists hold what they held: so many items each, all of them in order."""
    return list(map(len, lists)) == lengths and not any(map(is_not, chain.from_iterable(lists), items))


def _same_results(functions: Sequence[Callable[[], Any]], results: Sequence[Any]) -> bool:
    """Whether what every function says equals its result."""
    return all(function() == result for function, result in zip(functions, results, strict=True))


def _fit(tensors: Sequence[Any], facts: Any) -> bool:
    """Whether tensors are what ``facts``, made by :func:`facts_of`, say of them."""
    return bool(facts.fit(tensors))


_KINDS: dict[str, Callable[..., bool]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        _same_items, _equal_items, _same_attributes, _equal_attributes, _same_values, _none_there,
        _same_types, _same_lengths, _same_dicts, _same_lists, _same_results, _fit,
    )
}  # fmt: skip


class _Checks:
    """Many comparisons in one call. Each row names one of the functions above, and has what it takes; the lists stay
    the caller's, who may write to them.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = [(_KINDS[name], parts) for name, *parts in rows]

    def hold(self) -> bool:
        """Whether all of them say yes.

        Raises:
            KeyError, IndexError, AttributeError: where something is gone.
        """
        return all(compare(*parts) for compare, parts in self._rows)


def _lie(tensors: list[Tensor], units: list[int], rests: list[int], written: set[Any]) -> bool:
    """Whether the addresses of dense ``tensors`` leave these ``rests`` when divided by ``units``, and none of them lies
    in memory whose storage is among those ``written``.
    """
    if list(map(mod, map(Tensor.data_ptr, tensors), units)) != rests:
        return False
    return written.isdisjoint(map(_identity_of, map(Tensor.untyped_storage, tensors)))


_built: Any = load()
lie: Callable[[list[Tensor], list[int], list[int], set[Any]], bool] = getattr(_built, "lie", _lie)
Checks: type[_Checks] = getattr(_built, "Checks", _Checks)
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
