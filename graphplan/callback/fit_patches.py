"""Patches for a whole fit, replayed or not: SIGTERM on several ranks, and gradient clipping with fused optimizers."""

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

from graphplan.callback.logging.late_numbers import AsyncHostCopy
from graphplan.callback.patches import Patches
from graphplan.environment.devices import is_accelerator

_METHOD, _NOTIFIER = "_broadcast_sigterm_tensor", "_sigterm_notifier_fn"
SIGNAL_INTERVAL = 8  # Steps between two all-reduces. The result of one is read when the next one starts.
_log = logging.getLogger("graphplan")


def allow_fused_clipping(trainer: Trainer, patches: Patches) -> None:
    """Allow gradient clipping with a fused optimizer. Lightning's mixed precision refuses it, because a fused kernel
    takes scaled gradients. bfloat16 has no scale; in float16 the scaler unscales the gradients first and records that.
    """
    plugin: Any = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and type(plugin).clip_gradients is MixedPrecision.clip_gradients:
        patches.method(plugin, "clip_gradients", partial(_clip, plugin))


def _clip(plugin: Any, optimizer: Any, clip_val: int | float = 0.0, *args: Any, **kwargs: Any) -> None:
    """Run in place of ``MixedPrecision.clip_gradients``."""
    if plugin.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False) and clip_val > 0:
        unwrapped = getattr(optimizer, "optimizer", optimizer)
        if plugin.scaler._per_optimizer_states[id(unwrapped)]["stage"] is OptState.READY:
            plugin.scaler.unscale_(unwrapped)
    Precision.clip_gradients(plugin, optimizer, clip_val, *args, **kwargs)


class LaggingSigterm:
    """Replaces the broadcast of rank 0's SIGTERM flag before each step of Lightning's epoch loop. Several ranks
    all-reduce their flags instead, and read the result ``SIGNAL_INTERVAL`` steps later, without waiting. Lightning's
    signal handler broadcasts at once, which may meet a collective of the step. In training, this one only sets a flag.
    """

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._trainer = trainer
        loop: Any = trainer.fit_loop.epoch_loop
        self._connector: Any = trainer._signal_connector
        self._stock: Any = getattr(self._connector, _NOTIFIER, None)
        self._calls = 0
        self._has_signal = False
        self._answer: Callable[[], int] = lambda: 0
        if trainer.world_size > 1 and hasattr(loop, _METHOD):
            patches.method(loop, _METHOD, self._ask)
            _replace_handler(self._stock, self._on_sigterm)
            patches.callback(self._end)

    def _end(self) -> None:
        """Restore Lightning's handler, and pass a noted signal on to Lightning."""
        _replace_handler(self._on_sigterm, self._stock)
        if self._has_signal:
            self._connector.received_sigterm = True

    def _on_sigterm(self, number: int, frame: Any) -> None:
        """Run in place of Lightning's own handler."""
        if not self._trainer.training:
            # No step is running, so Lightning's handler may broadcast.
            self._stock(number, frame)
            return
        if not self._has_signal and (launcher := self._trainer.strategy.launcher) is not None:
            launcher.kill(number)
        self._has_signal = True

    def _ask(self) -> None:
        """Run in place of the loop's ``_broadcast_sigterm_tensor``."""
        self._calls += 1
        if self._calls % SIGNAL_INTERVAL:
            return
        rank = self._answer() - 1
        self._answer = self._send()
        if rank >= 0:
            _log.warning("rank %d got a SIGTERM: every rank ends before step %d", rank, self._trainer.global_step)
            self._has_signal = True
            with suppress(RuntimeError):
                distributed.barrier()
            raise SIGTERMException

    def _send(self) -> Callable[[], int]:
        """Start an all-reduce. Return a function to read the result: the highest rank with a SIGTERM plus one, or 0."""
        device = self._trainer.strategy.root_device
        told = self._has_signal or bool(getattr(self._trainer, "received_sigterm", False))
        highest = torch.full((1,), told * (self._trainer.global_rank + 1), device=device)
        work = distributed.all_reduce(highest, distributed.ReduceOp.MAX, async_op=True)
        assert work is not None
        if not is_accelerator(device):
            return lambda: work.wait() and int(highest.item())
        work.wait()  # The device's stream waits, not the host.
        copy = AsyncHostCopy(highest)
        return lambda: int(copy.wait().item())


def _replace_handler(old: Any, new: Any) -> None:
    """Replace ``old`` by ``new`` in Lightning's list of SIGTERM handlers, if it is there."""
    handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
    handlers[:] = [new if handler == old else handler for handler in handlers]
