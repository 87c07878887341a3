"""Graphed steps in the ``Trainer`` of transformers. Its loop stays as it is, and each step becomes a replay."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from accelerate.utils import DistributedType
from torch import Tensor
from transformers import Trainer, TrainerCallback

from graphplan.errors import RefusalError
from graphplan.step.graphed_step import GraphedStep, graph_step
from graphplan.step.runner import ADVICE

_ALLOWED = ("*_dataloader_references_ref*", "*accelerator._dataloaders*")
"""References of accelerate to its data loaders. The loop, not the step, decides by them whether the optimizer steps."""


@dataclass
class _Hidden:
    state: Any = None
    in_step: bool = False
    was_read: bool = False
    stood_down: bool = False


_HIDDEN: WeakKeyDictionary[GraphPlanTrainer, _Hidden] = WeakKeyDictionary()
"""Values that the loop changes around each step. The walk over the trainer does not find them here."""


class _AfterStep(TrainerCallback):
    """Synchronizes gradients again after the loop's ``optimizer.step()``, as callbacks' ``zero_grad()`` needs."""

    def __init__(self, gradient_state: Any) -> None:
        self._gradient_state = gradient_state

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._gradient_state._set_sync_gradients(True)


class GraphPlanTrainer(Trainer):
    """A ``Trainer`` that replays its steps: forward, backward, gradient clipping and the optimizer's step.

    ``class Mine(GraphPlanTrainer, SFTTrainer)`` replays the steps of another trainer. Steps, or parts of steps, that
    cannot be replayed run as in ``Trainer``. A warning or the report says why.

    Attributes:
        graph_options: options of :func:`graphplan.graph_step`. ``on_failure`` is ``"eager"`` by default.
        graph_optimizer: whether a replay includes gradient clipping and the optimizer's step, if these can be captured.
        graphed: the step of the latest ``train()``, with ``stats`` and ``report()``; None before its first step.
    """

    graph_options: Mapping[str, Any] = {}
    graph_optimizer: bool = True
    graphed: GraphedStep | None = None
    _grad_norm: tuple[Any] | None = None  # A tuple if the training step has also made the optimizer's step.

    @property
    def state(self) -> Any:
        """The ``TrainerState``. It changes with each step, so a step that reads it is not replayed."""
        hidden = _HIDDEN.setdefault(self, _Hidden())
        hidden.was_read |= hidden.in_step
        return hidden.state

    @state.setter
    def state(self, state: Any) -> None:
        _HIDDEN.setdefault(self, _Hidden()).state = state

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train with replayed steps. Restore the optimizers at the end."""
        self.graphed, _HIDDEN[self].stood_down = None, False
        try:
            return super().train(*args, **kwargs)
        finally:
            self._end()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on one batch; return its loss."""
        hidden, self._grad_norm = _HIDDEN[self], None
        if self.graphed is None and not hidden.stood_down:
            self._begin(model)
        if self.graphed is None or hidden.stood_down:
            return super().training_step(model, inputs, num_items_in_batch)
        inputs = self._prepare_inputs(inputs)
        # Evaluation leaves the model in eval mode, which would need another program.
        model.train()
        hidden.in_step, hidden.was_read = True, False
        try:
            loss, *norm = self._call_graphed(model, inputs, num_items_in_batch)
        finally:
            hidden.in_step = False
        if hidden.was_read:
            self._stand_down(
                "the step reads trainer.state, which changes with each step; expected a step that does not read it: "
                "move that code to a callback"
            )
        if norm:
            self._grad_norm = (*norm,)
            # The replay has stepped. The loop's own optimizer.step() does nothing until :class:`_AfterStep`.
            self.accelerator.gradient_state._set_sync_gradients(False)
        return loss

    def _begin(self, model: Any) -> None:
        if self.args.n_gpu > 1 or self.accelerator.distributed_type != DistributedType.NO:
            self._stand_down("the Trainer uses several devices; expected one process with one device")
            return
        hooks = {type(callback).on_pre_optimizer_step for callback in self.callback_handler.callbacks}
        is_watched = bool(hooks - {TrainerCallback.on_pre_optimizer_step})
        is_left = is_watched or self.accelerator.scaler is not None or not hasattr(Trainer, "_clip_grad_norm")
        if self.graph_optimizer and not is_left:
            self.graphed, self._with_optimizer = (
                self._make(self._step, {"model": model, "optimizer": self.optimizer}),
                True,
            )
            self.callback_handler.callbacks.insert(0, _AfterStep(self.accelerator.gradient_state))
            refusals = self.graphed.machine.refusals
            escalates = refusals.escalates
            refusals.escalates = lambda error: error.component == "optimizer" or escalates(error)
        else:
            why = "graph_optimizer=False, a gradient scaler, a callback's on_pre_optimizer_step, or transformers < 5.6"
            self._begin_without_optimizer(model, why)

    def _begin_without_optimizer(self, model: Any, why: str) -> None:
        self._end()
        # The loop steps the optimizer. As an owner it would be guarded, and its learning rate changes.
        self.graphed, self._with_optimizer = self._make(self._forward_backward, {"model": model}), False
        self.graphed.stats.note(f"forward and backward alone are replayed: {why}")

    def _make(self, step: Any, owners: Mapping[str, Any]) -> GraphedStep:
        options = {"on_failure": "eager", **self.graph_options}
        options["allow"] = (*_ALLOWED, *options.get("allow", ()))
        return graph_step(step, owners=owners, **options)

    def _end(self) -> None:
        callbacks = self.callback_handler.callbacks
        callbacks[:] = [each for each in callbacks if not isinstance(each, _AfterStep)]
        if self.graphed is not None:
            self.graphed.close()

    def _call_graphed(self, model: Any, inputs: Any, num_items: Any) -> Any:
        """Return the loss and, if the call has made the optimizer's step, the norm of the gradients."""
        assert self.graphed is not None
        if self._with_optimizer:
            try:
                return self.graphed(model, inputs, num_items, self.accelerator.sync_gradients)
            except RefusalError as error:
                if error.component != "optimizer":
                    raise
                self._begin_without_optimizer(model, str(error).removesuffix(f". {ADVICE}"))
        return self.graphed(model, inputs, num_items)

    def _forward_backward(self, model: Any, inputs: Any, num_items: Any) -> tuple[Any, ...]:
        return (super().training_step(model, copy(inputs), num_items),)

    def _step(self, model: Any, inputs: Any, num_items: Any, updates: bool) -> tuple[Any, ...]:
        (loss,) = self._forward_backward(model, inputs, num_items)
        if not updates:
            return (loss,)
        norm = super()._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        norm = super()._get_grad_norm(model, norm)
        self.optimizer.step()
        return loss, norm

    def _stand_down(self, why: str) -> None:
        _HIDDEN[self].stood_down = True
        warnings.warn(f"graphplan runs this training eagerly: {why}", UserWarning, stacklevel=3)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs if _HIDDEN[self].in_step else super()._prepare_inputs(inputs)

    def _clip_grad_norm(self, model: Any) -> Any:
        return super()._clip_grad_norm(model) if self._grad_norm is None else self._grad_norm[0]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, grad_norm) if self._grad_norm is None else self._grad_norm[0]
