"""Whose a graphed function is, and what it is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from graphplan.errors import FeedError, OptionError
from graphplan.signature import Feed, flatten, is_dense


class Bound:
    """What an instance has of a graphed method, or a class of a graphed class method. A copy of the instance gets an
    empty one.
    """

    def __init__(self) -> None:
        self._graphed: Any = None

    @classmethod
    def of(cls, instance: Any, key: str, name: str) -> Bound:
        """That of ``instance`` for its method ``name``.

        Raises:
            OptionError: if the instance cannot keep it.
        """
        try:
            inner = vars(instance)
        except TypeError:
            raise OptionError(
                f"{name} is graphed on a {type(instance).__name__}, which has no __dict__ to keep its programs in; "
                f"expected one: add '__dict__' to its __slots__, or graph the bound method: graphed(thing.{name})"
            ) from None
        if key not in inner:
            if isinstance(instance, type):
                # In its own namespace, which cannot be written to: a class that inherits the method keeps its own.
                type.__setattr__(instance, key, cls())
            else:
                inner[key] = cls()
        return inner[key]

    def get(self, make: Callable[[], Any]) -> Any:
        """What is there, or what ``make`` makes."""
        if self._graphed is None:
            self._graphed = make()
        return self._graphed

    def __reduce__(self) -> tuple[Any, ...]:
        return Bound, ()

    def __deepcopy__(self, memo: Any) -> Bound:
        return Bound()


def dense_feed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Feed | None:
    """A call of dense tensors and literals, flattened; None if there is something else among its arguments."""
    try:
        feed = flatten(args, kwargs)
    except FeedError:
        return None
    return feed if all(is_dense(leaf) for _, leaf in feed.tensors()) else None


def owners_of(fn: Callable[..., Any], owners: Mapping[str, Any] | Sequence[Any] | None) -> Any:
    """The module that is called, or the object whose method is, beside what was named."""
    own: Any = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if own is None or inspect.ismodule(own) or isinstance(own, type):
        return owners
    name = "model" if isinstance(fn, nn.Module) else "self"
    if owners is None:
        return {name: own}
    if isinstance(owners, Mapping):
        return owners if any(owner is own for owner in owners.values()) else {name: own, **owners}
    return owners if any(owner is own for owner in owners) else [own, *owners]
