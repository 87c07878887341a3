"""What changes under the loop seam in the middle of an epoch is seen at the next batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.crossing import each
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


class _Sets(Callback):
    """Sets something of the Trainer's in the middle of an epoch, and notes when others save and validate."""

    def __init__(self, setting: Callable[[Any], None]) -> None:
        self._setting = setting
        self.notes: list[tuple[str, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 3):
            self._setting(trainer)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.notes.append(("validates", trainer.global_step))

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.notes.append(("saves", trainer.global_step))


class _Eager(ModelCheckpoint):
    """One with a hook of its own, which saves nothing."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.dirpath = self.dirpath


def _save_often(trainer: Any) -> None:
    trainer.checkpoint_callback._every_n_train_steps = 2


def _save_always(trainer: Any) -> None:
    trainer.checkpoint_callback._train_time_interval = timedelta(0)


def _save_by_itself(trainer: Any) -> None:
    checkpoint = trainer.checkpoint_callback
    checkpoint.on_train_batch_end = lambda *args: trainer.save_checkpoint(Path(checkpoint.dirpath) / "own.ckpt")


SETTINGS: dict[str, Callable[[Any], None]] = {
    "saves every other step": _save_often,
    "saves after any time": _save_always,
    "saves in a hook of its own": _save_by_itself,
    "a shorter epoch": lambda trainer: setattr(trainer.fit_loop, "max_batches", 6),
    "fewer steps": lambda trainer: setattr(trainer.fit_loop.epoch_loop, "max_steps", 15),
    "accumulates": lambda trainer: setattr(trainer, "accumulate_grad_batches", 2),
    "clips": lambda trainer: setattr(trainer, "gradient_clip_val", 0.01),
    "validates in the middle": lambda trainer: setattr(trainer, "val_check_batch", 6),
    "stops": lambda trainer: setattr(trainer, "should_stop", True),
    "no list of callbacks that was there": lambda trainer: setattr(trainer, "callbacks", list(trainer.callbacks)),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.crossed(2)
def test_a_setting_that_changes(name: str, tmp_path: Path) -> None:
    """Whatever Lightning asks after each batch counts as soon as it does there."""
    eager, graphed = _Sets(SETTINGS[name]), _Sets(SETTINGS[name])
    expected = fit(LitDigits, tmp_path / "eager", more=[eager])
    found = fit(LitDigits, tmp_path / "graphed", tape(), more=[graphed])
    assert found.callback.stats.replayed
    assert_same_fits(expected, found)
    assert eager.notes == graphed.notes


@pytest.mark.parametrize("kind", [ModelCheckpoint, _Eager])
@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.crossed(2)
def test_checkpoints_after_batches(kind: type[ModelCheckpoint], every: int | None, tmp_path: Path) -> None:
    """A checkpoint callback that saves when epochs end only has nothing to do after batches; any other one has."""
    notes = []
    for callback in (None, tape()):
        folder, sets = tmp_path / str(len(notes)), _Sets(lambda trainer: None)
        saves = kind(folder, every_n_train_steps=every, save_top_k=-1)
        fit(LitDigits, folder, callback, more=[saves, sets])
        notes.append((sets.notes, sorted(path.name for path in folder.glob("*.ckpt"))))
    assert notes[0] == notes[1]


class _Acts(_Notes):
    """Changes who has hooks, from within its own hook, and notes which batches it was told of itself."""

    def __init__(self, name: str, act: Callable[..., None]) -> None:
        super().__init__()
        setattr(self, name, lambda trainer, module, *args: self._tell(act, trainer, module, args[-1]))

    def _tell(self, act: Callable[..., None], trainer: Any, module: Any, batch_idx: int) -> None:
        self.batches.append(batch_idx)
        if (trainer.current_epoch, batch_idx) == (1, 3):
            act(trainer, module, self)


class _Told(_Notes):
    """Notes starts of batches as well."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(-batch_idx)


def _gives_module_a_hook(trainer: Any, module: Any, owner: _Acts) -> None:
    module.on_train_batch_end = lambda outputs, batch, batch_idx: owner.batches.append(100 + batch_idx)


def _gives_next_a_hook(trainer: Any, module: Any, owner: _Acts) -> None:
    following = trainer.callbacks[trainer.callbacks.index(owner) + 1]
    hook = lambda *args: owner.batches.append(100 + args[-1])  # noqa: E731
    following.on_train_batch_start = following.on_train_batch_end = hook


ACTS: dict[str, Callable[..., None]] = {
    "takes the next one away": lambda trainer, module, owner: trainer.callbacks.pop(trainer.callbacks.index(owner) + 1),
    "takes itself away": lambda trainer, module, owner: trainer.callbacks.remove(owner),
    "gives the next one a hook": _gives_next_a_hook,
    "gives the module a hook": _gives_module_a_hook,
}


@each(name=["on_train_batch_start", "on_train_batch_end"], act=ACTS)
@pytest.mark.crossed(2)
def test_hooks_that_change_while_hooks_are_called(act: str, name: str, tmp_path: Path) -> None:
    """Whoever is told of the batch by Lightning, which goes through its list as it is by then, is told of it."""
    told = []
    for callback in (None, tape()):
        more = [_Acts(name, ACTS[act]), Callback() if act == "gives the next one a hook" else _Told(), _Told()]
        fit(LitDigits, tmp_path / str(len(told)), callback, more=more)
        told.append([getattr(one, "batches", None) for one in more])
    assert told[0] == told[1]


class _Switches(LitDigits):
    """Steps its optimizer itself from the middle of the second epoch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


def test_optimization_that_becomes_manual(tmp_path: Path) -> None:
    """From then on Lightning leaves schedulers to the module."""

    def more() -> list[Callback]:
        return [_Sets(lambda trainer: setattr(trainer.lightning_module, "automatic_optimization", False))]

    expected = fit(_Switches, tmp_path / "eager", more=more())
    found = fit(_Switches, tmp_path / "graphed", tape(), more=more())
    assert found.callback.stats.replayed
    assert_same_fits(expected, found)
