"""What a run must be like for its steps to be captured, and what to do where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from graphplan.callback.callback_options import Components
from graphplan.compare.comparing import Checks, Row, contents_of
from graphplan.owners.naming import free_name

STEP_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that Lightning calls inside the step, so that they run in the recording and not in a replay."""
_METHODS = (
    "training_step", "validation_step", "test_step", "predict_step", "backward", "manual_backward", "optimizer_step",
    "optimizer_zero_grad", "toggle_optimizer", "untoggle_optimizer", "configure_gradient_clipping", "clip_gradients",
)  # fmt: skip
"""Methods of a module that Lightning calls inside the step, or the module itself."""


def closed_to_all(trainer: Any) -> str | None:
    """Why nothing of this run can be captured; None if nothing speaks against it."""
    if not isinstance(trainer, Trainer):
        return (
            f"the Trainer is {type(trainer).__module__}'s, and the callback works with lightning.pytorch's: import "
            "lightning.pytorch as pl instead of pytorch_lightning"
        )
    return _closed_strategy(trainer.strategy)


def _closed_strategy(strategy: Any) -> str | None:
    name = type(strategy).__name__
    if isinstance(strategy, SingleDeviceStrategy):
        return None
    if isinstance(strategy, ModelParallelStrategy):
        if strategy.device_mesh["tensor_parallel"].size() == 1:
            return None
        return f"the {name} has tensor parallelism, which is not captured: use tensor_parallel_size=1"
    if not isinstance(strategy, DDPStrategy) or isinstance(strategy, DeepSpeedStrategy):
        return (
            f"the strategy is {name}; only single-device strategies, DDPStrategy and ModelParallelStrategy are "
            "captured: use one of those"
        )
    if strategy._ddp_comm_hook is not None or strategy._model_averaging_period is not None:
        return f"the {name} has a communication hook, which is Python code that a replay would leave out; drop it"
    if strategy._ddp_kwargs.get("find_unused_parameters"):
        return (
            f"the {name} has find_unused_parameters=True, which looks at each step's graph on the host; use all "
            "parameters in each step, or static_graph=True"
        )
    return None


def needed_warmup(strategy: Any) -> int:
    """Eager steps before the trace that the strategy needs to settle: DDP forms its buckets anew in the second one, and
    on CUDA times some of the first ten on the host.
    """
    if not isinstance(strategy, DDPStrategy):
        return 1
    return 11 if strategy.root_device.type == "cuda" else 3


def closed_to_training(trainer: Any, module: LightningModule, components: Components) -> str | None:
    """Why no training step of this run can be captured; None if nothing speaks against it."""
    reason = closed_to_all(trainer)
    if reason is not None:
        return reason
    if trainer._detect_anomaly:
        return "detect_anomaly=True reads every gradient on the host; turn it off"
    if not module.automatic_optimization and not components.both:
        return (
            "components names one side of the step, and with manual optimization the module's own code decides what "
            "comes first: use components='auto', or graph_step in training_step"
        )
    if components.optimizer and not components.both and keeps_optimizer_outside(module) is not None:
        return f"components names the optimizer, which runs on the host: {keeps_optimizer_outside(module)}"
    if module.automatic_optimization and len(trainer.optimizers) != 1:
        return (
            f"the module has {len(trainer.optimizers)} optimizers, and automatic optimization steps exactly one: "
            "return one from configure_optimizers"
        )
    return None


def has_hook(thing: Any, name: str, base: type) -> bool:
    """Whether ``thing`` has another hook than ``base``, of whatever kind: a function, an object, a mock."""
    return getattr(getattr(thing, name), "__func__", None) is not getattr(base, name)


def hooked_callbacks(trainer: Trainer) -> dict[str, Any]:
    """Callbacks with hooks inside the step: their Python state is watched like the module's."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    hooked: dict[str, Any] = {}
    for callback in callbacks:
        if any(has_hook(callback, hook, Callback) for hook in STEP_HOOKS):
            hooked[free_name(f"callbacks[{type(callback).__name__}]", hooked)] = callback
    return hooked


def own_of(places: Sequence[tuple[dict[str, Any], str]]) -> Row:
    """A comparison that holds while every dictionary has what it has under its name now, or lacks it."""
    spaces, names = [space for space, _ in places], [name for _, name in places]
    return ("same_values", spaces, names, list(map(dict.get, spaces, names)))


def members_of(thing: Any, name: str) -> list[Row]:
    """Comparisons that hold while ``thing`` has this list, and nothing else is in it."""
    held = getattr(thing, name)
    return [("same_attributes", [thing], [name], [held]), *contents_of([held])]


class OwnHooks:
    """Tells when a callback comes or goes, or a module or callback gets or loses a hook of its own, on the instance."""

    def __init__(self, trainer: Any, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._checks: Any = None
        self._changes = 0

    def changes(self) -> int:
        """How often that has happened so far."""
        if self._checks is None or not self._checks.hold():
            callbacks = self._trainer.callbacks
            places = [(vars(self._module), name) for name in (*_METHODS, *STEP_HOOKS)]
            places += [(vars(callback), name) for callback in callbacks for name in STEP_HOOKS]
            self._checks = Checks([*members_of(self._trainer, "callbacks"), own_of(places)])
            self._changes += 1
        return self._changes


def keeps_optimizer_outside(module: LightningModule) -> str | None:
    """Why the optimizer step must run on the host in any case; None if it may be captured."""
    if is_overridden("optimizer_step", module):
        return f"{type(module).__name__}.optimizer_step is overridden, so it runs on the host for each step"
    return None
