"""Comparisons of many things at once, by identity: in C++ where that was built, else by Python's own C loops."""

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
"""The name of a comparison, and what it compares: lists of one length."""
_PLAIN = frozenset({dict, defaultdict})
"""Dictionaries of which the garbage collector visits what they hold, in order, and nothing that comes and goes."""
_keys = dict.__iter__
_identity_of = attrgetter("_cdata")


def _are_same(look_up: Callable[..., Any], *columns: list[Any]) -> bool:
    """Whether what is looked up is still the value, everywhere; the last column has the values."""
    *places, values = columns
    return not any(map(is_not, map(look_up, *places), values))


def _are_equal(look_up: Callable[..., Any], *columns: Any) -> bool:
    """Whether what is looked up is still as good as the value, everywhere; the values are then what was found."""
    *places, values, equal = columns
    now = list(map(look_up, *places))
    if any(map(is_not, now, values)):
        if not all(map(equal, now, values)):
            return False
        values[:] = now
    return True


def contents_of(containers: Sequence[Any]) -> list[Row]:
    """Comparisons of all that dictionaries and lists hold now."""
    dicts = [container for container in containers if isinstance(container, dict)]
    lists = [container for container in containers if isinstance(container, list)]
    # Python compares dictionaries of some classes faster.
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
    """Whether dictionaries hold what they held: so many items each, all keys in order, all values in order."""
    return (
        list(map(len, dicts)) == lengths
        and not any(map(is_not, chain.from_iterable(map(dict.values, dicts)), values))
        and not any(map(is_not, chain.from_iterable(map(_keys, dicts)), keys))
    )


def _ask_dicts(
    dicts: Sequence[dict[Any, Any]], lengths: Sequence[int], keys: Sequence[Any], values: Sequence[Any]
) -> Callable[[], bool]:
    """:func:`_same_dicts`, prepared: gc lists what many dictionaries hold in one call, except string keys."""
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
    # Of dictionaries themselves, None if there is nothing.
    "same_values": dict.get, "same_attributes": getattr, "same_types": type, "same_lengths": len,
}  # fmt: skip
"""What is looked up in columns."""
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
"""Comparisons by their names, of lists as long as the first one."""


def rows_of(comparisons: Iterable[tuple[Any, ...]]) -> list[Row]:
    """One row for all single comparisons of each kind: a kind, and what is the one item of each of a row's lists."""
    found: dict[str, list[Any]] = {}
    for kind, *parts in comparisons:
        found.setdefault(kind, []).append(parts)
    return [(kind, *map(list, zip(*parts, strict=True))) for kind, parts in found.items()]


class Column:
    """Places of Python values that are read in one way, and compared in one row of a ``kind``. Each of ``places`` is
    what messages call it, and what it is looked up by: a container and a key, or a thing alone.
    """

    def __init__(self, kind: str, places: Iterable[tuple[Any, ...]]) -> None:
        self.kind, kept = kind, list(places)
        self.paths: list[str] = [place[0] for place in kept]
        width = 2 if kind in ("same_types", "same_lengths") else 3
        self._where = [[place[number] for place in kept] for number in range(1, width)]

    def read(self) -> Iterator[Any]:
        """The values now."""
        return map(_LOOK_UPS[self.kind], *self._where)

    def row(self) -> Row:
        """A comparison that holds while the values are what they are now."""
        return (self.kind, *self._where, list(self.read()))


class _Checks:
    """Many comparisons in one call: each row names one of :data:`_KINDS`, and has its arguments. Callers may write to
    the lists, but for those of ``same_dicts``, ``same_values``, ``same_lengths`` and ``none_there``: in C++ what these
    say of a dictionary is noted until that changes.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        asked = [(name, parts) for name, *parts in rows if parts[0]]
        self._rows = [
            _ask_dicts(*parts) if name == "same_dicts" else partial(_KINDS[name], *parts) for name, parts in asked
        ]

    def hold(self) -> bool:
        return all(ask() for ask in self._rows)


def _lie(tensors: list[Tensor], units: list[int], rests: list[int], written: set[Any]) -> bool:
    """Whether the addresses of dense ``tensors`` have these alignments, and no storage is among those ``written``."""
    if list(map(mod, map(Tensor.data_ptr, tensors), units)) != rests:
        return False
    return written.isdisjoint(map(_identity_of, map(Tensor.untyped_storage, tensors)))


_built: Any = load()
lie: Callable[[list[Tensor], list[int], list[int], set[Any]], bool] = getattr(_built, "lie", _lie)
Checks: type[_Checks] = getattr(_built, "Checks", _Checks)
Tensors: Any = getattr(_built, "Tensors", None)
"""``Tensors(list, placed).fit(list)`` is that of :class:`TorchTensors`, for dense tensors. None if it was not built."""


def facts_of(tensors: Sequence[Tensor], *, placed: bool, alone: bool = False) -> Any:
    """What these tensors are like, and where they lie if ``placed``: ``facts.fit(others)`` is True if others are the
    same, and False if they may differ. ``alone``: that they are ``placed`` is enough.
    """
    if Tensors is not None:
        # Not sparse and nested tensors, and wrappers such as DTensor.
        with suppress(TypeError, RuntimeError):
            return Tensors(list(tensors), placed, alone)
    return TorchTensors(tensors, placed)


def row_of(tensors: list[Tensor], *, placed: bool, alone: bool = False) -> Row:
    """A comparison that holds while ``tensors`` have the facts that :func:`facts_of` finds now."""
    facts = facts_of(tensors, placed=placed, alone=alone)
    if isinstance(facts, TorchTensors):
        return ("same_results", [partial(facts.fit, tensors)], [True])
    return ("fit", tensors, facts)
