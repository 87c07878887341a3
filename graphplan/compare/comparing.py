"""Compare many values at once, by identity: in C++ if the extension was built, else by loops in Python's built-ins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from gc import get_referents
from itertools import chain
from operator import attrgetter, contains, getitem, is_not, mod
from typing import Any

from torch import Tensor

from graphplan.compare.building import load
from graphplan.compare.tensors import TorchTensors

Row = tuple[Any, ...]
"""The name of a comparison, and its arguments: mostly lists of one length."""
_PLAIN = frozenset({dict, defaultdict})
"""Dictionary classes for which the garbage collector visits the held objects, in order, and no temporary ones."""
_keys = dict.__iter__
_identity_of = attrgetter("_cdata")


def _are_same(look_up: Callable[..., Any], *columns: list[Any]) -> bool:
    """Return True if each lookup still gives the same object. The last column has the values."""
    *places, values = columns
    return not any(map(is_not, map(look_up, *places), values))


def _are_equal(look_up: Callable[..., Any], *columns: Any) -> bool:
    """Return True if each lookup gives the same object or one that ``equal`` accepts, which then replaces the value."""
    *places, values, equal = columns
    now = list(map(look_up, *places))
    if any(map(is_not, now, values)):
        if not all(map(equal, now, values)):
            return False
        values[:] = now
    return True


def contents_of(containers: Sequence[Any]) -> list[Row]:
    """Return comparisons of everything that dictionaries and lists hold now."""
    dicts = [container for container in containers if isinstance(container, dict)]
    lists = [container for container in containers if isinstance(container, list)]
    # In separate rows, because Python compares dictionaries of some classes faster.
    groups = [[one for one in dicts if (type(one) in _PLAIN) is plain] for plain in (True, False)]
    return [
        *(("same_dicts", group, *_keys_and_values(group)) for group in groups),
        ("same_lists", lists, list(map(len, lists)), list(chain.from_iterable(lists))),
    ]


def _keys_and_values(dicts: Sequence[dict[Any, Any]]) -> tuple[list[int], list[Any], list[Any]]:
    lengths = list(map(len, dicts))
    return lengths, list(chain.from_iterable(map(_keys, dicts))), list(chain.from_iterable(map(dict.values, dicts)))


def _same_dicts(
    dicts: Sequence[dict[Any, Any]], lengths: Sequence[int], keys: Sequence[Any], values: Sequence[Any]
) -> bool:
    """Return True if each dictionary has as many items as before, and the same keys and values in the same order."""
    return (
        list(map(len, dicts)) == lengths
        and not any(map(is_not, chain.from_iterable(map(dict.values, dicts)), values))
        and not any(map(is_not, chain.from_iterable(map(_keys, dicts)), keys))
    )


def _ask_dicts(
    dicts: Sequence[dict[Any, Any]], lengths: Sequence[int], keys: Sequence[Any], values: Sequence[Any]
) -> Callable[[], bool]:
    """Return a faster :func:`_same_dicts`: one call of gc lists what all dictionaries hold, except string keys."""
    slow = partial(_same_dicts, dicts, lengths, keys, values)
    visit, names = partial(get_referents, *dicts), partial(chain.from_iterable, [d for d in dicts if _is_named(d)])
    visited, named = visit(), list(names())
    unnamed = chain.from_iterable([d for d in dicts if not _is_named(d)])
    expected = set(map(id, chain(values, unnamed)))
    if not (_PLAIN.issuperset(map(type, dicts)) and slow() and expected <= set(map(id, visited))):
        return slow

    def ask() -> bool:
        now = visit()
        return (
            len(now) == len(visited)
            and list(map(len, dicts)) == lengths
            and not any(map(is_not, now, visited))
            and list(names()) == named
        )

    return ask


def _is_named(items: dict[Any, Any]) -> bool:
    return all(type(key) is str for key in items)


_LOOK_UPS: dict[str, Callable[..., Any]] = {
    # ``dict.get`` itself, not that of a subclass: it returns None for a missing key.
    "same_values": dict.get, "same_attributes": getattr, "same_types": type, "same_lengths": len,
}  # fmt: skip
"""The lookup functions of columns."""
_KINDS: dict[str, Callable[..., bool]] = {
    **{name: partial(_are_same, look_up) for name, look_up in _LOOK_UPS.items()},
    "same_items": partial(_are_same, getitem),
    "equal_items": partial(_are_equal, getitem),
    "equal_attributes": partial(_are_equal, getattr),
    "same_lengths": lambda containers, lengths: list(map(len, containers)) == lengths,
    "none_there": lambda dicts, keys: not any(map(contains, dicts, keys)),
    "same_dicts": _same_dicts,
    "same_lists": lambda lists, lengths, items: (
        list(map(len, lists)) == lengths and not any(map(is_not, chain.from_iterable(lists), items))
    ),
    "same_results": lambda functions, results: all(
        function() == result for function, result in zip(functions, results, strict=True)
    ),
}
"""The comparisons, by name."""


def rows_of(comparisons: Iterable[tuple[Any, ...]]) -> list[Row]:
    """Return one row for each kind of single comparisons: a kind, and one item for each list of the row."""
    found: dict[str, list[Any]] = {}
    for kind, *parts in comparisons:
        found.setdefault(kind, []).append(parts)
    return [(kind, *map(list, zip(*parts, strict=True))) for kind, parts in found.items()]


class Column:
    """Places of Python values that are read in one way, and compared in one row of a ``kind``. Each of ``places`` is a
    name for messages, followed by the arguments of the lookup: a container and a key, or an object alone.
    """

    def __init__(self, kind: str, places: Iterable[tuple[Any, ...]]) -> None:
        self.kind, kept = kind, list(places)
        self.paths: list[str] = [place[0] for place in kept]
        width = 2 if kind in ("same_types", "same_lengths") else 3
        self._where = [[place[number] for place in kept] for number in range(1, width)]

    def read(self) -> Iterator[Any]:
        """Return the current values."""
        return map(_LOOK_UPS[self.kind], *self._where)

    def row(self) -> Row:
        """Return a comparison that holds while the values are what they are now."""
        return (self.kind, *self._where, list(self.read()))


class _Checks:
    """Many comparisons in one call: each row names one of :data:`_KINDS`, and has its arguments. Callers may write to
    the lists, except those of ``same_dicts``, ``same_values``, ``same_lengths`` and ``none_there``: C++ caches the
    results of these until the dictionary changes.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        asked = [(name, parts) for name, *parts in rows if parts[0]]
        self._rows = [
            _ask_dicts(*parts) if name == "same_dicts" else partial(_KINDS[name], *parts) for name, parts in asked
        ]

    def hold(self) -> bool:
        return all(ask() for ask in self._rows)


def _lie(tensors: list[Tensor], units: list[int], rests: list[int], written: set[Any]) -> bool:
    """Return True if addresses of dense ``tensors`` modulo ``units`` are ``rests`` and no storage is in ``written``."""
    if list(map(mod, map(Tensor.data_ptr, tensors), units)) != rests:
        return False
    return written.isdisjoint(map(_identity_of, map(Tensor.untyped_storage, tensors)))


_built: Any = load()
lie: Callable[[list[Tensor], list[int], list[int], set[Any]], bool] = getattr(_built, "lie", _lie)
Checks: type[_Checks] = getattr(_built, "Checks", _Checks)
Tensors: Any = getattr(_built, "Tensors", None)
"""``Tensors(list, placed).fit(list)`` does the same as :class:`TorchTensors`, for dense tensors. None if not built."""


def facts_of(tensors: Sequence[Tensor], *, placed: bool, alone: bool = False) -> Any:
    """Return the properties of ``tensors``, with their addresses if ``placed``. ``facts.fit(others)`` is True if other
    tensors have the same, and False if they may differ. ``alone``: comparing only the addresses is enough.
    """
    if Tensors is not None:
        # Raised for sparse and nested tensors, and for wrappers such as DTensor.
        with suppress(TypeError, RuntimeError):
            return Tensors(list(tensors), placed, alone)
    return TorchTensors(tensors, placed)


def row_of(tensors: list[Tensor], *, placed: bool, alone: bool = False) -> Row:
    """Return a comparison that holds while ``tensors`` have the facts that :func:`facts_of` finds now."""
    facts = facts_of(tensors, placed=placed, alone=alone)
    if isinstance(facts, TorchTensors):
        return ("same_results", [partial(facts.fit, tensors)], [True])
    return ("fit", tensors, facts)
