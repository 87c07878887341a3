"""The options of a graphed step, checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphplan.backend import check_backend
from graphplan.errors import OptionError, PolicyError
from graphplan.policy import Policy, check_mode
from graphplan.verify import Schedule

EagerIf = Callable[..., bool] | int | None


@dataclass(frozen=True)
class Options:
    """What :func:`graphplan.graph_step` takes besides the step and its owners; see there.

    Raises:
        OptionError, PolicyError, BackendError: for values that make no sense.
    """

    mode: str = "train"
    policy: Policy | None = None
    backend: str = "auto"
    device: str | torch.device | None = None
    warmup_steps: int = 3
    on_failure: str = "raise"
    allow: Sequence[str] = ()
    eager_if: EagerIf = None
    prepare_optimizers: bool = True
    max_graphs: int = 16
    verify: str | int | None = "geometric"
    max_recaptures: int = 16
    debug: bool = False
    debug_eager: bool = False

    def __post_init__(self) -> None:
        check_mode(self.mode)
        check_backend(self.backend)
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise PolicyError(f"policy is {self.policy!r}; expected a Policy, such as Policy.train()")
        if self.warmup_steps < 1:
            raise OptionError(
                f"warmup_steps is {self.warmup_steps}; expected at least 1: an optimizer makes its state in that step"
            )
        if self.on_failure not in ("raise", "eager"):
            raise OptionError(f"on_failure is {self.on_failure!r}; expected 'raise' or 'eager'")
        if isinstance(self.allow, str):
            raise OptionError(f"allow is the string {self.allow!r}; expected a sequence of paths: ({self.allow!r},)")
        # A copy: what the caller does to its list later is not meant for the step.
        object.__setattr__(self, "allow", tuple(self.allow))
        if self.max_graphs < 1:
            raise OptionError(f"max_graphs is {self.max_graphs}; expected at least 1")
        if self.max_recaptures < 0:
            raise OptionError(f"max_recaptures is {self.max_recaptures}; expected 0 or more")
        self._check_eager_if()
        Schedule.parse(self.verify)

    def _check_eager_if(self) -> None:
        countable = isinstance(self.eager_if, int) and not isinstance(self.eager_if, bool) and self.eager_if >= 1
        if self.eager_if is not None and not callable(self.eager_if) and not countable:
            raise OptionError(f"eager_if is {self.eager_if!r}; expected a predicate, or n >= 1 for every n-th call")

    @property
    def schedule(self) -> Schedule:
        """Which replays are checked: none where nothing is replayed."""
        return Schedule.parse("off" if self.debug_eager else self.verify)

    @property
    def roles(self) -> Policy:
        """The policy that holds."""
        return self.policy or Policy.of_mode(self.mode)

    @property
    def feed_device(self) -> torch.device | None:
        """Where fed tensors are moved, if anywhere."""
        return None if self.device is None else torch.device(self.device)
