"""What :func:`graphplan.graphed` takes, checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphplan.errors import OptionError
from graphplan.feed.call_arguments import hands_over
from graphplan.inference.shared_pool import Pool
from graphplan.specs.policy import Policy
from graphplan.specs.roles import Role
from graphplan.step.buckets import Buckets, check_shapes
from graphplan.step.dimensions import Dims
from graphplan.step.options import Options
from graphplan.step.padding import PadValue

SHAPES = ("exact", "eager", "bucket")


@dataclass(frozen=True)
class ServeOptions:
    """See :func:`graphplan.graphed`.

    Raises:
        OptionError, PolicyError, BackendError: for values that make no sense.
    """

    enable_if: Callable[[], bool] | None = None
    shapes: str = "exact"
    outputs: str = "clone"
    buckets: Buckets | None = None
    pad: PadValue | Mapping[str, PadValue] = 0
    mask: str | None = None
    dynamic: Mapping[str, Dims] | None = None
    owners: Mapping[str, Any] | Sequence[Any] | None = None
    static_roles: Iterable[Role | str] = (Role.INPUT, Role.PARAM)
    copy_roles: Iterable[Role | str] = (Role.INPUT,)
    backend: str = "auto"
    device: str | torch.device | None = None
    capture_after: int = 1
    max_graphs: int = 64
    memory_budget: int | None = None
    on_failure: str = "raise"
    verify: str | int | None = "geometric"
    min_speedup: float | None = None
    allow: Sequence[str] = ()
    watch: Sequence[str] = ()
    compile: bool | Mapping[str, Any] = False
    pool: Pool | None = None
    step: Options = field(init=False)
    """The options of the step underneath."""

    def __post_init__(self) -> None:
        if self.enable_if is not None and not callable(self.enable_if):
            raise OptionError(f"enable_if is {self.enable_if!r}; expected a function without arguments, or None")
        check_shapes(self.shapes, SHAPES, self.buckets, self.mask)
        if self.pool is not None and not isinstance(self.pool, Pool):
            raise OptionError(f"pool is {self.pool!r}; expected a Pool, or None for one of the function's own")
        if not isinstance(self.capture_after, int) or isinstance(self.capture_after, bool) or self.capture_after < 1:
            raise OptionError(f"capture_after is {self.capture_after!r}; expected an int >= 1")
        policy = Policy("inference", static_roles=self.static_roles, copy_roles=self.copy_roles)
        options = Options(
            mode="inference",
            policy=policy,
            backend=self.backend,
            device=self.device,
            warmup_steps=self.capture_after,
            on_failure=self.on_failure,
            allow=self.allow,
            watch=self.watch,
            compile=self.compile,
            max_graphs=self.max_graphs,
            verify=self.verify,
            min_speedup=self.min_speedup,
            outputs=self.outputs,
            autograd=True,
            memory_budget=self.memory_budget,
        )
        object.__setattr__(self, "step", options)

    @hands_over
    def is_enabled(self) -> bool:
        """What ``enable_if`` says."""
        return self.enable_if is None or bool(self.enable_if())
