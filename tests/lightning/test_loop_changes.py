"""What changes under the loop seam in the middle of an epoch is seen at the next batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.lightning.parts import LitDigits, assert_same_fits, fit, loaders, tape, trainer_of


class _Gets(Callback):
    """Gives the module a hook of its own in the middle of an epoch."""

    def __init__(self, name: str, hook: Callable[..., Any]) -> None:
        self._name, self._hook = name, hook

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 3):
            setattr(module, self._name, self._hook)


OWN_HOOKS: dict[str, Callable[..., Any]] = {
    "on_train_batch_start": lambda batch, batch_idx: -1 if batch_idx == 7 else None,
    "on_before_batch_transfer": lambda batch, dataloader_idx: [batch[0] * 0.5, batch[1]],
    "on_after_batch_transfer": lambda batch, dataloader_idx: [batch[0] * 2.0, batch[1]],
}


@pytest.mark.parametrize("name", OWN_HOOKS)
def test_a_hook_that_the_module_gets(name: str, tmp_path: Path) -> None:
    """From the next batch on Lightning's own loop runs, which calls it."""
    expected = fit(LitDigits, tmp_path / "eager", more=[_Gets(name, OWN_HOOKS[name])])
    found = fit(LitDigits, tmp_path / "graphed", tape(), more=[_Gets(name, OWN_HOOKS[name])])
    assert found.callback.stats.replayed
    assert_same_fits(expected, found)


class _Notes(Callback):
    """Which batches it was told of."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch_idx)


class _Brings(_Notes):
    """Adds another callback in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 3):
            other = _Notes()
            trainer.callbacks.append(other)
            self.batches = other.batches


def test_a_callback_that_another_one_brings(tmp_path: Path) -> None:
    """It is told of the same batch, as by Lightning."""
    eager, graphed = _Brings(), _Brings()
    fit(LitDigits, tmp_path / "eager", more=[eager])
    found = fit(LitDigits, tmp_path / "graphed", tape(), more=[graphed])
    assert found.callback.stats.replayed
    assert eager.batches == graphed.batches
    assert eager.batches[:2] == [3, 4]


class _Saves(CSVLogger):
    """Counts how often it is saved."""

    count = 0

    def save(self) -> None:
        self.count += 1
        super().save()


class _Stops(ReduceLROnPlateau):
    """Ends the run with its ninth step."""

    trainer: Any = None

    def step(self, *args: Any) -> None:
        super().step(*args)
        if self.last_epoch == 9:
            self.trainer.should_stop = True


class _Plateau(LitDigits):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler, _Stops.trainer = _Stops(optimizer), self.trainer
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "train_loss"}]


def test_a_scheduler_that_stops_the_run(tmp_path: Path) -> None:
    """Loggers are saved, as they are wherever a run stops."""
    saves = []
    for callback in (None, tape(warmup_steps=1)):
        logger = _Saves(tmp_path / str(len(saves)))
        torch.manual_seed(0)
        trainer = trainer_of(tmp_path / str(len(saves)), [callback] if callback else [], logger=logger)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(_Plateau(), loaders()[0])
        assert trainer.global_step == 9
        saves.append(logger.count)
    assert saves[0] == saves[1]
