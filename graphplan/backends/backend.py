"""The protocol of a backend, which records a function's device work once and can run that work again."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from graphplan.errors import BackendError, CaptureMemoryError, GraphPlanError
from graphplan.specs.roles import Footprint
from graphplan.trace.batch_reads import BatchAnswers
from graphplan.trace.host_transfers import HostProgram, Transfer
from graphplan.trace.rng import SavedStates

BACKENDS = ("auto", "cudagraph", "tape", "eager")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Messages of torch's allocators, CUDA and its libraries for errors that have no class of their own."""


class Recording(Protocol):
    """Recorded device work."""

    nbytes: int
    """Bytes of intermediate memory that the recording keeps."""
    generation: object
    """Recordings of one generation share memory, which is freed when the last of them is reset."""
    is_spoiled: bool
    """Whether eager code has left tensors in the recording's memory, which a replay would overwrite."""

    def replay(self) -> None:
        """Run the recorded work again on the same storages, in the order of the current stream."""

    def reset(self) -> None:
        """Free the memory. A reset recording cannot be replayed."""


@dataclass(frozen=True, slots=True)
class TracedValues:
    """Facts from a step's traces that recording the step needs.

    Attributes:
        reads: values that the step may read on the host: asserted values and constants.
        states: the states of generators that the step saves and restores.
        generators: generators that the step draws from, other than torch's default ones.
        device_constants: tensors that the step makes from Python values on the device.
        transfers: tensors that the step makes on the host and copies to the device.
        host_program: recomputes the transfers that are not constant, and repeats the step's draws on the host.
        answers: values that were read from the batch before the step, if any.
        derives: whether the step uses this package's derivatives (:mod:`graphplan.trace.derivatives`).
        in_mode: whether the step must run in a dispatch mode, as in the traces. There some of autograd's formulas do
            not read on the host, and results differ by rounding from eager steps.
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
    """Records and runs functions."""

    executes: bool
    """Whether :meth:`record` also executes the work (the tape does, stream capture does not)."""

    def record(self, body: Callable[[], Any], traced: TracedValues = NOTHING_TRACED) -> tuple[Recording, Any]:
        """Run ``body`` once while recording it; return the recording and ``body``'s result. ``traced`` has the facts
        from traces of ``body``. Raises CaptureError if the work cannot be recorded; the process can then continue.
        """

    def run(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` eagerly on the stream of captures."""

    def run_between(
        self, body: Callable[[], Any], recording: Recording, nbytes: int, left: Callable[[Any], Iterable[Tensor]]
    ) -> Any:
        """:meth:`run` between two replays of ``recording``, in the memory of its intermediates if :meth:`may_take` is
        False for the ``nbytes`` of ``body``. ``left(result)`` returns the tensors of the result and the owners.
        """
        return self.run(body)

    def note_eager(self) -> None:
        """Note the memory that eager steps have reserved so far. By default do nothing."""
        return

    def may_take(self, nbytes: int) -> bool:
        """Return True if ``nbytes`` more are small relative to the memory of eager steps."""
        return nbytes <= self.room()

    def room(self) -> float:
        """Return the bytes that may still be taken, relative to the memory of eager steps; negative if exceeded."""
        return math.inf

    def needs(self, footprint: Footprint, *, alone: bool) -> int:
        """Estimate the bytes of a recording of such a step: ``alone``, or with others, whose memory it can share."""

    def begin_generation(self) -> None:
        """Let later recordings share memory only among themselves. By default do nothing."""
        return

    def compact(self, tensors: Sequence[Tensor]) -> None:
        """Free unused memory between ``tensors``, which are alone in their storages, by moving them if that frees much.
        By default do nothing.
        """
        return

    def trim(self) -> None:
        """Return unused cached memory to the device. By default do nothing."""
        return


def check_backend(name: str) -> str:
    """Return ``name``. Raises BackendError if it is not one of :data:`BACKENDS`."""
    if name not in BACKENDS:
        raise BackendError(f"no backend is called {name!r}; choose from: {', '.join(BACKENDS)}")
    return name


def resolve_backend(name: str, device: torch.device) -> str:
    """Return the backend that ``name`` means for tensors on ``device``. Raises BackendError if it cannot run there."""
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
    """Return the first line of an error's text, or its type's name if the text is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def refusing_memory() -> Iterator[None]:
    """Turn out-of-memory errors into CaptureMemoryError: the eager step may fit in memory where a capture does not."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, GraphPlanError) or not is_out_of_memory(error):
            raise
        # The traceback's frames would keep the tensors of the unfinished step alive.
        traceback.clear_frames(error.__traceback__)
        raise CaptureMemoryError(
            f"memory ran out while the step was traced or captured ({first_line(error)}). graphplan keeps a copy of "
            "the step's state to undo it, and a capture uses its own memory beside that of eager steps. Make the "
            "batch smaller"
        ) from error
