"""Patches of Lightning's objects, and the way out of them after graphplan's own errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

Recover = Callable[[Exception], None]
"""Takes graphplan out of the running fit after an error of its own, or raises the error."""


class InstancePatch(partial[Any]):
    """A callable attribute of an instance that shadows a method. A copy of the instance has the method itself."""

    _owner: Any
    _name: str

    def __new__(cls, owner: Any, name: str, run: Callable[..., Any]) -> InstancePatch:
        """``run`` for the method ``name`` of ``owner``."""
        self = super().__new__(cls, run)
        self._owner, self._name = owner, name
        return self

    def remove(self) -> None:
        """Have the method back, unless something else was put there since."""
        if vars(self._owner).get(self._name) is self:
            del vars(self._owner)[self._name]

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)  # Of a copy that is still being made, and has no attributes yet.


class Patches(ExitStack):
    """Changes of instances, never of classes. Closing it undoes them, the latest first."""

    def method(self, owner: Any, name: str, run: Callable[..., Any]) -> InstancePatch:
        """Call ``run`` in the place of a method."""
        patch = vars(owner)[name] = InstancePatch(owner, name, run)
        self.callback(patch.remove)
        return patch

    def kind(self, thing: Any, kind: type, **attributes: Any) -> None:
        """Give ``thing`` a subclass of its class, and attributes that this needs."""
        self.callback(_put_back, thing, type(thing), attributes)
        vars(thing).update(attributes)
        object.__setattr__(thing, "__class__", kind)


def _put_back(thing: Any, kind: type, names: Iterable[str]) -> None:
    for name in names:
        del vars(thing)[name]
    object.__setattr__(thing, "__class__", kind)


def telling(tell: str, plain: Any) -> Callable[..., Any]:
    """Make a method that calls the method ``tell`` of its object, then ``plain``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        getattr(self, tell)()
        return plain(self, *args, **kwargs)

    return method


def settled(name: str) -> Any:
    """Make a property for an attribute that ``settle`` of its object brings up to date, before it is read or set."""

    def read(self: Any) -> Any:
        self.settle()
        return vars(self)[name]

    def write(self: Any, value: Any) -> None:
        self.settle()
        vars(self)[name] = value

    return property(read, write)


def recovering(stock: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method in the place of Lightning's code: after an error of graphplan's own it calls ``recover`` of its
    object, then ``stock``, Lightning's code, with the same arguments.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def method(self: Any, *args: Any) -> Any:
            try:
                return run(self, *args)
            except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
                self.recover(error)
            return stock(self, *args)

        return method

    return decorate
