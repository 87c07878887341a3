"""Values for the progress bar: the numbers of a run without the callback, and no reading of the device for nobody."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torchmetrics.classification import MulticlassAccuracy

from tests.lightning.parts import LitDigits, fit, tape, with_step

PER_FIT = 2 * 10
"""Steps of two epochs."""


def _step(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, logger=False)
    self.log_dict({"twice": 2 * loss, "half": loss / 2}, prog_bar=True, logger=False)
    return loss


class Bar(ProgressBar):
    """Asks for what it would show, after every ``every`` batches and at the end of epochs."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every
        self.shown: list[Any] = []

    def disable(self) -> None:
        """Nothing is printed anyway."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        if (args[2] + 1) % self.every == 0:
            self.shown.append(dict(self.get_metrics(trainer, module)))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.shown.append(dict(self.get_metrics(trainer, module)))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.shown.append(dict(self.get_metrics(trainer, module)))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows whenever a value is read from a tensor."""
    seen: list[None] = []
    plain = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: (seen.append(None), plain(self))[1])
    return seen


def _fit(folder: Path, callback: Any, *others: Callback) -> Any:
    bar = bool(others) and isinstance(others[0], ProgressBar)
    options = {"enable_progress_bar": True} if bar else {}
    return fit(with_step(_step), folder, callback, more=others, max_epochs=2, **options)


@pytest.mark.parametrize("every", [1, 3])
def test_a_bar_shows_the_same_numbers(every: int, tmp_path: Path) -> None:
    eager, graphed = Bar(every), Bar(every)
    expected = _fit(tmp_path / "eager", None, eager)
    found = _fit(tmp_path / "graphed", tape(), graphed)
    assert found.callback.stats.replayed >= 8
    assert eager.shown == graphed.shown
    assert {"loss_step", "twice", "half"} <= eager.shown[1].keys()
    assert all(type(value) is float for value in found.trainer.progress_bar_metrics.values())
    assert expected.trainer.progress_bar_metrics == found.trainer.progress_bar_metrics


def test_values_that_nobody_asks_for_are_not_read(reads: list[None], tmp_path: Path) -> None:
    """Lightning reads each of them in every step."""
    counts = {}
    for name, make in {"eager": lambda: None, "graphed": partial(tape, verify="off")}.items():
        for logged in (True, False):
            reads.clear()
            module = with_step(_step) if logged else LitDigits
            fit(module, tmp_path / f"{name} {logged}", make(), max_epochs=2, num_sanity_val_steps=0)
            counts[name, logged] = len(reads)
    assert counts["eager", True] - counts["eager", False] >= 3 * PER_FIT
    assert counts["graphed", True] - counts["graphed", False] < 3 * 4, counts


class _Asks(Callback):
    """Reads other metrics than the bar's after every batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        assert trainer.callback_metrics["twice"].dim() == 0


def test_asking_for_other_metrics_reads_nothing(reads: list[None], tmp_path: Path) -> None:
    _fit(tmp_path / "without", tape(verify="off"))
    quiet = len(reads)
    reads.clear()
    found = _fit(tmp_path / "with", tape(verify="off"), _Asks())
    assert len(reads) == quiet
    assert type(found.trainer._logger_connector) is _LoggerConnector


class _PerClass(LitDigits):
    """Logs a metric of ten numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(10, average=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, prog_bar=True)
        return self.loss_of(batch)


@pytest.mark.parametrize("callback", [None, tape], ids=["eager", "graphed"])
def test_more_than_one_element_is_refused_as_ever(callback: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not contain a single element, thus it cannot be converted"):
        fit(_PerClass, tmp_path, callback and callback(), max_epochs=1)


def test_a_stock_bar_runs(tmp_path: Path) -> None:
    found = _fit(tmp_path, tape(), TQDMProgressBar(refresh_rate=4))
    assert found.callback.stats.replayed >= 8
