"""Hooks inside the step and around each batch."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from graphplan.feed.call_arguments import hands_over
from graphplan.specs.paths import free_name

STEP_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that Lightning calls inside the step: a replay does not run them."""
START, END = "on_train_batch_start", "on_train_batch_end"
_LIGHTNINGS = ("lightning", "pytorch_lightning")
_BLIND = (
    "ModelCheckpoint", "TQDMProgressBar", "RichProgressBar", "LearningRateMonitor", "Timer", "DeviceStatsMonitor",
    "EarlyStopping", "OnExceptionCheckpoint",
)  # fmt: skip
"""Lightning's callbacks whose hooks do not look at the batch that they are given."""


def has_hook(thing: Any, name: str, base: type) -> bool:
    """Return True if ``thing`` overrides the hook of ``base``: by a function, an object, a mock."""
    return getattr(getattr(thing, name), "__func__", None) is not getattr(base, name)


def hooked_callbacks(trainer: Trainer) -> dict[str, Any]:
    """Callbacks with hooks inside the step, by name. They are owners, as the module is."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    hooked: dict[str, Any] = {}
    for callback in callbacks:
        if any(has_hook(callback, hook, Callback) for hook in STEP_HOOKS):
            hooked[free_name(f"callbacks[{type(callback).__name__}]", hooked)] = callback
    return hooked


def hands_out_batch(callback: Any) -> bool:
    """Return True if a callback's hooks may look at the batch."""
    kind = next((k for k in type(callback).__mro__ if START in vars(k) or END in vars(k)), None)
    known = kind is not None and kind.__module__.partition(".")[0] in _LIGHTNINGS and kind.__name__ in _BLIND
    return not known or START in vars(callback) or END in vars(callback)


@hands_over
def call_hooks(trainer: Any, module: Any, hook: str, *args: Any) -> None:
    """Call the hook of those callbacks that have it, as Lightning does."""
    inner = vars(module)
    # A module's own __setattr__ takes longer than most hooks.
    before, inner["_current_fx_name"] = inner["_current_fx_name"], hook
    for callback in trainer.callbacks:
        if has_hook(callback, hook, Callback):
            getattr(callback, hook)(trainer, module, *args)
    inner["_current_fx_name"] = before
