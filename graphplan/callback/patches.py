"""What replaces methods of Lightning's objects, and what becomes of graphplan's own errors there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

Recover = Callable[[Exception], None]
"""Takes graphplan out of the running fit after an error of its own, or raises the error."""


class InstancePatch(partial[Any]):
    """A callable on an instance, in the place of the method of that name: calling it is calling ``run``.

    In a copy of the instance, and where it is unpickled, the method itself is back: a copied Trainer has no seam.
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
    """Decorate a method that does what Lightning does: after an error of graphplan's own, its object's ``recover`` is
    told, and ``stock``, with the same arguments, is Lightning's way.
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
