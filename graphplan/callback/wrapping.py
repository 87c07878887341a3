"""Modules that a strategy wraps around the LightningModule, and what they note in Python from step to step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

_OWNER = "strategy.model"
_DDP_NOTES = ("require_forward_param_sync",)
"""Whether DDP is to send buffers around before the next forward pass: not after one without gradients, or one whose
gradients were kept on the rank. A step branches on it and leaves it another one."""


class Wrapped:
    """The wrapper of one run's module, if there is one."""

    def __init__(self, trainer: Trainer) -> None:
        model = trainer.strategy.model
        self._ddp = model if isinstance(model, DistributedDataParallel) else None

    @property
    def owners(self) -> dict[str, Any]:
        """The wrapper by its name."""
        return {} if self._ddp is None else {_OWNER: self._ddp}

    @property
    def effects(self) -> tuple[str, ...]:
        """Paths of its notes: they are kept by the seam."""
        return tuple(f"{_OWNER}.{note}" for note in _DDP_NOTES)

    def notes(self) -> tuple[Any, ...]:
        """What it notes now."""
        return () if self._ddp is None else tuple(getattr(self._ddp, note) for note in _DDP_NOTES)

    def note(self, values: tuple[Any, ...]) -> None:
        """Have it note what it would have noted in a step that was replayed."""
        for name, value in zip(_DDP_NOTES, values, strict=False):
            setattr(self._ddp, name, value)
