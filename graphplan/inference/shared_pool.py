"""What several graphed functions share: one stream and one pool of memory, and with them one turn at a time."""

from __future__ import annotations

from threading import Lock, get_ident

import torch

from graphplan.environment.devices import current_stream, is_accelerator
from graphplan.errors import BusyError
from graphplan.step.runner import Backends


class Pool:
    """Memory for the programs of several graphed functions.

    Programs of one pool use the same memory for their intermediates, so they take turns: calls from several threads
    wait for each other, and a stream waits for the work that another stream got before.

    Examples:
        >>> import torch
        >>> from graphplan import Pool, graphed
        >>> pool = Pool()
        >>> first = graphed(torch.nn.Linear(4, 2), pool=pool)
        >>> second = graphed(torch.nn.Linear(2, 1), pool=pool)
        >>> with torch.inference_mode():
        ...     second(first(torch.randn(8, 4))).shape
        torch.Size([8, 1])
    """

    def __init__(self) -> None:
        self.backends = Backends()
        self._lock = Lock()
        self._thread: int | None = None
        self._last: torch.Stream | None = None

    def take(self, device: torch.device | None) -> None:
        """Have the pool until :meth:`give_back`, to compute on ``device``. Raises BusyError if this thread has it."""
        if self._thread == get_ident():
            raise BusyError(
                "a graphed function was called, closed or invalidated from within a call of the same pool; expected "
                "one call at a time, since all work on the same memory. Let the function call what it is made of "
                "instead of itself"
            )
        self._lock.acquire()
        self._thread = get_ident()
        try:
            # This thread's stream waits for the work of the last call, if that was on another stream.
            if device is not None and is_accelerator(device):
                current = current_stream(device)
                if self._last is not None and self._last != current:
                    current.wait_stream(self._last)
                self._last = current
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Let other threads have the pool."""
        self._thread = None
        self._lock.release()
