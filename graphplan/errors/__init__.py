"""Error classes.

Every class derives from :class:`GraphPlanError` and from the builtin error that a caller would catch anyway. Refusals
have a :class:`SkipReason`, so that statistics can count why calls were eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from typing_extensions import Self


class SkipReason(Enum):
    """Why a call was run eagerly instead of being replayed.

    Examples:
        >>> import torch
        >>> from graphplan import SkipReason, graph_step
        >>> step = graph_step(lambda x: x * 2, eager_if=lambda x: len(x) > 4)
        >>> _ = step(torch.ones(8))
        >>> step.stats.skipped[SkipReason.EAGER_IF]
        1
    """

    HOST_SCALAR = "a Python number that a replay would freeze"
    HOST_SYNC = "the step reads device values on the host"
    HOST_EFFECT = "the step changes Python state in a way that a replay cannot repeat"
    CONTROL_FLOW = "the step does not run the same operators each time"
    UNOWNED_TENSOR = "the step depends on a tensor that is neither an argument nor part of an owner"
    TEMPORARY_COPY = "the step copies from temporary host memory"
    GENERATOR_SEEK = "the step sets a random generator's state"
    CARRY = "a tensor that the step rebinds changes its shape, dtype or device"
    OUTPUT = "the step returns a Python value that changes"
    OPTIMIZER = "the optimizer cannot be captured"
    UNCOVERED_ROLE = "the policy has no storage for the role of a tensor"
    FEED = "the arguments cannot be copied into the static inputs"
    CAPTURE = "the backend could not record the step"
    EAGER_IF = "eager_if asked for an eager step"
    GRADIENT = "the call needs gradients: call it under torch.no_grad() or torch.inference_mode()"
    BUCKET = "no capture size fits"
    PADDING = "padding changes the result"
    CHECK = "the effect of padding could not be checked"
    BACKEND_EAGER = "backend='eager'"
    MAX_GRAPHS = "the limit on the number of programs is reached"
    GUARD = "a tensor or value was replaced in a way that a replay cannot follow"
    RECAPTURE = "captures repeat too often to save time"
    VERIFY = "a replay differed from the eager step"
    MEMORY = "there is no memory for a program"
    SLOWER = "replays take longer than eager steps"
    UNBORN = "the gradient scaler skipped the step that would have made the optimizer's state"
    PEERS = "other ranks are not ready to capture yet"
    PEER = "another rank cannot capture the step"
    SURROUNDINGS = "a mode, a transform or forward-mode AD is active around the call, and a replay would ignore it"
    BUSY = "the device is busy all the time, so replays can save almost nothing (min_speedup=0 captures anyway)"
    SHAPE = "no program exists yet for this batch signature"


class GraphPlanError(Exception):
    """Root of all errors raised by graphplan."""

    def briefly(self) -> Self:
        """Return the error without its traceback, to be raised again: its message names the cause."""
        return self.with_traceback(None)


class PolicyError(GraphPlanError, ValueError):
    """A mode or role does not exist, or a policy contradicts itself."""


class BackendError(GraphPlanError, ValueError):
    """A backend does not exist, or this machine or these tensors cannot use it."""


class OwnersError(GraphPlanError, TypeError):
    """``owners=`` is neither a mapping nor a sequence."""


class OptionError(GraphPlanError, ValueError):
    """An option has an invalid value or type."""


class ClosedError(GraphPlanError, RuntimeError):
    """A step or program was used after ``close()``, or a plan after its function was deleted."""


class BusyError(GraphPlanError, RuntimeError):
    """A step was called, closed or invalidated while one of its calls was running."""


class CopyError(GraphPlanError, TypeError):
    """A graphed step was pickled or copied."""


class NotCapturedError(GraphPlanError, RuntimeError):
    """A capture was due and did not happen."""


class RefusalError(GraphPlanError):
    """Root of the refusals: the step as written cannot be replayed correctly.

    ``reason`` is set per class. ``component`` is the part of the step that causes the refusal (``"optimizer"`` if the
    operator ran inside an optimizer's ``step``, else ``"step"``). ``path``, if there is one, can be passed to
    ``allow=``: replays then leave that value alone.
    """

    reason: SkipReason = SkipReason.CAPTURE
    is_raised: bool = False
    """Whether it is always raised, however refusals are handled otherwise."""

    def __init_subclass__(cls, reason: SkipReason | None = None) -> None:
        super().__init_subclass__()
        cls.reason = reason or cls.reason

    def __init__(self, message: str, *, component: str = "step", path: str | None = None) -> None:
        super().__init__(message)
        self.component = component
        self.path = path


class FeedError(RefusalError, ValueError, reason=SkipReason.FEED):
    """The arguments do not fit: structure, shape, dtype, device, ``grad_fn``, or a leaf that cannot be copied."""


class DeviceError(FeedError):
    """A fed tensor is on another device than the step: an eager step would fail as well."""


class UncoveredRoleError(RefusalError, ValueError, reason=SkipReason.UNCOVERED_ROLE):
    """An external's role is in neither ``static_roles`` nor ``copy_roles``."""


class OptimizerError(RefusalError, ValueError, reason=SkipReason.OPTIMIZER):
    """The optimizer's step cannot be captured on this device."""


class HostScalarError(RefusalError, RuntimeError, reason=SkipReason.HOST_SCALAR):
    """An operator gets a Python number, or a constant made from one, that differs from step to step."""


class LearningRateError(HostScalarError):
    """The step's own code uses a learning rate that the optimizer reads from the device.

    The traced step that reveals this is no valid eager step: in an eager step, the code gets a number.
    """


class HostSyncError(RefusalError, RuntimeError, reason=SkipReason.HOST_SYNC):
    """The step reads a tensor's values, or a shape that depends on them, on the host. ``where`` describes the place."""

    where: str = ""


class HostEffectError(RefusalError, RuntimeError, reason=SkipReason.HOST_EFFECT):
    """The step changes a Python value in a way that a replay cannot repeat."""


class ControlFlowError(RefusalError, RuntimeError, reason=SkipReason.CONTROL_FLOW):
    """Two consecutive steps ran different operators, or the same ones on different operands."""


class UnownedTensorError(RefusalError, RuntimeError, reason=SkipReason.UNOWNED_TENSOR):
    """The step mutates a tensor that is neither fed nor owned, or uses a different one in each step."""


class TemporaryCopyError(RefusalError, RuntimeError, reason=SkipReason.TEMPORARY_COPY):
    """The step copies host memory to the device."""


class SplitError(RefusalError, RuntimeError, reason=SkipReason.CONTROL_FLOW):
    """A model cannot be split into pieces."""


class GeneratorSeekError(RefusalError, RuntimeError, reason=SkipReason.GENERATOR_SEEK):
    """The step sets a generator's state or seed, or draws from a generator that a replay cannot advance."""


class CarryError(RefusalError, RuntimeError, reason=SkipReason.CARRY):
    """A rebound tensor's new value does not fit the old one's storage."""


class OutputError(RefusalError, RuntimeError, reason=SkipReason.OUTPUT):
    """The step returns a Python value that differs from step to step."""


class CaptureError(RefusalError, RuntimeError, reason=SkipReason.CAPTURE):
    """The backend failed while recording, or recorded something other than the plan."""


class FaultError(CaptureError):
    """An object of the step raised an error while graphplan read it, or graphplan failed: the step is not at fault."""


class CaptureMemoryError(CaptureError, torch.OutOfMemoryError):
    """A traced or captured call ran out of memory."""


class CheckMemoryError(GraphPlanError, RuntimeError):
    """The eager step of a check ran out of memory, while other ranks wait for its collectives."""


class MemoryBudgetError(CaptureError, reason=SkipReason.MEMORY):
    """A program takes, by estimate or in fact, more memory than the budget or the device has: its steps are eager."""


class GradientError(GraphPlanError, RuntimeError):
    """A backward pass outside the step reaches a tensor that a replay left in an owner."""


class EffectError(GraphPlanError, RuntimeError):
    """graphplan, or an object that it uses, failed in the middle of a replay, or of undoing a step. The owners are
    neither in the state before the call nor in the state after it.
    """


class StaleError(GraphPlanError, RuntimeError):
    """A static output was used after a later replay had overwritten it."""


class GuardError(RefusalError, RuntimeError, reason=SkipReason.GUARD):
    """A program was replayed although something that it depends on has moved or changed."""


class OutcomeError(GuardError, reason=SkipReason.HOST_SYNC):
    """In the middle of a replay, the step reads another value on the host than in its traces. The replay was undone.
    ``refusal`` is the error that refuses the step if the value changes often.
    """

    def __init__(self, message: str, *, refusal: HostSyncError) -> None:
        super().__init__(message)
        self.refusal = refusal


class SurroundingsError(RefusalError, RuntimeError, reason=SkipReason.SURROUNDINGS):
    """A mode, a transform or forward-mode AD is active around a call that can only compile, capture or replay."""


class RecaptureError(RefusalError, RuntimeError, reason=SkipReason.RECAPTURE):
    """A value that the step depends on changes so often that captures do not pay."""


class PeerError(RefusalError, RuntimeError, reason=SkipReason.PEER):
    """Another rank of the same training cannot capture its step."""


class DeviceFault(GraphPlanError, RuntimeError):
    """With ``debug=True``: the device failed in a program's capture or first replay. The message names the program."""


class VerifyError(RefusalError, RuntimeError, reason=SkipReason.VERIFY):
    """A check found that a replay differs from the eager step. The eager step's outcome stands.

    ``result`` is what the eager step returned.
    """

    def __init__(self, message: str, *, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class PaddingError(VerifyError, reason=SkipReason.PADDING):
    """Padding a call to its capture size changes its outcome. The call has not run, unless ``result`` is set."""


class SlowerError(RefusalError, RuntimeError, reason=SkipReason.SLOWER):
    """Replays were measured to be slower than eager steps: the step stands down."""


class Faults:
    """The first error of graphplan's own in the middle of a step, kept until the step ends, since the step goes on."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    def note(self, error: Exception) -> None:
        """Keep ``error``, unless an earlier one is kept."""
        if self._first is None:
            self._first = error

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep an error that the block raises."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it would come out in the step
            self.note(error)

    def check(self) -> None:
        """Raise the error that was kept, if there is one."""
        first, self._first = self._first, None
        if first is not None:
            raise first
