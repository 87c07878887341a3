"""Lightning's word from rank 0 that the run is to end, passed on without waiting for the device in every step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import distributed

from graphplan.callback.copies import HostCopy
from graphplan.callback.standins import StandIn, StandsIn

_METHOD = "_broadcast_sigterm_tensor"
EVERY = 8
"""Steps between two messages; each is read when the next one is sent."""


class LaggingSigterm(StandsIn):
    """Stands where the epoch loop broadcasts whether rank 0 got a SIGTERM, and reads the answer, before every step.

    The answer is read later, when it has long been there: every rank ends before the same step, as it would have, but
    up to ``2 * EVERY`` steps after the signal.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop.epoch_loop
        asks = trainer.world_size > 1 and hasattr(self._loop, _METHOD)
        super().__init__(*([StandIn(self._loop, _METHOD, self._ask)] if asks else []))
        self._calls = 0
        self._answer: Callable[[], bool] = lambda: False

    def _ask(self) -> None:
        """In place of the loop's own method."""
        self._calls += 1
        if self._calls % EVERY:
            return
        ends = self._answer()
        self._answer = self._send()
        if ends:
            with suppress(RuntimeError):
                distributed.barrier()
            raise SIGTERMException

    def _send(self) -> Callable[[], bool]:
        """Broadcast, and return what reads the answer."""
        device = self._trainer.strategy.root_device
        told = int(bool(getattr(self._trainer, "received_sigterm", False)))
        flag = torch.full((1,), told, device=device)
        work = distributed.broadcast(flag, src=0, async_op=True)
        if device.type != "cuda":
            return lambda: work.wait() is not None and bool(flag.item())
        work.wait()  # The device's stream waits, not the host.
        copy = HostCopy(flag)
        return lambda: bool(copy.wait().item())
