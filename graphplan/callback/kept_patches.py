"""Patches that stay for a whole fit, replayed or not: SIGTERM among ranks, and clipping beside fused optimizers."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import distributed
from torch.amp.grad_scaler import OptState

from graphplan.callback.logging.late_numbers import HostCopy
from graphplan.callback.patches import Patches
from graphplan.environment.devices import is_accelerator

_METHOD, _NOTIFIER = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn"
EVERY = 8  # Steps between two messages; each is read when the next one is sent.
_log = logging.getLogger("graphplan")


def allow_fused_clipping(trainer: Trainer, patches: Patches) -> None:
    """Allow gradient clipping beside a fused optimizer, which Lightning's mixed precision refuses: a fused kernel takes
    scaled gradients. In bfloat16 there is no scale; in float16 the scaler unscales them first, which it notes.
    """
    plugin: Any = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and type(plugin).clip_gradients is MixedPrecision.clip_gradients:
        patches.method(plugin, "clip_gradients", partial(_clip, plugin))


def _clip(plugin: Any, optimizer: Any, clip_val: int | float = 0.0, *args: Any, **kwargs: Any) -> None:
    """In place of ``MixedPrecision.clip_gradients``."""
    if plugin.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False) and clip_val > 0:
        unwrapped = getattr(optimizer, "optimizer", optimizer)
        if plugin.scaler._per_optimizer_states[id(unwrapped)]["stage"] is OptState.READY:
            plugin.scaler.unscale_(unwrapped)
    Precision.clip_gradients(plugin, optimizer, clip_val, *args, **kwargs)


class LaggingSigterm:
    """Replaces the epoch loop's broadcast, before every step, of whether rank 0 got a SIGTERM, among several ranks: the
    answer is read ``EVERY`` steps later, without waiting. Lightning's signal handler broadcasts at once, which may meet
    a collective of the step; while batches are trained, this one only takes a note.
    """

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._trainer = trainer
        loop: Any = trainer.fit_loop.epoch_loop
        self._connector: Any = trainer._signal_connector
        self._stock: Any = getattr(self._connector, _NOTIFIER, None)
        self._calls = 0
        self._is_told = False
        self._answer: Callable[[], int] = lambda: 0
        if trainer.world_size > 1 and hasattr(loop, _METHOD):
            patches.method(loop, _METHOD, self._ask)
            _replace_handler(self._stock, self._take_note)
            patches.callback(self._end)

    def _end(self) -> None:
        """Lightning learns of a signal that was noted."""
        _replace_handler(self._take_note, self._stock)
        if self._is_told:
            self._connector.received_sigterm = True

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


def _replace_handler(old: Any, new: Any) -> None:
    """Put ``new`` in the place of ``old`` among what Lightning calls at a SIGTERM, if it is there."""
    handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
    handlers[:] = [new if handler == old else handler for handler in handlers]
