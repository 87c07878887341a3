"""Logged values that are summed inside the step: the rows, means and errors of Lightning's own log."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from graphplan.callback.lightning_code import KNOWN, digest_of
from tests.lightning.parts import LitDigits, assert_same_fits, fit, loaders, tape, with_step
from tests.twins import line_of


def _five(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    for number in range(5):
        self.log(f"value_{number}", loss * number, on_step=True, on_epoch=True)
    return loss


def _sizes(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """The batch's own size, one that is given, one that follows from the batch; a value of one step only."""
    loss = self.loss_of(batch)
    self.log("own", loss, on_step=False, on_epoch=True)
    self.log("seven", loss.exp(), on_step=True, on_epoch=True, batch_size=7)
    self.log("half", loss / 2, on_step=False, on_epoch=True, batch_size=len(batch[0]) // 2)
    self.log("step", loss.sin())
    return loss


def _kinds(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Values that Lightning casts, reduces otherwise, or gets from several hooks."""
    loss = self.loss_of(batch)
    self.log("half precision", loss.half(), on_step=True, on_epoch=True)
    self.log("double", loss.double(), on_step=True, on_epoch=True)
    self.log("rate", self.optimizers().param_groups[0]["lr"], on_step=True, on_epoch=True)
    self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
    self.log("sum", loss, on_step=True, on_epoch=True, reduce_fx=torch.sum)
    self.log("row", loss.reshape(1), on_step=True, on_epoch=True)
    self.log("plain", loss * 3, on_step=True, on_epoch=True)
    return loss


def _norm(self: Any, *args: Any) -> None:
    self.log("norm", self.net[0].weight.norm(), on_step=True, on_epoch=True)


class _Manual(LitDigits):
    """Two backward passes: Lightning is back in ``training_step`` between a hook's two turns."""

    def __init__(self) -> None:
        super().__init__(schedule=None)
        self.automatic_optimization = False

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("hooked", loss, on_step=True, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for factor in (1.0, 0.5):
            loss = self.loss_of(batch) * factor
            self.log(f"loss {factor}", loss, on_step=True, on_epoch=True)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def _ways(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.log("always", loss, on_step=True, on_epoch=True)
    self.log("odd" if batch_idx % 2 else "even", loss * 2, on_step=True, on_epoch=True)
    return loss


class _Resets(Callback):
    """Resets what was logged, in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 6:
            trainer._results.reset()


CASES: dict[str, tuple[Any, dict[str, Any], list[Any]]] = {
    "five": (with_step(_five), {}, []),
    "sizes": (with_step(_sizes), {}, []),
    "kinds": (with_step(_kinds), {}, []),
    "hooks": (with_step(_five, on_after_backward=_norm, on_before_optimizer_step=_norm), {}, []),
    "hooks in turns": (_Manual, {}, []),
    "two ways": (with_step(_ways), {"variant": lambda batch, index: index % 2, "allow": ["batch_idx"]}, []),
    "reset": (with_step(_five), {}, [_Resets]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_logged_is_what_lightning_logs(name: str, tmp_path: Path) -> None:
    """Rows, means, and what callbacks see after every batch."""
    make, options, others = CASES[name]
    expected = fit(make, tmp_path / "eager", more=[kind() for kind in others])
    found = fit(make, tmp_path / "graphed", tape(**options), more=[kind() for kind in others])
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= 12, found.callback.report()


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
def test_lightning_is_asked_once_for_each_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    plain = _ResultCollection.log

    def log(self: Any, fx: str, name: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return plain(self, fx, name, *args, **kwargs)

    monkeypatch.setattr(_ResultCollection, "log", log)
    monkeypatch.setitem(KNOWN["logs"], digest_of("logs"), "this test's")
    found = fit(with_step(_five), tmp_path, tape(), limit_val_batches=0, max_epochs=3)
    assert found.callback.stats.replayed >= 14
    assert len(calls) == 5, "in the first step, which makes the metrics"


def test_the_sums_are_in_the_plan(tmp_path: Path) -> None:
    plan = fit(with_step(_five), tmp_path, tape()).callback.plan
    assert "logs.group 0" in {external.path for external in plan.state}


def _changes_its_mind(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.log("value", loss, on_step=True, on_epoch=self.on_epoch)
    return loss


class _ChangesMind(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.on_epoch = batch_idx < 8


@pytest.mark.parametrize("callback", [None, tape], ids=["eager", "graphed"])
def test_other_options_are_refused_as_ever(callback: Any, tmp_path: Path) -> None:
    """By Lightning, in the same step."""
    make = with_step(_changes_its_mind, on_epoch=True)
    with pytest.raises(MisconfigurationException, match="twice in `training_step` with different arguments"):
        fit(partial(make), tmp_path, callback and callback(), more=[_ChangesMind()], max_epochs=1)


def _twice(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.log("value", loss, on_epoch=True)
    self.log("value", loss, on_epoch=False)  # culprit
    return loss


class _UserError(Exception):
    """The user's own."""


class _Raises:
    def __rmul__(self, value: Any) -> Any:
        raise _UserError("no such size")


def _raises(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    size: Any = _Raises() if self.raises else 3
    self.log("value", loss, on_epoch=True, batch_size=size)  # culprit
    return loss


class _RaisesLater(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.raises = batch_idx == 8


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [
        (_twice, MisconfigurationException, "twice in `training_step` with different arguments"),
        (_raises, _UserError, "no such size"),
    ],
)
def test_errors_name_the_line_that_logged(step: Any, error: type[Exception], text: str, tmp_path: Path) -> None:
    """The call is made after the step, but the user made it in there."""
    with pytest.raises(error, match=text) as caught:
        fit(with_step(step, raises=False), tmp_path, tape(), more=[_RaisesLater()], max_epochs=1)
    if sys.version_info >= (3, 11):
        told = "\n".join(caught.value.__notes__)
        assert re.search(rf"^self\.log\('value'\) in training_step, called at {line_of(step)}", told, re.MULTILINE), (
            told
        )


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_a_second_fit_of_the_same_trainer(tmp_path: Path) -> None:
    """Its metrics are those of the first one."""
    rows = []
    for name, callback in {"eager": None, "graphed": tape()}.items():
        first = fit(with_step(_five), tmp_path / name, callback, max_epochs=1)
        first.trainer.fit_loop.max_epochs = 2
        first.trainer.fit(first.module, *loaders())
        rows.append((first.trainer.callback_metrics, callback))
    (expected, _), (found, callback) = rows
    assert callback is not None
    assert callback.stats.replayed >= 2
    assert {name: value.item() for name, value in expected.items()} == {n: v.item() for n, v in found.items()}


def _reads_in_the_end(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.log("value", loss, on_step=True, on_epoch=True)
    if batch_idx % 5 == 4:
        self.seen.append(float(self.trainer.callback_metrics["value"]))
    return loss


@pytest.mark.filterwarnings("ignore:graphplan")
def test_some_steps_read_what_others_sum(tmp_path: Path) -> None:
    """The sums are Lightning's whichever way a step goes: one that reads logs them for real, in the middle."""
    make = lambda: with_step(_reads_in_the_end, seen=[])()  # noqa: E731
    options = {"variant": lambda batch, index: index % 5 == 4, "allow": ["batch_idx"], "on_failure": "eager"}
    expected = fit(make, tmp_path / "eager")
    found = fit(make, tmp_path / "graphed", tape(**options))
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= 8, found.callback.report()
