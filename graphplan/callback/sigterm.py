"""The ranks' word that one of them got a SIGTERM, passed on without waiting for the device in every step."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import distributed
from typing_extensions import override

from graphplan.callback.instance_patch import InstancePatch, PatchedMethods
from graphplan.callback.logging.async_copies import HostCopy
from graphplan.environment.devices import is_accelerator

_METHOD, _NOTIFIER = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn"
EVERY = 8
"""Steps between two messages; each is read when the next one is sent."""
_log = logging.getLogger("graphplan")


class LaggingSigterm(PatchedMethods):
    """Stands where the epoch loop broadcasts whether rank 0 got a SIGTERM, and reads the answer, before every step.

    The answer is read later, when it has long been there: every rank ends before the same step, as it would have, but
    up to ``2 * EVERY`` steps after the signal, whichever rank got it. Lightning's own signal handler broadcasts at once
    and from rank 0, wherever the other ranks are: where only one gets the signal, the message may meet a collective of
    the step. While batches are trained, this handler only takes a note.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._connector: Any = trainer._signal_connector
        self._asks = trainer.world_size > 1 and hasattr(self._loop, _METHOD)
        super().__init__(*([InstancePatch(self._loop, _METHOD, self._ask)] if self._asks else []))
        self._stock: Any = getattr(self._connector, _NOTIFIER, None)
        self._calls = 0
        self._is_told = False
        self._answer: Callable[[], int] = lambda: 0

    @override
    def install(self) -> None:
        super().install()
        if self._asks:
            self._replace(self._stock, self._take_note)

    @override
    def remove(self) -> None:
        super().remove()
        self._replace(self._take_note, self._stock)
        if self._is_told:
            self._connector.received_sigterm = True

    @staticmethod
    def _replace(old: Any, new: Any) -> None:
        """Put ``new`` in the place of ``old`` among what Lightning calls at a SIGTERM, if it is there."""
        handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
        handlers[:] = [new if handler == old else handler for handler in handlers]

    def _take_note(self, number: int, frame: Any) -> None:
        """In place of Lightning's own handler."""
        if not self._trainer.training:
            # No step is under way.
            self._stock(number, frame)
            return
        if not self._is_told and (launcher := self._trainer.strategy.launcher) is not None:
            launcher.kill(number)
        self._is_told = True

    def _ask(self) -> None:
        """In place of the loop's own method."""
        self._calls += 1
        if self._calls % EVERY:
            return
        rank = self._answer() - 1
        self._answer = self._send()
        if rank >= 0:
            _log.warning("rank %d got a SIGTERM: every rank ends before step %d", rank, self._trainer.global_step)
            self._is_told = True
            with suppress(RuntimeError):
                distributed.barrier()
            raise SIGTERMException

    def _send(self) -> Callable[[], int]:
        """Ask for the highest rank that got a SIGTERM; returns what reads the answer, that rank plus one or 0."""
        device = self._trainer.strategy.root_device
        told = self._is_told or bool(getattr(self._trainer, "received_sigterm", False))
        highest = torch.full((1,), told * (self._trainer.global_rank + 1), device=device)
        work = distributed.all_reduce(highest, distributed.ReduceOp.MAX, async_op=True)
        assert work is not None
        if not is_accelerator(device):
            return lambda: work.wait() and int(highest.item())
        work.wait()  # The device's stream waits, not the host.
        copy = HostCopy(highest)
        return lambda: int(copy.wait().item())
