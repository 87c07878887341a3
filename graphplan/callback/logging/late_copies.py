"""Copies of logged scalars and of the loss. Lightning launches a copy of each at once. A capture makes one copy of all
at its end, of those that the step does not change until then. In traces, the originals' versions show which these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from graphplan.callback.lightning_code import is_known
from graphplan.callback.patches import Patches
from graphplan.observe.watching import Unwatched
from graphplan.program.capture import is_recorded
from graphplan.tensors.deferred import HostCopy, instead, is_deferred, may_be_on_device, value_of
from graphplan.tensors.storages import storage_id
from graphplan.trace.mode import is_traced

LOSS = "loss"  # The key of the loss. The keys of logged values all contain a dot.
_MOST_BYTES = 1 << 16  # A number in a larger storage is copied at once, so that the storage can be freed.
_TO_TENSOR = "_LightningModule__to_tensor"  # The method with which ``LightningModule.log`` copies values.


class LateCopies:
    """Decides which of a module's scalars may be copied at the end of its steps."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._may_wait: dict[str, bool] = {}
        self._numbers: set[str] = set()
        """Keys of numbers that only the host can compute."""
        self._watched: list[tuple[str, Tensor, int]] = []
        """In a trace: the key of each scalar, its original tensor, and the version of the original."""

    def may_wait(self, key: str) -> bool:
        """Return True if the running step is captured, and copies the scalar at its end."""
        return is_recorded() and self._may_wait.get(key, False)

    def watch(self, key: str, *tensors: Tensor) -> None:
        """In a trace, watch whether the step changes ``tensors`` after the scalar was copied."""
        for tensor in tensors if is_traced() else ():
            if type(tensor) is not Tensor or tensor.layout is not torch.strided:
                self._may_wait[key] = False
            else:
                self._watched.append((key, tensor, tensor._version))

    def settle(self) -> None:
        """At the end of the step, decide which watched scalars may be copied late."""
        owned: set[int | None] = set()
        if self._watched:
            # This is not part of the step, and a trace would be slow if it watched each call.
            with Unwatched():
                # A change of a parameter or buffer does not increase the version of a tensor from its ``.data``.
                for part in self._module.modules():
                    held = (*part._parameters.values(), *part._buffers.values())
                    owned.update(storage_id(tensor) for tensor in held if tensor is not None)
        for key, tensor, version in self._watched:
            is_left_alone = tensor._version == version and storage_id(tensor) not in owned
            is_small = 0 < tensor.untyped_storage().nbytes() <= _MOST_BYTES
            self._may_wait[key] = is_left_alone and is_small and self._may_wait.get(key, True)
        self._watched = []

    def defer_logged(self, is_late: Callable[[str], bool], left: Patches) -> None:
        """While a step runs, do not copy logged values whose key ``is_late``, if they can wait."""
        module: Any = self._module
        plain: Callable[..., Tensor] | None = getattr(module, _TO_TENSOR, None)
        if plain is None or _TO_TENSOR in vars(module):
            return

        def to_tensor(value: Any, name: str) -> Any:
            key = f"{module._current_fx_name}.{name}"
            if is_deferred(value) and not may_be_on_device(value):
                self._numbers.add(key)
            if key in self._numbers and isinstance(value, Number):
                # The real log call, after the step, makes it a tensor.
                return value
            if is_deferred(value):
                # Use the dtype that Lightning gives to numbers.
                with instead("constant"):
                    like = plain(0.0, name)
                with instead("operators"):
                    return value.as_tensor(like.dtype, like.device)
            value = value.source if type(value) is HostCopy else value
            if not isinstance(value, Tensor) or not is_late(key):
                return plain(value, name)
            if value.numel() == 1 and self.may_wait(key):
                return value.detach().squeeze()
            self.watch(key, value)
            return plain(value, name)

        self._watched = []
        left.method(module, _TO_TENSOR, to_tensor)

    def as_logged(self, value: Any, key: str, name: str) -> Any:
        """Return ``value``, or the tensor that Lightning makes of it if only the host can compute the number."""
        is_number = key in self._numbers and not isinstance(value, Tensor)
        return getattr(self._module, _TO_TENSOR)(value_of(value), name) if is_number else value

    def defer_loss(self, loop: Any, left: Patches) -> None:
        """While an automatic-optimization step runs, do not copy its loss, nor divide it by one, if it can wait."""
        is_stock = getattr(type(loop), "output_result_cls", None) is ClosureResult
        if is_stock and "output_result_cls" not in vars(loop) and is_known("logs"):
            loop.output_result_cls = SimpleNamespace(from_training_step_output=self._result_of)
            left.callback(delattr, loop, "output_result_cls")

    def _result_of(self, output: Any, normalize: int = 1) -> ClosureResult:
        """Make the ``ClosureResult`` of the output of ``training_step``."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and self.may_wait(LOSS):
            extra = {key: value for key, value in output.items() if key != "loss"} if loss is not output else {}
            result = ClosureResult(None, extra=extra)
            # Division by one keeps the bits of the loss and of its gradient.
            result.closure_loss = loss if normalize == 1 and loss.is_floating_point() else loss / normalize
            result.loss = result.closure_loss.detach()
            return result
        result = ClosureResult.from_training_step_output(output, normalize)
        if isinstance(loss, Tensor) and result.closure_loss is not None:
            self.watch(LOSS, loss, result.closure_loss)
        return result
