"""Rows of steps for the loggers: the same ones in the same order, whenever their numbers arrive."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor

from graphplan.callback.logging import late_numbers as rows
from graphplan.callback.logging.late_numbers import AsyncHostCopy
from tests.crossing import by_key, each
from tests.lightning.endings import assert_nothing_installed, run_until
from tests.lightning.parts import Fit, LitDigits, assert_same_fits, fit, tape, with_step


def _step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.log("loss", loss, on_step=True, on_epoch=True)
    self.log("double", loss.double() * 2)
    self.log("whole", (loss * 100).long().float())
    return loss


ARRIVALS = by_key({"at once": 0, "a little later": 3, "only where somebody waits": 10**9})


@pytest.fixture
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Numbers that arrive so many looks later; grows with each look."""
    looks: list[None] = []

    class Late(AsyncHostCopy):
        left = getattr(request, "param", 3)

        def has_arrived(self) -> bool:
            looks.append(None)
            self.left -= 1
            return self.left < 0

    monkeypatch.setattr(rows, "AsyncHostCopy", Late)
    return looks


class Logs(Callback):
    """Has to do with the logger after some batches: logs through it, or through its writer."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 2:
            number = trainer.global_step
            if self.way == "logger":
                trainer.logger.log_metrics({"own": 1.5 * number}, step=number)
            elif self.way == "writer":
                trainer.logger.experiment.log_metrics({"own": 1.5 * number}, step=number)
            elif self.way == "hyperparameters":
                trainer.logger.log_hyperparams({"number": number})
            elif self.way == "copies":
                again = [copy.deepcopy(trainer.logger), pickle.loads(pickle.dumps(trainer.logger))]
                assert all(isinstance(logger, CSVLogger) and logger.experiment is not None for logger in again)


@each(every=[1, 3], way=["nobody", "logger", "writer", "hyperparameters", "copies"], late=ARRIVALS, indirect=["late"])
@pytest.mark.crossed(2)
def test_rows_are_lightnings(way: str, every: int, late: list[None], tmp_path: Path) -> None:
    options: dict[str, Any] = {"log_every_n_steps": every, "val_check_interval": 5}
    expected = fit(with_step(_step), tmp_path / "eager", more=[Logs(way)], **options)
    found = fit(with_step(_step), tmp_path / "graphed", tape(), more=[Logs(way)], **options)
    assert_same_fits(expected, found)
    assert late, "rows came late"
    assert_nothing_installed(found.trainer, found.module)


def test_rows_of_lightnings_own_loop(late: list[None], tmp_path: Path) -> None:
    """They are looked for when the next one comes, and when the epoch ends."""
    options: dict[str, Any] = {"log_every_n_steps": 3, "val_check_interval": 5}
    expected = fit(with_step(_step), tmp_path / "eager", **options)
    found = fit(with_step(_step), tmp_path / "graphed", tape(loop="stock"), **options)
    assert_same_fits(expected, found)
    assert 0 < len(late) < 20, "no step but those that are logged"


def test_no_number_is_read_one_by_one(late: list[None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[None] = []
    plain = Tensor.item
    monkeypatch.setattr(Tensor, "item", lambda self: (seen.append(None), plain(self))[1])
    counts = []
    for every in (10, 1):
        seen.clear()
        fit(with_step(_step), tmp_path / str(every), tape(verify="off"), log_every_n_steps=every)
        counts.append(len(seen))
    assert counts[1] == counts[0], "what is read is rows of epochs, whose ends wait for the device anyway"


@pytest.mark.usefixtures("late")
def test_what_is_on_its_way_when_a_fit_ends_early_is_written(tmp_path: Path) -> None:
    texts = []
    for name, callback in {"eager": None, "graphed": tape()}.items():
        trainer, module = run_until(ZeroDivisionError, "in the middle", with_step(_step, on_train_batch_end=_raises),
                                    tmp_path / name, callback)  # fmt: skip
        assert_nothing_installed(trainer, module)
        texts.append(Path(trainer.logger.log_dir, "metrics.csv").read_text())
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) > 16


def _raises(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    if self.trainer.global_step == 17:
        raise ZeroDivisionError("in the middle")


class Own(Logger):
    """A logger of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []
        self.name, self.version = "own", 0  # type: ignore[misc]

    name = version = ""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((dict(metrics), step))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def _steps_of_its_own(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.log("step", self.net[1].num_batches_tracked.float() * 2)
    return _step(self, batch, batch_idx)


@pytest.mark.parametrize("other", [True, False], ids=["a logger of the user's", "a step that is logged"])
def test_rows_that_cannot_come_late(other: bool, late: list[None], tmp_path: Path) -> None:
    found: list[tuple[Fit, Any]] = []
    for name, callback in {"eager": None, "graphed": tape()}.items():
        own = Own()
        loggers = [CSVLogger(tmp_path / name, name="logs", version=0), own]
        make: type[LitDigits] = with_step(_step if other else _steps_of_its_own)
        options: dict[str, Any] = {"logger": loggers if other else loggers[0]}
        found.append((fit(make, tmp_path / name, callback, **options), own.rows))
    assert_same_fits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not late


def test_a_row_waits_for_no_more_than_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not run ahead of the device for ever."""
    waiting: list[int] = []
    plain = rows.PendingRows.look
    monkeypatch.setattr(AsyncHostCopy, "has_arrived", lambda self: False)
    monkeypatch.setattr(rows.PendingRows, "look", lambda self: (waiting.append(len(self.pending)), plain(self))[1])
    fit(with_step(_step), tmp_path, tape(), max_epochs=1)
    assert max(waiting) == 2


def _writes_in_each(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.logger.log_metrics({"own": loss.item(), "number": self.global_step}, step=self.global_step)
    return loss


def _writes_tensors(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.logger.log_metrics({"own": loss.detach()}, step=self.global_step)
    return loss


def _writes_now_and_then(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    if batch_idx % 5 == 0:
        self.logger.log_metrics({"own": loss.item()}, step=batch_idx)
    return loss


@each(step=[_writes_in_each, _writes_tensors, _writes_now_and_then])
def test_rows_of_the_steps_own_are_written_once(step: Any, tmp_path: Path) -> None:
    """What a logger has got stays there, so a step that is about to give it stand-ins is undone before it does."""
    kind = with_step(step)
    expected = fit(kind, tmp_path / "eager", max_epochs=12)
    with pytest.warns(UserWarning, match=r"graphplan runs .*\.item\(\)"):
        found = fit(kind, tmp_path / "graphed", tape(on_failure="eager"), max_epochs=12)
    assert_same_fits(expected, found)
    rows = [Path(each.trainer.logger.log_dir, "metrics.csv").read_text() for each in (expected, found)]
    assert rows[0] == rows[1]
    stats = found.callback.stats
    # Calls that come to the rows are refused once for all, whatever number each has.
    assert stats.traced <= 6, found.callback.report()
    assert (stats.replayed > 0) is (step is _writes_now_and_then)
