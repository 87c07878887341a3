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
_FLAGS = ("prepare_optimizers", "fuse_optimizer", "debug", "debug_eager", "prefetch")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _names_arguments(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _is_speedup(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value >= 0)


_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("warmup_steps", lambda value: _is_count(value, 1), "an int >= 1: an optimizer makes its state in that step"),
    ("max_graphs", lambda value: _is_count(value, 1), "an int >= 1"),
    ("max_recaptures", lambda value: _is_count(value, 0), "an int >= 0"),
    *((name, _is_bool, "True or False") for name in _FLAGS),
    ("outputs", lambda value: value in ("clone", "static"), "'clone' or 'static'"),
    ("memory_budget", lambda value: value is None or _is_count(value, 1), "bytes, an int >= 1, or None"),
    ("on_failure", lambda value: value in ("raise", "eager"), "'raise' or 'eager'"),
    ("compile", lambda value: _is_bool(value) or _names_arguments(value),
     "True, False, or arguments of torch.compile by name, such as {'dynamic': False}"),
    ("min_speedup", _is_speedup, "a number >= 0, or None for the backend's own"),
    ("eager_if", lambda value: value is None or callable(value) or _is_count(value, 1),
     "a predicate, or n >= 1 for every n-th call"),
)  # fmt: skip
"""Option, check, and what is expected."""


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
        for name, is_good, expected in _CHECKS:
            value = getattr(self, name)
            if not is_good(value):
                raise OptionError(f"{name} is {value!r}; expected {expected}")
        if self.fuse_optimizer and not self.prepare_optimizers:
            raise OptionError("fuse_optimizer=True prepares optimizers; expected prepare_optimizers=True with it")
        if isinstance(self.allow, str):
            raise OptionError(f"allow is the string {self.allow!r}; expected a sequence of paths: ({self.allow!r},)")
        self._keep_names("allow", lambda name: True, "paths, such as ('model.calls',)")
        self._keep_names("watch", str.isidentifier, "top-level names of packages, such as ('mypackage',)")
        watch(self.watch)
        try:
            assert self.feed_device is None or self.feed_device.type
        except (RuntimeError, TypeError) as error:
            expected = "a torch.device or its name, such as 'cuda'"
            raise OptionError(f"device is {self.device!r}; expected {expected}") from error
        Schedule.parse(self.verify)
        check_shapes(self.shapes, ("exact", "bucket"), self.buckets, self.mask)
        if self.shapes == "bucket" and self.mode != "train":
            raise OptionError("shapes='bucket' of graph_step is for training; expected mode='train', or graphed")
        if self.buckets is not None:
            Ladders(self.buckets)

    def _keep_names(self, option: str, is_name: Callable[[str], bool], expected: str) -> None:
        """Keep a copy of a sequence of names: later changes of the caller's list are not meant for the step."""
        value = getattr(self, option)
        names = None if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
        if names is None or not all(isinstance(name, str) and is_name(name) for name in names):
            raise OptionError(f"{option} is {value!r}; expected a sequence of {expected}")
        object.__setattr__(self, option, names)

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
        """Whether a busy device needs no program: nothing is asked for that pays there, too."""
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
