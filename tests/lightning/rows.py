"""A row of the matrix: how a run differs from the plain one, and the comparison of its two fits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    Callback,
)
from torch.utils.data import DataLoader

from tests.facts import assert_same, flatten
from tests.lightning.parts import (
    Fit,
    LitDigits,
    Observer,
    assert_same_fits,
    digits,
    ignore_lightning_warnings,
    tape,
    trainer_of,
    with_step,
)
from tests.twins import keep

BATCH, EPOCHS = 24, 3
PER_EPOCH = 6
FULL = EPOCHS * PER_EPOCH - 4
"""Replays with one eager, two traced and one captured step before the first."""
RECAPTURED = FULL - 5
"""With one recapture, whose two traces the end of an epoch may part."""


@dataclass
class Row:
    """How a run differs from the plain one."""

    make: Callable[[], L.LightningModule] = LitDigits
    replayed: int = FULL
    callbacks: Callable[[], list[Callback]] = list
    collate: Callable[[Any], Any] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    seen: Callable[[Any], Any] = lambda callbacks: None
    """What else is to be equal: read from the row's callbacks after the fit."""


class GradientsAndBatches(Callback):
    """Keeps gradients and batches as they are after each batch."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(keep([batch, *(p.grad for p in module.parameters())]))


def run(row: Row, folder: Path, callback: Any) -> tuple[Fit, Any]:
    """Fit a row, with or without the callback; returns the fit and what else is to be compared."""
    torch.manual_seed(0)
    module, observer, own = row.make(), Observer(), row.callbacks()
    # Before the row's callbacks: they may step on what an ordinary callback would see.
    callbacks = [observer, *own, *([callback] if callback else [])]
    trainer = trainer_of(folder, callbacks, **{"max_epochs": EPOCHS, **row.trainer})
    train, validation = digits()
    train = torch.utils.data.Subset(train, range(BATCH * PER_EPOCH))
    shuffle = torch.Generator().manual_seed(5)
    data = DataLoader(train, BATCH, shuffle=True, generator=shuffle, collate_fn=row.collate)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        ignore_lightning_warnings()
        for text in ("SWA is currently only supported", "provided params to be frozen", "returned `None`"):
            warnings.filterwarnings("ignore", message=f".*{text}")
        trainer.fit(module, data, DataLoader(validation, 50))
    return Fit(module, trainer, observer, callback, folder), row.seen(own)


def check(row: Row, folder: Path) -> None:
    """Fit a row twice and compare."""
    expected, seen = run(row, folder / "eager", None)
    found, also = run(row, folder / "graphed", tape(**{"warmup_steps": 1, **row.options}))
    assert_same_fits(expected, found)
    assert_same(flatten(seen=seen), flatten(seen=also))
    assert found.callback.stats.replayed >= row.replayed, found.callback.report()


def variant(base: type[LitDigits] = LitDigits, **members: Any) -> type[LitDigits]:
    """A module class with other hooks."""
    return with_step(members.pop("training_step", base.training_step), base, **members)


def scheduled(schedule: Callable[[Any], Any]) -> Callable[[], LitDigits]:
    """A module with another schedule."""
    return partial(LitDigits, schedule=schedule)


def kept(callbacks: list[Any]) -> Any:
    """What the first callback kept."""
    return callbacks[0].kept
