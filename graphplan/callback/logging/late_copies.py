"""Copies of scalars that Lightning makes at once, made at the step's end, all together.

Lightning copies every value that is logged, and the loss that it hands out: a launch each. The copy is read
after the step, so that one copy of all of them does as well, at the step's end, wherever the step leaves the
originals alone until then. A trace sees whether it does: there each is copied where Lightning copies it, and its memory
watched. A capture, which goes the way that its traces went, makes the late copy of what was never seen changed. Eager
steps copy at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from graphplan.callback.lightning_code import is_known
from graphplan.program.capture import is_recorded
from graphplan.trace.memory_watch import MemoryWatch
from graphplan.trace.mode import watch_memory

LOSS = "loss"
"""The name of the loss among the keys of logged values, each of which has a dot in it."""
_MOST_BYTES = 1 << 16
"""Larger memory is not kept until the step's end for the sake of a number in it."""
_TO_TENSOR = "_LightningModule__to_tensor"
"""What ``LightningModule.log`` copies values with."""


class LateCopies:
    """Knows which of a module's scalars may be copied at the end of its steps."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._may_wait: dict[str, bool] = {}
        self._watched: list[tuple[str, list[MemoryWatch]]] = []

    def may_wait(self, key: str) -> bool:
        """Whether the scalar is copied at the end of the step that is running now."""
        return is_recorded() and self._may_wait.get(key, False)

    def watch(self, key: str, *tensors: Tensor) -> None:
        """A scalar was copied at once. In a trace: see whether the step leaves the memory of ``tensors`` alone."""
        if not all(type(tensor) is Tensor and tensor.layout is torch.strided for tensor in tensors):
            # What other ways through the step were seen to do says nothing about it.
            self._may_wait[key] = False
            return
        watches = [watch for watch in map(watch_memory, tensors) if watch is not None]
        if watches:
            self._watched.append((key, watches))

    def settle(self) -> None:
        """The step is over."""
        for key, watches in self._watched:
            is_left_alone = all(watch.is_intact and watch.nbytes <= _MOST_BYTES for watch in watches)
            self._may_wait[key] = is_left_alone and self._may_wait.get(key, True)
        self._watched = []

    @contextmanager
    def of_logs(self, is_late: Callable[[str], bool]) -> Iterator[None]:
        """While a step runs: logged values whose keys are late ones are not copied if they can wait."""
        module: Any = self._module
        plain: Callable[..., Tensor] | None = getattr(module, _TO_TENSOR, None)
        if plain is None or _TO_TENSOR in vars(module):
            yield
            return

        def to_tensor(value: Any, name: str) -> Tensor:
            key = f"{module._current_fx_name}.{name}"
            if not isinstance(value, Tensor) or not is_late(key):
                return plain(value, name)
            if value.numel() == 1 and self.may_wait(key):
                return value.detach().squeeze()
            self.watch(key, value)
            return plain(value, name)

        vars(module)[_TO_TENSOR] = to_tensor
        self._watched = []
        try:
            yield
        finally:
            del vars(module)[_TO_TENSOR]

    @contextmanager
    def of_loss(self, loop: Any) -> Iterator[None]:
        """While a step of automatic optimization runs: its loss is neither copied nor divided by one if it can wait."""
        stock = type(loop).output_result_cls
        if stock is not ClosureResult or "output_result_cls" in vars(loop) or not is_known("logs"):
            yield
            return
        loop.output_result_cls = _Results(self)
        try:
            yield
        finally:
            del loop.output_result_cls


class _Results:
    """Stands where Lightning's loop has the class of its results, while a step runs."""

    def __init__(self, late: LateCopies) -> None:
        self._late = late

    def from_training_step_output(self, output: Any, normalize: int = 1) -> ClosureResult:
        """What ``ClosureResult`` makes of what ``training_step`` returned."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and self._late.may_wait(LOSS):
            extra = {key: value for key, value in output.items() if key != "loss"} if loss is not output else {}
            result = ClosureResult(None, extra=extra)
            # A quotient by one has the same bits, and so has its gradient.
            result.closure_loss = loss if normalize == 1 and loss.is_floating_point() else loss / normalize
            result.loss = result.closure_loss.detach()
            return result
        result = ClosureResult.from_training_step_output(output, normalize)
        if isinstance(loss, Tensor) and result.closure_loss is not None:
            self._late.watch(LOSS, loss, result.closure_loss)
        return result
