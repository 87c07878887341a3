"""Which functions can be a step, and graphed functions as methods of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from graphplan.errors import OptionError

_KEY = "_graphed_methods"


class Methods:
    """The graphed methods of one instance or class, by what they are in the class. A copy of the instance has none."""

    def __init__(self, instance: int = 0) -> None:
        self._instance = instance
        self.made: dict[Any, Any] = {}

    @classmethod
    def of(cls, instance: Any, name: str) -> Methods:
        """Those of ``instance``. Raises OptionError if it cannot keep that called ``name``."""
        try:
            inner = vars(instance)
        except TypeError:
            raise OptionError(
                f"{name} is graphed on a {type(instance).__name__}, which has no __dict__ to keep its programs in; "
                f"expected one: add '__dict__' to its __slots__, or graph the bound method: graphed(thing.{name})"
            ) from None
        if _KEY not in inner or inner[_KEY]._instance != id(instance):
            if isinstance(instance, type):
                # In its own namespace, which cannot be written to: a class that inherits the method keeps its own.
                type.__setattr__(instance, _KEY, cls(id(instance)))
            else:
                # A shallow copy has the dictionary's items, and its original's methods among them.
                inner[_KEY] = cls(id(instance))
        return inner[_KEY]

    def __reduce__(self) -> tuple[Any, ...]:
        return Methods, ()


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


def check_form(fn: Callable[..., Any]) -> None:
    """Raise OptionError for a function whose call only begins something, such as a coroutine."""
    while isinstance(fn, partial):
        fn = fn.func
    # What runs when an object is called is a method of its class.
    call = fn.forward if isinstance(fn, nn.Module) else type(fn).__call__ if callable(fn) else None
    asks = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(ask(each) for ask in asks for each in (fn, call)):
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        raise OptionError(
            f"{name} is a coroutine or generator function (async def, yield): a call of it computes nothing yet, and "
            "what it gives back can be run once only, so that there is nothing to replay. Expected a function that "
            "computes and returns: graph the one that does the computing, and await, or yield, around its calls"
        )
