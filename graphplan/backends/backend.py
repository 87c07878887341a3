"""What a backend is: something that records a function's device work once and can run that work again."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from graphplan.errors import BackendError, CaptureMemoryError
from graphplan.specs.roles import Footprint
from graphplan.trace.batch_reads import BatchAnswers
from graphplan.trace.host_transfers import HostProgram, Transfer
from graphplan.trace.rng import SavedStates

BACKENDS = ("auto", "cudagraph", "tape", "eager")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""How torch's allocators, CUDA and its libraries say so where the error is not of a class of its own."""


class Recording(Protocol):
    """Device work recorded once."""

    nbytes: int
    """Bytes of intermediate memory that the recording keeps."""
    generation: object
    """Recordings of one generation share memory, which comes back when the last of them is reset."""
    is_spoiled: bool
    """Eager code has left tensors in the recording's memory, which a replay would overwrite."""

    def replay(self) -> None:
        """Run the recorded work again, on the same storages, ordered on the current stream."""

    def reset(self) -> None:
        """Give the memory back. A reset recording cannot be replayed."""


@dataclass(frozen=True, slots=True)
class TracedValues:
    """What a step's recording has to be given, from the step's traces.

    Attributes:
        reads: what the step may read on the host: values that it asserts, and constants.
        states: the states of generators that the step saves and puts back.
        generators: generators other than torch's default ones that the step draws from.
        device_constants: tensors that the step makes from Python values on the device.
        transfers: tensors that the step makes on the host and copies to the device.
        host_program: what makes those again that are not constant, and draws again what the step draws on the host.
        answers: what was read of the batch before the step, if anything.
        derives: the step has derivatives of this package's (:mod:`graphplan.trace.derivatives`).
        in_mode: the step is to run in a dispatch mode, as in the traces, where some of autograd's formulas do not read
            on the host: results differ by rounding from eager steps.
    """

    reads: Sequence[Any] = ()
    states: SavedStates = SavedStates()  # noqa: RUF009 - it cannot be changed
    generators: Sequence[torch.Generator] = ()
    device_constants: Sequence[Tensor] = ()
    transfers: Sequence[Transfer] = ()
    host_program: HostProgram | None = None
    answers: BatchAnswers | None = None
    in_mode: bool = False
    derives: bool = False


NOTHING_TRACED = TracedValues()


class Backend(Protocol):
    """Records functions."""

    executes: bool
    """Whether :meth:`record` also executes the work (the tape does, stream capture does not)."""

    def record(self, body: Callable[[], Any], traced: TracedValues = NOTHING_TRACED) -> tuple[Recording, Any]:
        """Run ``body`` once while recording it; return the recording and ``body``'s result. ``traced`` is what traces
        of ``body`` have found. Raises CaptureError if the work cannot be recorded. The process is left able to go on.
        """

    def run(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` eagerly where a capture would run (its stream)."""

    def run_between(
        self, body: Callable[[], Any], recording: Recording, nbytes: int, left: Callable[[Any], Iterable[Tensor]]
    ) -> Any:
        """:meth:`run` between two replays of ``recording``, in the memory of its intermediates if the ``nbytes`` that
        ``body`` needs are much beside it. ``left`` gives the tensors that the result and owners lead to afterwards.
        """
        return self.run(body)

    def note_eager(self) -> None:
        """Note what eager steps have taken by now. Nothing to do where memory is no matter."""
        return

    def may_take(self, nbytes: int) -> bool:
        """Return True if ``nbytes`` more are little beside what eager steps have taken."""
        return nbytes <= self.room()

    def room(self) -> float:
        """Bytes more that are little beside what eager steps have taken; below 0 where too much is taken already."""
        return math.inf

    def needs(self, footprint: Footprint, *, alone: bool) -> int:
        """Estimate the bytes of a recording of such a step: ``alone``, or beside others, whose memory it may use."""

    def begin_generation(self) -> None:
        """Have later recordings share memory among themselves only. Nothing to do where each has memory of its own."""
        return

    def trim(self) -> None:
        """Give unused memory back to the device. Nothing to do where nothing is cached."""
        return


def check_backend(name: str) -> str:
    """``name`` itself. Raises BackendError if it is not one of :data:`BACKENDS`."""
    if name not in BACKENDS:
        raise BackendError(f"no backend is called {name!r}; choose from: {', '.join(BACKENDS)}")
    return name


def resolve_backend(name: str, device: torch.device) -> str:
    """The backend that ``name`` means for tensors on ``device``. Raises BackendError if it cannot run there."""
    check_backend(name)
    if name == "auto":
        by_device = {"cuda": "cudagraph", "cpu": "tape"}
        if device.type not in by_device:
            raise BackendError(f"backend='auto' is for CUDA and CPU tensors, found {device}; pass backend='eager'")
        return by_device[device.type]
    if name == "cudagraph" and device.type != "cuda":
        raise BackendError(
            f"backend='cudagraph' needs tensors on a CUDA device, found {device}; pass backend='tape' or 'auto'"
        )
    return name


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` says that memory ran out, on the device or on the host."""
    is_said = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    return is_said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type's name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def refusing_memory() -> Iterator[None]:
    """Turn running out of memory into a CaptureMemoryError: the eager step may well fit where a capture does not."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, CaptureMemoryError) or not is_out_of_memory(error):
            raise
        # The frames would keep the tensors of the half-done step alive.
        traceback.clear_frames(error.__traceback__)
        raise CaptureMemoryError(
            f"memory ran out while the step was traced or captured ({first_line(error)}): to be able to undo it, that "
            "keeps a copy of the step's state, and a capture has memory of its own beside what eager steps use. Make "
            "the batch smaller"
        ) from error
