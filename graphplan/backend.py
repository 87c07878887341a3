"""What a backend is: something that records a function's device work once and can run that work again.

The two implementations are :mod:`graphplan.cudagraph` and :mod:`graphplan.tape`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from graphplan.errors import BackendError

BACKENDS = ("auto", "cudagraph", "tape", "eager")


class Recording(Protocol):
    """Device work recorded once."""

    launches: int
    """Launches that one replay costs the host: one for a CUDA graph, one per recorded operator for the tape."""
    nbytes: int
    """Bytes of intermediate memory that the recording keeps."""

    def replay(self) -> None:
        """Run the recorded work again, on the same storages, ordered on the current stream."""

    def reset(self) -> None:
        """Give the memory back. A reset recording cannot be replayed."""


class Backend(Protocol):
    """Records functions."""

    name: str
    executes: bool
    """Whether :meth:`record` also executes the work (the tape does, stream capture does not)."""

    def record(self, body: Callable[[], Any]) -> tuple[Recording, Any]:
        """Run ``body`` once while recording it; return the recording and ``body``'s result.

        Raises:
            CaptureError: if the work cannot be recorded. The process is left able to go on.
        """

    def run(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` eagerly where a capture would run (its stream)."""


def check_backend(name: str) -> str:
    """``name`` itself.

    Raises:
        BackendError: if it is not one of :data:`BACKENDS`.
    """
    if name not in BACKENDS:
        raise BackendError(f"no backend is called {name!r}; choose from: {', '.join(BACKENDS)}")
    return name


def resolve_backend(name: str, device: torch.device) -> str:
    """The backend that ``name`` means for tensors on ``device``.

    Raises:
        BackendError: if that backend cannot run there.
    """
    check_backend(name)
    if name == "auto":
        by_device = {"cuda": "cudagraph", "cpu": "tape"}
        if device.type not in by_device:
            raise BackendError(f"backend='auto' has no backend for device {device}; pass backend='eager'")
        return by_device[device.type]
    if name == "cudagraph" and device.type != "cuda":
        raise BackendError(
            f"backend='cudagraph' needs tensors on a CUDA device, found {device}; pass backend='tape' or 'auto'"
        )
    return name
