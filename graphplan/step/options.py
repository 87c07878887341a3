"""The options of a graphed step, checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphplan.backends.backend import check_backend
from graphplan.environment.origin import watch
from graphplan.errors import OptionError, PolicyError
from graphplan.feed.call_arguments import hands_over
from graphplan.specs.policy import Policy, check_mode
from graphplan.step.buckets import Buckets, Ladders, check_shapes
from graphplan.step.dimensions import Dims
from graphplan.step.padding import PadValue
from graphplan.verify.schedule import Schedule

EagerIf = Callable[..., bool] | int | None
_COUNTS = {"warmup_steps": 1, "max_graphs": 1, "max_recaptures": 0}
_REASONS = {"warmup_steps": ": an optimizer makes its state in that step"}


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Options:
    """What :func:`graphplan.graph_step` and :func:`graphplan.graphed` take besides the step and its owners; see there.

    ``autograd``: whether calls whose results shall have gradients flow through them are eager, instead of detached.

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
    watch: Sequence[str] = ()
    eager_if: EagerIf = None
    prepare_optimizers: bool = True
    max_graphs: int = 16
    fuse_optimizer: bool = False
    compile: bool | Mapping[str, Any] = False
    verify: str | int | None = "geometric"
    min_speedup: float | None = None
    max_recaptures: int = 16
    debug: bool = False
    debug_eager: bool = False
    outputs: str = "clone"
    autograd: bool = False
    memory_budget: int | None = None
    prefetch: bool = False
    shapes: str = "exact"
    buckets: Buckets | None = None
    pad: PadValue | Mapping[str, PadValue] = 0
    mask: str | None = None
    dynamic: Mapping[str, Dims] | None = None

    def __post_init__(self) -> None:
        check_mode(self.mode)
        check_backend(self.backend)
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise PolicyError(f"policy is {self.policy!r}; expected a Policy, such as Policy.train()")
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if not _is_count(value, least):
                raise OptionError(f"{name} is {value!r}; expected an int >= {least}{_REASONS.get(name, '')}")
        for name in ("prepare_optimizers", "fuse_optimizer", "debug", "debug_eager", "prefetch"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if self.outputs not in ("clone", "static"):
            raise OptionError(f"outputs is {self.outputs!r}; expected 'clone' or 'static'")
        if self.memory_budget is not None and not _is_count(self.memory_budget, 1):
            raise OptionError(f"memory_budget is {self.memory_budget!r}; expected bytes, an int >= 1, or None")
        if self.on_failure not in ("raise", "eager"):
            raise OptionError(f"on_failure is {self.on_failure!r}; expected 'raise' or 'eager'")
        if self.fuse_optimizer and not self.prepare_optimizers:
            raise OptionError("fuse_optimizer=True prepares optimizers; expected prepare_optimizers=True with it")
        self._check_compile()
        self._check_min_speedup()
        self._check_allow()
        self._check_watch()
        self._check_device()
        self._check_eager_if()
        Schedule.parse(self.verify)
        check_shapes(self.shapes, ("exact", "bucket"), self.buckets, self.mask)
        if self.shapes == "bucket" and self.mode != "train":
            raise OptionError("shapes='bucket' of graph_step is for training; expected mode='train', or graphed")
        if self.buckets is not None:
            Ladders(self.buckets)

    def _check_compile(self) -> None:
        named = isinstance(self.compile, Mapping) and all(isinstance(name, str) for name in self.compile)
        if not isinstance(self.compile, bool) and not named:
            raise OptionError(
                f"compile is {self.compile!r}; expected True, False, or arguments of torch.compile by name, such as "
                "{'dynamic': False}"
            )

    def _check_min_speedup(self) -> None:
        value = self.min_speedup
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise OptionError(f"min_speedup is {value!r}; expected a number >= 0, or None for the backend's own")

    def _check_allow(self) -> None:
        if isinstance(self.allow, str):
            raise OptionError(f"allow is the string {self.allow!r}; expected a sequence of paths: ({self.allow!r},)")
        paths = tuple(self.allow) if isinstance(self.allow, Iterable) else None
        if paths is None or not all(isinstance(path, str) for path in paths):
            raise OptionError(f"allow is {self.allow!r}; expected a sequence of paths, such as ('model.calls',)")
        # A copy: what the caller does to its list later is not meant for the step.
        object.__setattr__(self, "allow", paths)

    def _check_watch(self) -> None:
        names = None if isinstance(self.watch, str) else tuple(self.watch)
        if names is None or not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise OptionError(
                f"watch is {self.watch!r}; expected a sequence of top-level names of packages, such as ('mypackage',)"
            )
        object.__setattr__(self, "watch", names)
        watch(names)

    def _check_device(self) -> None:
        try:
            assert self.feed_device is None or self.feed_device.type
        except (RuntimeError, TypeError) as error:
            raise OptionError(
                f"device is {self.device!r}; expected a torch.device or its name, such as 'cuda'"
            ) from error

    def _check_eager_if(self) -> None:
        if self.eager_if is not None and not callable(self.eager_if) and not _is_count(self.eager_if, 1):
            raise OptionError(f"eager_if is {self.eager_if!r}; expected a predicate, or n >= 1 for every n-th call")

    @hands_over
    def asks_eager(self, calls: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether ``eager_if`` wants the call with these arguments, the ``calls``-th, to be eager."""
        if callable(self.eager_if):
            return bool(self.eager_if(*args, **kwargs))
        return self.eager_if is not None and (calls - 1) % self.eager_if == 0

    @property
    def schedule(self) -> Schedule:
        """Which replays are checked: none where nothing is replayed."""
        return Schedule.parse("off" if self.debug_eager else self.verify)

    def least_speedup(self, device: torch.device) -> float:
        """How often a replay has to fit into an eager step. The tape is there to be tested with, not to be fast."""
        if self.min_speedup is not None:
            return self.min_speedup
        return 0.0 if device.type == "cpu" else 1.0

    def is_gated(self, device: torch.device) -> bool:
        """Whether replays have to be faster than eager steps on ``device``, or the step stands down."""
        return self.backend != "eager" and not self.debug_eager and self.least_speedup(device) > 0

    @property
    def may_stay_eager(self) -> bool:
        """Whether a step on a busy device needs no program: not where it is asked for faster kernels or copies, which
        pay there too, or where runs are to be repeatable, and have the kernels of replays.
        """
        asks = self.compile is not False or self.fuse_optimizer or self.prefetch
        return not asks and not torch.are_deterministic_algorithms_enabled()

    @property
    def pads_rows(self) -> bool:
        """Whether a batch may have fewer rows than the step is given."""
        return self.buckets is not None and 0 in Ladders(self.buckets).dims

    @property
    def roles(self) -> Policy:
        """The policy that holds."""
        return self.policy or Policy.of_mode(self.mode)

    @property
    def feed_device(self) -> torch.device | None:
        """Where fed tensors are moved, if anywhere."""
        return None if self.device is None else torch.device(self.device)
