"""Lists that a step appends to. A replay appends too, but runs no Python, so code must not read these lists."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch.utils import _pytree as pytree

from graphplan.effects.allowed import shorten
from graphplan.effects.container_names import ANY_DEPTH, ContainerName, ContainerNames
from graphplan.effects.trace_pair import TracePair
from graphplan.errors import HostEffectError
from graphplan.observe.executed_code import is_of_module
from graphplan.owners.kinds import MAX_ITEMS, PLAIN
from graphplan.owners.slots import Items, Namespace, Scalar, Walk
from graphplan.owners.views import Cell, home
from graphplan.specs.paths import Path
from graphplan.trace.changes import same_value, told_apart


def find_appends(pair: TracePair) -> dict[str, int]:
    """Return how many items every step appends to lists and deques, by path. Refuse other changes of their length."""
    appends: dict[str, int] = {}
    for path, one, two in pair.changed("moved"):
        old, new = two or one
        what = "shortens" if new < old else "adds items elsewhere than at the end of"
        raise HostEffectError(
            f"the step {what} {path}, from {old} to {new} items, which a replay cannot repeat. Only append to it and "
            f"clear it outside the step, or, if replays may leave it unchanged, pass allow=({path!r},)",
            path=path,
        )
    for path, before, after in pair.changed("appended"):
        if before is None or after is None or len(before) != len(after) or not _alike(before, after):
            what = " and then ".join(
                told_apart(before, after, lambda items: "nothing" if items is None else shorten(items))
            )
            raise HostEffectError(
                f"the step appends {what} to {path}; expected tensors, or the same values each time, because a replay "
                f"repeats them. Append tensors, or, if replays may leave the list unchanged, pass allow=({path!r},)",
                path=path,
            )
        appends[path] = len(after)
    return appends


def _alike(before: list[Any], after: list[Any]) -> bool:
    (old, shape), (new, other) = pytree.tree_flatten(before), pytree.tree_flatten(after)
    return shape == other and all(map(same_value, old, new))


_BY_TEXT = frozenset({"globals", "locals", "eval", "exec", "__globals__", "__closure__", "__defaults__"})
"""Names by which code reaches variables that it does not name, in addition to those that make it dynamic."""
_LOOKED_THROUGH = 10_000
"""Maximum number of objects that are searched for references to lists."""
_ENDS = frozenset({ModuleType, FunctionType, CodeType, *PLAIN})
"""Types at which the search ends: they lead to whole modules, or nowhere."""


def _only_to_append(pair: TracePair) -> Iterator[str]:
    """Yield the paths of lists that code has names for and, as far as these tell, only appends to."""
    variables = cache(lambda: _variables(pair))
    reads = [trace.reads for trace in pair.both if not trace.reads.by_users.dynamic]
    for path, items in pair.walk.lists.items():
        length = pair.walk.objects.get(Path.length(path))
        if length is not None and any(read.covers(length) for read in reads):
            more = replace(length, attribute=f"{length.attribute}[:]")
            # Names only tell that code loads a variable, not what it does with the list.
            if length.name is not None or isinstance(length.owner, Namespace):
                is_only_appended = variables().get(id(items), False)
            else:
                is_only_appended = not any(read.covers(more) for read in reads)
            if is_only_appended:
                yield path


def _variables(pair: TracePair) -> dict[int, bool]:
    """Return for lists and dictionaries, by identity, whether a single variable is the only reference that leads to
    them: code may use any name for a list that is in defaults, tuples, partials or caches.
    """
    if pair.either.by_users.dynamic or not all(_BY_TEXT.isdisjoint(code.co_names) for code, _ in pair.either.codes):
        return {}
    found: dict[int, bool] = {}
    for container, key, value in pair.walk.links:
        is_variable = found.get(id(container), False) if type(container) is dict else type(container) is Cell
        is_variable |= type(container) is dict and is_of_module(container)
        found[id(value)] = id(value) not in found and isinstance(key, str) and is_variable
    wanted = {id(items) for items in pair.walk.lists.values() if found.get(id(items))}
    if wanted:
        found.update(dict.fromkeys(_reached(pair.walk, wanted), False))
    return found


def _reached(walk: Walk, wanted: set[int]) -> set[int]:
    """Return those of the identities ``wanted`` to which values lead that the walk does not enter: objects of libraries
    and C, such as the results that a cached function stores. Return all if there are too many objects to search.
    """
    left = [scalar.get() for scalar in (*walk.scalars.values(), *walk.objects.values())]
    met: set[int] = set()
    while left and len(met) < _LOOKED_THROUGH:
        thing = left.pop()
        is_space = type(thing) is dict and is_of_module(thing)
        if id(thing) not in met and type(thing) not in _ENDS and not issubclass(type(thing), type) and not is_space:
            met.add(id(thing))
            # The search does not go on within the wanted lists.
            left += gc.get_referents(thing) if id(thing) not in wanted else ()
    return wanted if left else wanted & met


class AppendedLists:
    """The lists and deques that two traces appended to, or that their code appends to in branches not taken."""

    def __init__(self, pair: TracePair) -> None:
        appended = {path: None for trace in pair.both for path in trace.changes.appended}
        self._walk = walk = pair.walk
        self.lengths: dict[str, str] = {Path.length(path): path for path in appended}
        """The path of each list that was appended to, by the path of its length."""
        paths = dict.fromkeys([*appended, *_only_to_append(pair)])
        self._lists = {path: walk.lists[path] for path in paths if path in walk.lists}
        self._names = ContainerNames(pair)
        self._seen: dict[str, str] = {}
        left = [path for path, items in self._lists.items() if not self._is_looked_at(path, items)]
        self._hidden = {id(self._lists[path]) for path in left}
        self._rests = {f"{path}[{MAX_ITEMS}:]" for path in left}
        self._rests |= {Path.length(path) for path in left if path not in appended}

    def look(self, path: str) -> str | None:
        """Return the line at which code may do more with a list than append to it; None if there is none."""
        # A deque with a maximum length drops items: guards compare whether it is full.
        forgets = getattr(self._lists.get(path), "maxlen", None) is not None
        return None if forgets else self._seen.get(path)

    def hides(self, path: str, scalar: Scalar) -> bool:
        """Return True if ``scalar`` can only be reached through lists that the step's code only appends to."""
        if not self._hidden:
            return False
        return path in self._rests or self._is_hidden(home(scalar.container), set())

    def _is_hidden(self, thing: Any, met: set[int]) -> bool:
        if id(thing) in self._hidden:
            return True
        if id(thing) in met:
            return False
        met.add(id(thing))
        if id(thing) in self._names.owners:
            return self._is_hidden(self._names.owners[id(thing)], met)
        holders = self._names.holders.get(id(thing), ())
        return bool(holders) and all(self._is_hidden(home(container), met) for container, _ in holders)

    def _is_looked_at(self, path: str, items: Items) -> bool:
        """Return True if code reads a list or its items. Record the line that reads the list itself."""
        names = set(self._names.names_of(items)) or self._unplaced(self._walk.objects.get(Path.length(path)))
        looks = [each for each in self._names.looks(names) if not each[0].adds]
        seen = (str(source) for look, fitting, source in looks if any(name.is_seen(look) for name in fitting))
        self._seen.update((path, line) for line in islice(seen, 1))
        return bool(looks)

    def _unplaced(self, length: Scalar | None) -> set[ContainerName]:
        """Return names for a list in a tuple or a partial, or one that was named as an owner: its depth is unknown."""
        given = () if length is None else (length.attribute, length.name or length.attribute)
        words = {name.removeprefix(".") for name in given}
        return {ContainerName(f"{dot}{word}", ANY_DEPTH) for word in words for dot in ("", ".")}
