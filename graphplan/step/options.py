"""The options of a graphed step, and their validation."""

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

_CHECKS: Checks = (
    ("warmup_steps", is_count, "an int >= 1: an optimizer makes its state in that step"),
    ("max_graphs", is_count, "an int >= 1"),
    ("max_recaptures", lambda value: is_count(value, 0), "an int >= 0"),
    *((name, is_bool, "True or False") for name in ("prepare_optimizers", "fuse_optimizer", "debug", "prefetch")),
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
    """The options that :func:`graphplan.graph_step`, :func:`graphplan.graphed` and the callback share.

    Args:
        backend: ``"auto"`` (a CUDA graph if the tensors are on CUDA, the tape on the CPU), ``"cudagraph"``,
            ``"tape"``, or ``"eager"``.
        on_failure: ``"raise"`` (a refusal before the first good replay raises; a later one warns, and calls continue
            eagerly) or ``"eager"`` (always warn and continue eagerly).
        allow: paths (or patterns) of Python effects that replays may leave out, such as ``"model.calls"``.
        watch: installed packages (top-level names) whose globals, classes and closures are guarded like the user's own
            code, in the whole process. Without it, their values are not guarded, and only checks find changes.
        compile: ``True`` compiles the modules among the owners (in a Trainer the module's parts and its ``forward``)
            with ``torch.compile`` before their first step: the captured kernels and the numbers are the compiler's. Or
            arguments of ``torch.compile`` by name. With ``True``, nothing is compiled on the CPU.
        max_graphs: number of programs that are kept. One that is no longer in use makes room for another. While all
            are in use, or if signatures never recur, calls without a program are eager.
        memory_budget: bytes of memory that all programs together may use (in the callback: those of training, and as
            much again for those of evaluation). None: as many as the device has. The least recently used programs make
            room. If a program is estimated to be too large, its steps are eager, with one warning.
        verify: which replays are checked against the eager step, whose outcome then stands: ``"geometric"`` (1, 2, 4,
            8, … and every 1000th, fewer if they take long, counted over all shapes, and the first one of each shape), n
            for every n-th, or ``"off"``. A check also runs the step eagerly, and copies parameters and state.
        min_speedup: how many times as fast as eager steps the calls have to be, from the end of one to the end of the
            next (in inference and evaluation: each by itself). The first seven calls (in inference: of each signature)
            run without graphplan, and five of them are timed. If replays are slower, or the device is busy all the
            time, programs are dropped, and optimizers and Trainers are restored. 0 captures at once and keeps programs
            in any case. None: 1.0 on CUDA, 0 on the CPU.
        shapes: ``"exact"`` (a program for each shape), or ``"bucket"``: batches are padded to a capture size, and
            results are cut. A training step trains on the padded batches. Before padded calls 1, 2, 4, 8, … of each
            size, a rehearsal runs the step on the original and on the padded batch, and undoes both. If a value
            differs by more than rounding, the step is refused with the name of the value; under ``on_failure="eager"``,
            this and all further batches are not padded. The first two calls (of ``graphed``, the first one), batches
            beyond the largest size, and evaluation in a Trainer are not padded.
        buckets: capture sizes of dimension 0, in elements, or by dimension; see :func:`graphplan.buckets.fit`.
        pad: the padding value; or values by argument, by key of a fed dictionary (``"labels"``) or by path
            (``"batch[1]"``).
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
        """The values, by name, of the options that :class:`Options` has, too, except ``owners``."""
        names = {each.name for each in fields(Options)} - {"owners"}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name in names}


@dataclass(frozen=True, kw_only=True)
class PlainOptions(CommonOptions):
    """The options of :func:`graphplan.graph_step` and :func:`graphplan.graphed` that a Trainer determines itself.

    Args:
        owners: objects whose tensors the function uses, by name or as a sequence. The graphed module or ``self`` is
            always one, and modules and optimizers that run are discovered without being named.
        device: the device to which fed tensors are moved, in new containers; without it they must be on the device of
            the step.
        mask: the argument that gets a boolean tensor, true for all elements that are not padding.
    """

    owners: Mapping[str, Any] | Sequence[Any] | None = None
    device: str | torch.device | None = None
    mask: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(CommonOptions):
    """The options that :func:`graphplan.graph_step` and the callback share.

    Args:
        warmup_steps: number of eager calls before a feed signature is traced; at least 1. Once the step has had this
            many, a further signature that comes often needs only one of its own.
        eager_if: a predicate over the step's arguments (in a Trainer: ``(batch, batch_idx)``), or n for every n-th call
            (batch of an epoch): these calls run eagerly.
        prepare_optimizers: whether optimizers may be made capturable while their step runs (see
            :func:`prepare_optimizer`). The report lists the changes; checkpoints do not contain them.
        fuse_optimizer: whether foreach optimizers are switched to torch's fused kernels if it has them on the device
            (Adam, AdamW, SGD): faster, with other rounding. On the CPU, optimizers are capturable only with these.
        max_recaptures: number of consecutive captures that may have fewer than 16 replays each, or of plans that may be
            out of date before their capture, before the step is refused.
        debug: wait for the device after each capture and each first replay, and name the program in its errors.
        prefetch: whether inputs of 4 MiB and more in pinned host memory are copied to the device while it runs the
            previous replay, into additional buffers of the same size, one set for each program. It needs ``device=``,
            or a Trainer in which ``transfer`` leaves batches in host memory. The inputs must be complete when they are
            fed (as a ``DataLoader``'s are), not written by device work that is still pending.
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
    """The options of :func:`graphplan.graph_step`.

    Args:
        mode: ``"train"`` or ``"inference"``: selects the default policy.
        policy: which roles are static and which are copied in; overrides the policy of ``mode``.
    """

    mode: str = "train"
    policy: Policy | None = None


@dataclass(frozen=True, kw_only=True)
class Options(StepOptions):
    """The validated options of a step, for every caller. The owners are passed separately.

    ``autograd``: whether calls through which gradients should flow are eager. If False, results are detached.

    Raises:
        OptionError, PolicyError, BackendError: for invalid values.
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
        """Validate and copy a sequence of names, so that later changes of the caller's list do not affect the step."""
        value = getattr(self, option)
        names = None if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
        if names is None or not all(isinstance(name, str) and is_name(name) for name in names):
            raise OptionError(f"{option} is {value!r}; expected a sequence of {expected}")
        object.__setattr__(self, option, names)

    @hands_over
    def asks_eager(self, calls: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True if ``eager_if`` makes this call, the ``calls``-th, eager."""
        if callable(self.eager_if):
            return bool(self.eager_if(*args, **kwargs))
        return self.eager_if is not None and (calls - 1) % self.eager_if == 0

    @property
    def check_every(self) -> int | None:
        """The schedule of checks; see :func:`parse_verify`."""
        return parse_verify(self.verify)

    def least_speedup(self, device: torch.device) -> float:
        """The required speed-up of replays. By default 0 on the CPU, where the tape is for tests and not for speed."""
        if self.min_speedup is not None:
            return self.min_speedup
        return 0.0 if device.type == "cpu" else 1.0

    @property
    def may_stay_eager(self) -> bool:
        """Whether a step on a busy device may stay eager: no option is set that helps there, too."""
        asks = self.compile is not False or self.fuse_optimizer or self.prefetch
        return not asks and not torch.are_deterministic_algorithms_enabled()

    @property
    def pads_rows(self) -> bool:
        """Whether dimension 0 is padded, so that the step may get more rows than the batch has."""
        return self.buckets is not None and 0 in Ladders(self.buckets).dims

    @property
    def feed_device(self) -> torch.device | None:
        """The device to which fed tensors are moved; None if they are not moved."""
        return None if self.device is None else torch.device(self.device)
