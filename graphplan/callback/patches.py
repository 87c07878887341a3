"""Patches of methods of Lightning's objects, and the way out of them after graphplan's own errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

Recover = Callable[[Exception], None]
"""Takes graphplan out of the running fit after an error of its own, or raises the error."""


class InstancePatch(partial[Any]):
    """A callable attribute of an instance that shadows a method: calling it calls ``run``.

    A copy of the instance, or an unpickled one, has the method itself: a copied Trainer has no seam.
    """

    _owner: Any
    _name: str

    def __new__(cls, owner: Any, name: str, run: Callable[..., Any]) -> InstancePatch:
        """``run`` for the method ``name`` of ``owner``."""
        self = super().__new__(cls, run)
        self._owner, self._name = owner, name
        return self

    def install(self) -> None:
        """Shadow the method."""
        setattr(self._owner, self._name, self)

    def remove(self) -> None:
        """Undo :meth:`install`, unless something else was put there since."""
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)  # Of a copy that is still being made, and has no attributes yet.


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
