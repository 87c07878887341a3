"""What stands in the place of Lightning's own methods and closures while a seam is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor
from typing_extensions import override

Recover = Callable[[Exception], None]
"""Takes graphplan out of the running fit after an error of its own, or raises: the caller then does what Lightning does
in its place.
"""


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

    def put(self) -> None:
        """Shadow the method."""
        setattr(self._owner, self._name, self)

    def take_off(self) -> None:
        """Undo ``put``, if nobody else has put something there since."""
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)  # Of a copy that is still being made, and has no attributes yet.


class PatchedMethods:
    """Has stand-ins, each where its method is to be replaced. ``install`` and ``remove`` are inverse."""

    def __init__(self, *standins: InstancePatch) -> None:
        self._standins = standins

    def install(self) -> None:
        """Put them in."""
        for standin in self._standins:
            standin.put()

    def remove(self) -> None:
        """Take them off."""
        for standin in self._standins:
            standin.take_off()


class ReplayedClosure(Closure):
    """Stands where Lightning expects its closure: calling it runs the graphed forward and backward."""

    @override
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._step_fn()

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        # Lightning's own, as a frame of this package: its frames are left out of the user's tracebacks.
        self._result = self.closure(*args, **kwargs)
        return self._result.loss
