"""What a ``training_step`` may look like, return and log: the fit with the callback is the fit without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric, MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from graphplan import ControlFlowError, HostScalarError, HostSyncError
from tests.lightning.parts import LitDigits, assert_fit_equals_eager, assert_same_fits, fit, tape, with_step

FULL = 21
"""Replays of three epochs: 27 full batches less the six before the first replay."""


def only_batch(self: Any, batch: Any) -> Tensor:
    return self.loss_of(batch)


def with_index(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch)


def with_loader_index(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
    return self.loss_of(batch)


def with_varargs(self: Any, *args: Any) -> Tensor:
    return self.loss_of(args[0])


def with_other_name(self: Any, data: Any, batch_idx: int) -> Tensor:
    return self.loss_of(data)


def returns_dict(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
    x, y = batch
    logits = self(x)
    loss = torch.nn.functional.cross_entropy(logits, y)
    return {"loss": loss, "logits": logits.detach(), "nested": [y, {"scale": 2.0}]}


STEPS = [only_batch, with_index, with_loader_index, with_varargs, with_other_name, returns_dict]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_signatures_and_returned_values(step: Callable[..., Any], tmp_path: Path) -> None:
    """Every signature that Lightning takes; callbacks get the outputs that they get from an eager step."""
    assert_fit_equals_eager(with_step(step), tmp_path, replayed=FULL)


def _log(self: Any, name: str, value: Any, **options: Any) -> None:
    self.log(name, value, **options)


def _log_several(self: Any, loss: Tensor) -> None:
    for number in range(5):
        self.log(f"v{number}", loss * number, on_step=True, on_epoch=True)


LOGS: dict[str, Callable[[Any, Tensor], None]] = {
    "on_step": lambda self, loss: _log(self, "a", loss, on_step=True, on_epoch=False),
    "on_epoch": lambda self, loss: _log(self, "a", loss, on_step=False, on_epoch=True),
    "both": lambda self, loss: _log(self, "a", loss, on_step=True, on_epoch=True),
    "prog_bar": lambda self, loss: _log(self, "a", loss, prog_bar=True, on_epoch=True),
    "max": lambda self, loss: _log(self, "a", loss, reduce_fx="max", on_epoch=True),
    "min on both": lambda self, loss: _log(self, "a", loss, reduce_fx="min", on_step=True, on_epoch=True),
    "sum": lambda self, loss: _log(self, "a", loss, reduce_fx="sum", on_step=False, on_epoch=True),
    "batch_size": lambda self, loss: _log(self, "a", loss, on_step=False, on_epoch=True, batch_size=7),
    "log_dict": lambda self, loss: self.log_dict({"a": loss, "b": loss.exp()}, on_step=True, on_epoch=True),
    "no logger": lambda self, loss: _log(self, "a", loss, logger=False, on_step=True, on_epoch=True),
    "several": lambda self, loss: _log_several(self, loss),
    "detached": lambda self, loss: _log(self, "a", loss.detach() * 2, on_step=True, on_epoch=True),
}


@pytest.mark.parametrize("name", LOGS)
def test_logged_values(name: str, tmp_path: Path) -> None:
    """Rows, epoch means, ``callback_metrics`` at every batch: as logged by an eager fit."""

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        LOGS[name](self, loss)
        return loss

    found = assert_fit_equals_eager(with_step(step), tmp_path, replayed=FULL)
    if name != "no logger":
        assert len(found.rows.splitlines()) > 3


class Metered(LitDigits):
    """Logs torchmetrics objects: one through ``forward``, one through ``update`` and ``compute``."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.mean = MeanMetric(nan_strategy="disable")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.error(logits.detach().softmax(1).amax(1), torch.ones_like(y))
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()


def test_torchmetrics(tmp_path: Path) -> None:
    """Metric states are carried through replays and reset at the epoch's end."""
    assert_fit_equals_eager(Metered, tmp_path, replayed=FULL)


class Counted(LitDigits):
    """Logs an accuracy whose implementation makes a tensor with a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return torch.nn.functional.cross_entropy(logits, y)


def test_torchmetrics_that_read_values(tmp_path: Path) -> None:
    """``bincount`` in a metric is refused by name; on request the fit is eager, metrics included."""
    with pytest.raises(HostSyncError, match="bincount"):
        fit(Counted, tmp_path / "raise", tape())
    expected = fit(Counted, tmp_path / "eager")
    with pytest.warns(UserWarning, match="bincount"):
        found = fit(Counted, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)


class Collecting(LitDigits):
    """Collects outputs on the module, as the Lightning documentation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.means: list[Tensor] = []
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.outputs.append(loss.detach())
        self.calls += 1
        return loss

    def on_train_epoch_end(self) -> None:
        self.means.append(torch.stack(self.outputs).mean())
        self.outputs.clear()


def test_collected_outputs_and_counters(tmp_path: Path) -> None:
    """``self.outputs.append(loss)`` and ``self.calls += 1`` go on in replays."""
    found = assert_fit_equals_eager(Collecting, tmp_path, replayed=FULL)
    assert found.module.calls == 30
    assert len(found.module.means) == 3


class Averaging(LitDigits):
    """Rebinds a buffer in every step and reads it in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.center = 0.9 * self.center + 0.1 * logits.detach().mean(0)
        return torch.nn.functional.cross_entropy(logits - self.center, y)


def test_rebound_buffers(tmp_path: Path) -> None:
    """Carries work inside a Trainer."""
    assert_fit_equals_eager(Averaging, tmp_path, replayed=FULL)


def scaled_by_index(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * (1 + batch_idx)


def branching_on_index(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    return loss.mul(2) if batch_idx % 2 else loss.add(1)


def branching_on_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    return loss.mul(2) if self.global_step % 2 else loss.add(1)


_INDEX = r"computes with batch_idx at test_training_step\.py:\d+.*on_train_batch_end.*eager_if=.*allow=\('batch_idx'"
_PATH = r"operator \d+ is aten\.\w+\S* at test_training_step\.py:\d+ in branching_on_step.*control flow changes"
INDEX_STEPS = [
    (scaled_by_index, HostScalarError, _INDEX),
    (branching_on_index, HostScalarError, _INDEX),
    (branching_on_step, ControlFlowError, _PATH),
]


@pytest.mark.parametrize(("step", "error", "text"), INDEX_STEPS, ids=lambda value: getattr(value, "__name__", ""))
def test_steps_that_depend_on_the_batch_index(step: Any, error: type[Exception], text: str, tmp_path: Path) -> None:
    """``batch_idx`` and ``global_step`` are Python numbers that change: refused, or eager with the right numbers."""
    with pytest.raises(error, match=text):
        fit(with_step(step), tmp_path / "raise", tape())
    expected = fit(with_step(step), tmp_path / "eager")
    with pytest.warns(UserWarning, match=f"runs this step eagerly: .*{text}"):
        found = fit(with_step(step), tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed == 0


def scaled_by_epoch(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * (1 + self.current_epoch)


def late_branch(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    return loss * 2 if self.trainer.global_step >= 15 else loss


@pytest.mark.filterwarnings("ignore:graphplan")
@pytest.mark.parametrize("step", [scaled_by_epoch, late_branch], ids=lambda step: step.__name__)
def test_numbers_that_change_long_after_the_capture(step: Any, tmp_path: Path) -> None:
    """What both traces read alike and a later step reads differently is watched: never silently wrong."""
    expected = fit(with_step(step), tmp_path / "eager")
    found = fit(with_step(step), tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)


def test_eager_if(tmp_path: Path) -> None:
    """Batches that are meant to run Python do: every fifth, or those a predicate picks."""
    seen: list[int] = []

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch)

    def predicate(batch: Any, batch_idx: int) -> bool:
        seen.append(batch_idx)
        return batch_idx % 5 == 0

    by_number = assert_fit_equals_eager(with_step(step), tmp_path / "n", replayed=12, callback=tape(eager_if=5))
    by_choice = partial(assert_fit_equals_eager, with_step(step), tmp_path / "p", replayed=12)
    assert by_choice(callback=tape(eager_if=predicate)).callback.stats.replayed <= 21
    assert set(seen) == set(range(10))
    assert by_number.callback.stats.replayed <= 21
