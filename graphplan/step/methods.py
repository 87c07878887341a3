"""Which functions can be a step, and graphed functions as methods of a class."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from graphplan.errors import OptionError


class Method:
    """A method in a class: each instance gets a copy, and under ``@classmethod`` each class."""

    def _be_method(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._name = getattr(fn, "__name__", type(fn).__name__)
        # A class method is not told whose it is, but its function's qualified name says so.
        self._key = f"_graphed_{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', self._name)}"

    def __set_name__(self, owner: type, name: str) -> None:
        # A class and its base may both have a graphed method of that name.
        self._key = f"_graphed_{owner.__module__}.{owner.__qualname__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The method of one instance or class."""
        if instance is None or not isinstance(self._fn, FunctionType):
            return self
        return Bound.of(instance, self._key, self._name).get(lambda: self._bound_to(instance))

    @abstractmethod
    def _bound_to(self, instance: Any) -> Any:
        """Make the graphed method of ``instance``."""


class Bound:
    """The graphed method of one instance or class. A copy of the instance gets an empty one."""

    def __init__(self) -> None:
        self._graphed: Any = None

    @classmethod
    def of(cls, instance: Any, key: str, name: str) -> Bound:
        """That of ``instance`` for its method ``name``. Raises OptionError if the instance cannot keep it."""
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
        """The graphed method, made by ``make`` at first."""
        if self._graphed is None:
            self._graphed = make()
        return self._graphed

    def __reduce__(self) -> tuple[Any, ...]:
        return Bound, ()


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
