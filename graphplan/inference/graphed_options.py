"""What :func:`graphplan.graphed` takes, checked once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from graphplan.errors import OptionError
from graphplan.inference.shared_pool import Pool
from graphplan.specs.policy import Policy
from graphplan.specs.roles import Role
from graphplan.step.options import Options, PlainOptions


@dataclass(frozen=True, kw_only=True)
class ServeOptions(PlainOptions):
    """What :func:`graphplan.graphed` takes beside the function.

    Args:
        static_roles: roles that keep fixed addresses; with ``"state"`` the function may change what it owns.
        copy_roles: roles that are copied in; with ``"param"``, :meth:`Graphed.replay` takes other weights.
        outputs: ``"clone"``, or ``"static"``: results are the program's own memory, and raise when they are used
            after its next replay. Fed to another graphed function they are not copied, if it was captured on them.
        capture_after: number of calls of a shape before it is traced, which takes two calls more, and captured.
        pool: what shares stream and memory with others; by default each use of ``graphed`` has its own.

    Raises:
        OptionError, PolicyError, BackendError: for values that make no sense.
    """

    static_roles: Iterable[Role | str] = ("input", "param")
    copy_roles: Iterable[Role | str] = ("input",)
    outputs: str = "clone"
    capture_after: int = 1
    max_graphs: int = 64
    pool: Pool | None = None
    step: Options = field(init=False)
    """The options of the step underneath."""

    def __post_init__(self) -> None:
        if self.pool is not None and not isinstance(self.pool, Pool):
            raise OptionError(f"pool is {self.pool!r}; expected a Pool, or None for one of the function's own")
        if not isinstance(self.capture_after, int) or isinstance(self.capture_after, bool) or self.capture_after < 1:
            raise OptionError(f"capture_after is {self.capture_after!r}; expected an int >= 1")
        policy = Policy("inference", static_roles=self.static_roles, copy_roles=self.copy_roles)
        own = {"mode": "inference", "policy": policy, "warmup_steps": self.capture_after, "autograd": True}
        object.__setattr__(self, "step", Options(**{**self.shared(), **own}))
