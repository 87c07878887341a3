"""Patches of Lightning's objects, and the fallback to Lightning's code after graphplan's internal errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

Recover = Callable[[Exception], None]
"""Removes graphplan from the running fit after an internal error, or raises the error."""


class InstancePatch(partial[Any]):
    """A callable attribute of an instance that shadows a method. A copy of the instance has the method itself."""

    _owner: Any
    _name: str

    def __new__(cls, owner: Any, name: str, run: Callable[..., Any]) -> InstancePatch:
        """Create a patch that runs ``run`` in place of the method ``name`` of ``owner``."""
        self = super().__new__(cls, run)
        self._owner, self._name = owner, name
        return self

    def remove(self) -> None:
        """Restore the method, unless other code has replaced this patch."""
        if vars(self._owner).get(self._name) is self:
            del vars(self._owner)[self._name]

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)  # A copied owner has no attributes yet: this finds the method.


class Patches(ExitStack):
    """A stack of changes to instances, never to classes. Closing it undoes them, the latest first."""

    def method(self, owner: Any, name: str, run: Callable[..., Any]) -> InstancePatch:
        """Replace the method ``name`` of ``owner`` by ``run``."""
        patch = vars(owner)[name] = InstancePatch(owner, name, run)
        self.callback(patch.remove)
        return patch

    def kind(self, thing: Any, kind: type, **attributes: Any) -> None:
        """Change the class of ``thing`` to its subclass ``kind``, and set the attributes that ``kind`` needs."""
        self.callback(_put_back, thing, type(thing), attributes)
        vars(thing).update(attributes)
        object.__setattr__(thing, "__class__", kind)


def _put_back(thing: Any, kind: type, names: Iterable[str]) -> None:
    for name in names:
        del vars(thing)[name]
    object.__setattr__(thing, "__class__", kind)


def calling_first(tell: str, plain: Any) -> Callable[..., Any]:
    """Return a method that calls its object's method named ``tell``, then ``plain``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        getattr(self, tell)()
        return plain(self, *args, **kwargs)

    return method


def settled(name: str) -> Any:
    """Return a property for an attribute. It calls its object's ``settle()`` before the attribute is read or set."""

    def read(self: Any) -> Any:
        self.settle()
        return vars(self)[name]

    def write(self: Any, value: Any) -> None:
        self.settle()
        vars(self)[name] = value

    return property(read, write)


def recovering(stock: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method that replaces Lightning's code. After an internal error of graphplan, it calls its object's
    ``recover``, then ``stock``, Lightning's code, with the same arguments.
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
