"""The options of a graphed step, checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from graphplan.backends.backend import check_backend
from graphplan.environment.origin import watch
from graphplan.errors import OptionError, PolicyError
from graphplan.feed.call_arguments import hands_over
from graphplan.specs.options import Checks, check_values, is_bool, is_count
from graphplan.specs.policy import Policy, check_mode
from graphplan.step.buckets import Buckets, Dims, Ladders, PadValue, check_shapes
from graphplan.verify.schedule import parse_verify

EagerIf = Callable[..., bool] | int | None
_FLAGS = ("prepare_optimizers", "fuse_optimizer", "debug", "prefetch")


_CHECKS: Checks = (
    ("warmup_steps", is_count, "an int >= 1: an optimizer makes its state in that step"),
    ("max_graphs", is_count, "an int >= 1"),
    ("max_recaptures", lambda value: is_count(value, 0), "an int >= 0"),
    *((name, is_bool, "True or False") for name in _FLAGS),
    ("outputs", lambda value: value in ("clone", "static"), "'clone' or 'static'"),
    ("memory_budget", lambda value: value is None or is_count(value), "bytes, an int >= 1, or None"),
    ("on_failure", lambda value: value in ("raise", "eager"), "'raise' or 'eager'"),
    ("compile",
     lambda value: is_bool(value) or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)),
     "True, False, or arguments of torch.compile by name, such as {'dynamic': False}"),
    ("min_speedup", lambda value: value is None or is_count(value, 0, int | float),
     "a number >= 0, or None for the backend's own"),
    ("eager_if", lambda value: value is None or callable(value) or is_count(value),
     "a predicate, or n >= 1 for every n-th call"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What :func:`graphplan.graph_step`, :func:`graphplan.graphed` and the callback take.

    Args:
        backend: ``"auto"`` (a CUDA graph if the tensors are on CUDA, the tape on the CPU), ``"cudagraph"``,
            ``"tape"``, or ``"eager"``.
        on_failure: ``"raise"`` (refusals before the first good replay raise, later ones go on eagerly with a warning)
            or ``"eager"`` (always go on, without graphplan).
        allow: paths (or patterns) of Python effects that replays may leave out, such as ``"model.calls"``.
        watch: installed packages (top-level names) whose globals, classes and closures are guarded as the user's own
            are, in the whole process; without it, what they hold there is trusted, and found by checks alone.
        compile: ``True`` compiles the modules among the owners (in a Trainer the module's parts and its ``forward``)
            with ``torch.compile`` before their first step: the captured kernels are compiled ones, and the numbers the
            compiler's. Or arguments of ``torch.compile`` by name; without them nothing is compiled on the CPU.
        max_graphs: number of programs that are kept. One that is no longer in use makes room for another. While all
            are used, or if signatures come that never come again, calls without a program are eager.
        memory_budget: bytes that all programs together may compute in (the callback's: those of training, and as much
            those of evaluation); None: as many as the device has. Programs that were used least recently make room. The
            steps of one that is estimated to be too large are eager, with one warning.
        verify: which replays are checked against the eager step, whose outcome then stands: ``"geometric"`` (1, 2, 4,
            8, … and every 1000th, fewer if they take long; of all shapes together, and the first one of each), n for
            every n-th, or ``"off"``. A check runs the step eagerly besides, and needs copies of parameters and state.
        min_speedup: how many times as fast as eager steps the calls have to be, from the end of one to the end of the
            next (in inference and evaluation: each by itself). The first seven calls (in inference: of each signature)
            are left alone, and five of them are timed. If replays are slower, or the device is busy all the time,
            programs go, and optimizers and Trainers are stock. 0 captures at once and keeps programs all the same.
            None: 1.0 on CUDA, 0 on the CPU.
        shapes: ``"exact"`` (a program for each shape), or ``"bucket"``: batches are padded to a capture size, and
            results cut. A training step is trained on what its batches are padded to. Before padded calls 1, 2, 4, 8, …
            of each size it is rehearsed on the batch as it came and on the padded one, and both are undone: if
            something differs by more than rounding, the step is refused by its name; under ``on_failure="eager"`` this
            and all further batches are trained on as they came. The first two calls (of ``graphed``, the first one),
            batches beyond the largest size, and evaluation in a Trainer are not padded.
        buckets: capture sizes of dimension 0, in elements, or by dimension; see :func:`graphplan.buckets.fit`.
        pad: the number that padding holds; or numbers by argument, by key of a dictionary that is fed (``"labels"``) or
            by path (``"batch[1]"``).
        dynamic: dimensions that may vary, by the same names; by default all but the last of an n-d tensor, all of a 1-d
            one. Only those are padded.
    """

    backend: str = "auto"
    on_failure: str = "raise"
    allow: Sequence[str] = ()
    watch: Sequence[str] = ()
    compile: bool | Mapping[str, Any] = False
    max_graphs: int = 16
    memory_budget: int | None = None
    verify: str | int | None = "geometric"
    min_speedup: float | None = None
    shapes: str = "exact"
    buckets: Buckets | None = None
    pad: PadValue | Mapping[str, PadValue] = 0
    dynamic: Mapping[str, Dims] | None = None

    def shared(self) -> dict[str, Any]:
        """The options that a step underneath has, too, by name."""
        names = {each.name for each in fields(Options)} - {"owners"}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name in names}


@dataclass(frozen=True, kw_only=True)
class PlainOptions(CommonOptions):
    """What :func:`graphplan.graph_step` and :func:`graphplan.graphed` take; a Trainer decides about it itself.

    Args:
        owners: objects whose tensors the function uses, by name or as a sequence. The module or ``self`` that is
            graphed is one, and modules and optimizers that run are found without being named.
        device: where to move fed tensors, in containers of the function's own; without it they must be where the
            function computes.
        mask: the argument that gets a boolean tensor which is true for what is not padding.
    """

    owners: Mapping[str, Any] | Sequence[Any] | None = None
    device: str | torch.device | None = None
    mask: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(CommonOptions):
    """What :func:`graphplan.graph_step` and the callback take.

    Args:
        warmup_steps: number of eager calls before a feed signature is traced; at least 1. Once the step has had so
            many, a further signature that comes often takes one of its own.
        eager_if: a predicate over the step's arguments (in a Trainer: ``(batch, batch_idx)``), or n for every n-th call
            (batch of an epoch): these calls run eagerly.
        prepare_optimizers: whether optimizers may be made capturable while their step runs (see
            :func:`prepare_optimizer`); what was changed is in the report, and not in checkpoints.
        fuse_optimizer: whether foreach optimizers are switched to torch's fused kernels if it has them on the device
            (Adam, AdamW, SGD): faster, with other rounding. On the CPU they are what makes an optimizer capturable.
        max_recaptures: number of captures in a row that may come to fewer than 16 replays each, or of plans that are
            out of date before theirs, before the step is refused.
        debug: wait for the device after each capture and each first replay, and name the program in its errors.
        prefetch: whether inputs of 4 MiB and more in pinned host memory are copied to the device while it is busy with
            the replay before, into buffers as large, one for each program: with ``device=``, or in a Trainer where
            ``transfer`` leaves batches in host memory. They have to be written when they are fed (as a ``DataLoader``'s
            are), not by work that the device still has to do.
    """

    warmup_steps: int = 3
    eager_if: EagerIf = None
    prepare_optimizers: bool = True
    fuse_optimizer: bool = False
    max_recaptures: int = 16
    debug: bool = False
    prefetch: bool = False


@dataclass(frozen=True, kw_only=True)
class StepOptions(TrainingOptions, PlainOptions):
    """What :func:`graphplan.graph_step` takes beside the step.

    Args:
        mode: ``"train"`` or ``"inference"``: which default policy holds.
        policy: which roles are static and which are copied in; overrides ``mode``.
    """

    mode: str = "train"
    policy: Policy | None = None


@dataclass(frozen=True, kw_only=True)
class Options(StepOptions):
    """The options of a step, whichever way they were given; its owners are told apart from them.

    ``autograd``: whether calls whose results shall have gradients flow through them are eager, instead of detached.

    Raises:
        OptionError, PolicyError, BackendError: for values that make no sense.
    """

    outputs: str = "clone"
    autograd: bool = False

    def __post_init__(self) -> None:
        check_mode(self.mode)
        check_backend(self.backend)
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise PolicyError(f"policy is {self.policy!r}; expected a Policy, such as Policy.train()")
        check_values(self, _CHECKS)
        if self.fuse_optimizer and not self.prepare_optimizers:
            raise OptionError("fuse_optimizer=True prepares optimizers; expected prepare_optimizers=True with it")
        self._keep_names("allow", lambda name: True, "paths, such as ('model.calls',)")
        self._keep_names("watch", str.isidentifier, "top-level names of packages, such as ('mypackage',)")
        watch(self.watch)
        try:
            assert self.feed_device is None or self.feed_device.type
        except (RuntimeError, TypeError) as error:
            expected = "a torch.device or its name, such as 'cuda'"
            raise OptionError(f"device is {self.device!r}; expected {expected}") from error
        parse_verify(self.verify)
        check_shapes(self.shapes, self.buckets, self.mask)
        if self.shapes == "bucket" and self.mode != "train" and not self.autograd:
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
    def check_every(self) -> int | None:
        """Which replays are checked; see :func:`parse_verify`."""
        return parse_verify(self.verify)

    def least_speedup(self, device: torch.device) -> float:
        """How often a replay has to fit into an eager step. The tape is there to be tested with, not to be fast."""
        if self.min_speedup is not None:
            return self.min_speedup
        return 0.0 if device.type == "cpu" else 1.0

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
    def feed_device(self) -> torch.device | None:
        """Where fed tensors are moved, if anywhere."""
        return None if self.device is None else torch.device(self.device)
