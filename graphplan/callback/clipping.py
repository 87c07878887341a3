"""Gradient clipping beside a fused optimizer, which Lightning's mixed precision refuses.

It refuses because a fused kernel takes scaled gradients, so that what it would clip is scaled too. In bfloat16 there is
no scale, so that nothing speaks against it; in float16 it is right once the scaler has unscaled the gradients, which
torch's scaler then knows in its step.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch.amp.grad_scaler import OptState

from graphplan.callback.instance_patch import InstancePatch, PatchedMethods


def needed_clipping(trainer: Trainer) -> list[PatchedMethods]:
    """What a fit cannot be without in which the user's own optimizer is fused."""
    fused = any(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in trainer.optimizers)
    return [FusedClipping(trainer)] if fused else []


class FusedClipping(PatchedMethods):
    """Stands where mixed precision clips, on the Trainer's plugin, unless that has a way of its own."""

    def __init__(self, trainer: Trainer) -> None:
        self._plugin: Any = trainer.precision_plugin
        kind = type(self._plugin)
        clips = issubclass(kind, MixedPrecision) and kind.clip_gradients is MixedPrecision.clip_gradients
        super().__init__(*([InstancePatch(self._plugin, "clip_gradients", self._clip)] if clips else []))

    def _clip(self, optimizer: Any, clip_val: int | float = 0.0, *args: Any, **kwargs: Any) -> None:
        """In place of ``MixedPrecision.clip_gradients``."""
        scaler = self._plugin.scaler
        takes_scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
        if scaler is not None and takes_scaled and clip_val > 0:
            unwrapped = getattr(optimizer, "optimizer", optimizer)
            if scaler._per_optimizer_states[id(unwrapped)]["stage"] is OptState.READY:
                scaler.unscale_(unwrapped)
        Precision.clip_gradients(self._plugin, optimizer, clip_val, *args, **kwargs)
