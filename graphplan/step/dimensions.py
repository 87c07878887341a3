"""Dynamic dimensions of a call's tensors, and options by the names of a function's arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from graphplan.errors import OptionError
from graphplan.feed.signature import Feed

Value = TypeVar("Value")
Dims = int | Sequence[int]
Place = tuple[int, int]
"""The index of a leaf, and one of its dimensions."""
_STEP = re.compile(r"\[(?:'(?P<key>[^']*)'|[^\]]*)\]|\.(?P<attribute>\w+)")
"""One step of a path into a container: ``['labels']``, ``[0]`` or ``.labels``."""


def outer_first(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions in memory order; a copy that keeps it keeps the memory format."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))


class Names:
    """The names of a function's parameters, and of what lies in the containers that they are given."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        forward = getattr(fn, "forward", None)
        try:
            parameters = list(inspect.signature(forward if callable(forward) else fn).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = [parameter.name for parameter in parameters if parameter.kind in positional]
        self._rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "")
        self._open = not parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._all = [parameter.name for parameter in parameters]
        self._known: dict[Hashable, list[tuple[str, ...]]] = {}
        self._checked: set[str] = set()

    def check(self, names: Iterable[str], option: str, others: Iterable[str] = ()) -> None:
        """Raise OptionError for a name that is neither a parameter nor among ``others``."""
        known = dict.fromkeys([*self._all, *others])
        unknown = [name for name in names if name not in known]
        if unknown and not self._open:
            raise OptionError(f"{option} names {unknown[0]!r}; expected one of: {', '.join(known)}")

    def roots(self, feed: Feed) -> list[str]:
        """For each leaf of a call, the name of its parameter."""
        return [names[-1] for names in self.of(feed)]

    def of(self, feed: Feed) -> list[tuple[str, ...]]:
        """The names of each leaf, closest first: ``batch['labels']``, ``labels``, ``batch``."""
        key = feed.key[0]
        if key not in self._known:
            self._known[key] = [self._all_of(path) for path in feed.names()]
        return self._known[key]

    def _all_of(self, path: str) -> tuple[str, ...]:
        kind, _, rest = path.partition("[")
        inner, _, within = rest.partition("]")
        if kind == "kwargs":
            root = inner.strip("'\"")
        else:
            index = int(inner)
            root = self._positional[index] if index < len(self._positional) else self._rest
        names = [root]
        for step in _STEP.finditer(within):
            names += filter(None, (step["key"] or step["attribute"], root + within[: step.end()]))
        return tuple(reversed(names))

    def values(self, feed: Feed, by_name: Mapping[str, Value], option: str) -> list[Value | None]:
        """The value for each leaf, by its closest name, or None; OptionError for a name that no leaf has.

        A name is that of a parameter, a key or attribute within it (``labels``), or a path (``batch['labels']``).
        """
        found = self.of(feed)
        if option not in self._checked:
            self.check(by_name, option, (name for names in found for name in names[::-1]))
            self._checked.add(option)
        return [next((by_name[name] for name in names if name in by_name), None) for names in found]


class Dynamic:
    """The dynamic dimensions of a function's arguments.

    Args:
        fn: the function, whose parameters have names.
        dims: dimensions by name (see :meth:`Names.values`); by default all but the last, or the only one.

    Raises:
        OptionError: for something that is no dimension.
    """

    def __init__(self, fn: Callable[..., Any], dims: Mapping[str, Dims] | None) -> None:
        if dims is not None and not isinstance(dims, Mapping):
            raise OptionError(
                f"dynamic is {dims!r}; expected dimensions by the name of an argument, such as {{'x': (0, 1)}}"
            )
        self.names = Names(fn)
        self._dims = {name: _parse(name, value) for name, value in (dims or {}).items()}

    def of(self, feed: Feed) -> list[Place]:
        """The dynamic dimensions of a call's tensors."""
        given = self.names.values(feed, self._dims, "dynamic")
        places = []
        for index, leaf in feed.tensors():
            default = range(leaf.ndim - 1) if leaf.ndim > 1 else range(leaf.ndim)
            dims = given[index]
            places += [(index, dim) for dim in (default if dims is None else dims) if dim < leaf.ndim]
        return places


def _parse(name: str, value: Any) -> tuple[int, ...]:
    dims = (value,) if isinstance(value, int) else value
    good = isinstance(dims, Sequence) and not isinstance(dims, str)
    if not good or not all(isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0 for dim in dims):
        raise OptionError(f"dynamic[{name!r}] is {value!r}; expected a dimension or several, counted from 0")
    return tuple(dims)
