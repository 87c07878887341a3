"""Which dimensions of what is fed may vary from call to call, and which sizes a call has there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from graphplan.errors import OptionError
from graphplan.signature import Feed, leaf_key

Dims = int | Sequence[int]
Place = tuple[int, int]
"""A leaf of the feed, and one of its dimensions."""


def default_dims(ndim: int) -> tuple[int, ...]:
    """All dimensions but the last; the only one of a vector."""
    return tuple(range(ndim - 1)) if ndim > 1 else tuple(range(ndim))


def outer_first(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions as they lie in memory: a copy in that order keeps the memory format."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))


class Dynamic:
    """The dynamic dimensions of a function's arguments.

    Args:
        fn: the function, whose parameters have names.
        dims: dimensions by parameter name; for others, and those that are not named, :func:`default_dims`.

    Raises:
        OptionError: for a parameter that there is not, or something that is no dimension.
    """

    def __init__(self, fn: Callable[..., Any], dims: Mapping[str, Dims] | None) -> None:
        self._names = Names(fn)
        if dims is not None and not isinstance(dims, Mapping):
            raise OptionError(
                f"dynamic is {dims!r}; expected dimensions by the name of an argument, such as {{'x': (0, 1)}}"
            )
        self._dims = {name: _parse(name, value) for name, value in (dims or {}).items()}
        self._names.check(self._dims, "dynamic")

    def of(self, feed: Feed) -> list[Place]:
        """The dynamic dimensions of a call's tensors."""
        roots = self._names.roots(feed)
        return [
            (index, dim)
            for index, leaf in feed.tensors()
            for dim in self._dims.get(roots[index], default_dims(leaf.ndim))
            if dim < leaf.ndim
        ]

    def split(self, feed: Feed) -> tuple[Hashable, tuple[int, ...]]:
        """A call's static signature, and its sizes in the dynamic dimensions."""
        places = self.of(feed)
        sizes = tuple(feed.leaves[index].shape[dim] for index, dim in places)
        fixed: list[Hashable] = []
        for index, leaf in enumerate(feed.leaves):
            if isinstance(leaf, Tensor):
                free = {dim for position, dim in places if position == index}
                shape = tuple(-1 if dim in free else size for dim, size in enumerate(leaf.shape))
                fixed.append((shape, leaf.dtype, leaf.device, leaf.requires_grad))
            else:
                fixed.append(leaf_key(leaf))
        return (feed.key[0], *fixed), sizes


def _parse(name: str, value: Any) -> tuple[int, ...]:
    dims = (value,) if isinstance(value, int) else value
    good = isinstance(dims, Sequence) and not isinstance(dims, str)
    if not good or not all(isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0 for dim in dims):
        raise OptionError(f"dynamic[{name!r}] is {value!r}; expected a dimension or several, counted from 0")
    return tuple(dims)


class Names:
    """The names of a function's parameters."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        try:
            parameters = list(inspect.signature(_forward(fn)).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = [parameter.name for parameter in parameters if parameter.kind in positional]
        rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
        self._rest = rest[0] if rest else ""
        self._open = not parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._all = [parameter.name for parameter in parameters]
        self._known: dict[Hashable, list[str]] = {}

    def check(self, names: Mapping[str, Any], option: str) -> None:
        """Refuse names that are no parameters.

        Raises:
            OptionError: with those that there are.
        """
        unknown = [name for name in names if name not in self._all]
        if unknown and not self._open:
            raise OptionError(f"{option} names {unknown[0]!r}; expected one of: {', '.join(self._all)}")

    def roots(self, feed: Feed) -> list[str]:
        """For each leaf of a call, the name of the parameter that it is a part of."""
        key = feed.key[0]
        if key not in self._known:
            self._known[key] = [self._root(name) for name in feed.names()]
        return self._known[key]

    def _root(self, path: str) -> str:
        kind, _, rest = path.partition("[")
        inner = rest.partition("]")[0]
        if kind == "kwargs":
            return inner.strip("'\"")
        index = int(inner)
        return self._positional[index] if index < len(self._positional) else self._rest


def _forward(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What has the parameters that a call of ``fn`` takes: a module's are its forward's."""
    forward = getattr(fn, "forward", None)
    return forward if callable(forward) else fn
