"""Batches that a replay copies in from host memory itself: only where nobody else is given them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichProgressBar, TQDMProgressBar

from graphplan.callback import callback as callbacks
from graphplan.callback.gates import keeps_stock_transfer, may_read_batch
from tests.lightning.parts import LitDigits, Observer, assert_same_fits, fit, loaders, tape, with_step


def on_cuda(*others: Callback) -> Any:
    """As much of a Trainer on a CUDA device as is asked for."""
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), callbacks=list(others))


class _Checkpoint(ModelCheckpoint):
    """A user's own, without hooks of its own."""


class _Looking(ModelCheckpoint):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Looks at the batch."""


class _Sees(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert all(tensor.device == module.device for tensor in batch)


def _with_hook(name: str) -> LightningModule:
    return with_step(LitDigits.training_step, **{name: lambda self, *args: None})()


def _hooked_instance() -> Callback:
    bar: Any = TQDMProgressBar()
    bar.on_train_batch_end = lambda *args: None
    return bar


REASONS: dict[str, tuple[Callable[[], Any], Callable[[], Callback], str | None]] = {
    "nobody": (LitDigits, Callback, None),
    "stock callbacks": (LitDigits, _Checkpoint, None),
    "bars": (LitDigits, RichProgressBar, None),
    "an observer": (LitDigits, Observer, "Observer has hooks for batches"),
    "one that overrides": (LitDigits, _Looking, "_Looking has hooks for batches"),
    "an instance's own": (LitDigits, _hooked_instance, "TQDMProgressBar has hooks for batches"),
    "the module": (lambda: _with_hook("on_train_batch_end"), Callback, "Variant has hooks for batches"),
    "the module at the start": (lambda: _with_hook("on_train_batch_start"), Callback, "Variant has hooks for batches"),
}


@pytest.mark.parametrize("name", REASONS)
def test_who_may_look_at_a_batch(name: str) -> None:
    make, other, reason = REASONS[name]
    assert keeps_stock_transfer(on_cuda(other()), make()) == reason


def test_on_the_cpu_nothing_is_moved() -> None:
    trainer = on_cuda()
    trainer.strategy.root_device = torch.device("cpu")
    assert keeps_stock_transfer(trainer, LitDigits()) == "the step runs on the CPU, where the batches are"


def test_callbacks_that_leave_batches_alone() -> None:
    assert not may_read_batch(LearningRateMonitor())
    assert may_read_batch(Observer())


class _Joins(Callback):
    """Brings a callback that looks at batches along, after the first epoch."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.callbacks.append(_Sees())


@pytest.mark.parametrize("more", [[], [_Joins()]], ids=["alone", "looked at later"])
def test_a_step_that_takes_batches_itself(
    more: list[Callback], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run, where the step moves what it is fed. (Here that is from the host to the host.)"""
    monkeypatch.setattr(Observer, "on_train_batch_end", Callback.on_train_batch_end)
    expected = fit(LitDigits, tmp_path / "eager", more=more)
    asked: list[Any] = []
    monkeypatch.setattr(callbacks, "keeps_stock_transfer", lambda *args: asked.append(args))
    found = fit(LitDigits, tmp_path / "graphed", tape(), more=more)
    assert len(asked) == 1
    assert found.callback.stats.replayed >= 10, found.callback.report()
    assert_same_fits(expected, found)


@pytest.mark.parametrize(
    "options",
    [{"transfer": "stock"}, {"loop": "stock"}, {"eager_if": 7}, {"variant": lambda batch, batch_idx: batch_idx % 2}],
    ids=lambda options: next(iter(options)),
)
def test_who_asks_for_batches_gets_them_moved(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(callbacks, "keeps_stock_transfer", lambda *args: asked.append(args))
    fit(LitDigits, tmp_path, tape(**options), max_epochs=1)
    assert not asked


def test_batches_are_plain() -> None:
    """What the loop seam hands on unmoved: the digits come as a list of two tensors."""
    batch = next(iter(loaders()[0]))
    assert type(batch) is list and all(type(tensor) is torch.Tensor for tensor in batch)
