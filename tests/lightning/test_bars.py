"""Progress bars of fast runs: drawn as often as somebody can see it, and right in the end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, TQDMProgressBar

from graphplan.callback.logging import bars
from tests.lightning.parts import LitDigits, Observer, assert_same_fits, digits, fit, tape, with_step

BATCH = 2
STEPS = len(digits()[0]) // BATCH
"""Of one epoch."""


class CountingBar(TQDMProgressBar):
    """Counts how often it shows metrics."""

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate)
        self.shown: list[int] = []

    def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
        self.shown.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        return super().get_metrics(trainer, module)

    def on_train_end(self, *args: Any) -> None:
        self.last = (self.train_progress_bar.n, self.train_progress_bar.postfix)
        super().on_train_end(*args)


class DecidingBar(CountingBar):
    """Has an opinion of its own on when to be drawn."""

    def _should_update(self, current: int, total: int) -> bool:
        return super()._should_update(current, total)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still: whatever waits for some of it to pass does not happen."""
    monkeypatch.setattr(bars, "perf_counter", lambda: 1.0)


def run(folder: Path, bar: Callback, callback: Any, **options: Any) -> Any:
    """One epoch of many small batches."""
    defaults = {"max_epochs": 1, "enable_progress_bar": True, "num_sanity_val_steps": 0}
    return fit(LitDigits, folder, callback, batch=BATCH, more=[bar], **{**defaults, **options})


@pytest.mark.usefixtures("still")
@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
@pytest.mark.parametrize("end", [{}, {"max_steps": 100}], ids=["whole epoch", "stopped"])
def test_a_bar_is_drawn_now_and_then(end: dict[str, Any], tmp_path: Path) -> None:
    """The first update, then one per interval, and the last one, where the epoch ended."""
    eager, graphed = CountingBar(), CountingBar()
    expected = run(tmp_path / "eager", eager, None, **end)
    found = run(tmp_path / "graphed", graphed, tape(), **end)
    steps = end.get("max_steps", STEPS)
    assert found.callback.stats.replayed > steps - 10
    assert len(eager.shown) >= steps
    assert len(graphed.shown) <= 4
    assert graphed.shown[0] == eager.shown[0]
    assert eager.last == graphed.last
    assert graphed.last[0] == steps
    assert_same_fits(expected, found)


@pytest.mark.usefixtures("still")
@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
@pytest.mark.parametrize("disabled", [False, True])
def test_a_bar_that_is_drawn_seldom_ends_where_lightnings_does(disabled: bool, tmp_path: Path) -> None:
    """At its last update that was due, or where somebody has turned it off."""

    class Off(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if disabled and batch_idx == 75:
                trainer.progress_bar_callback.disable()

    ends = []
    for name, callback in (("eager", None), ("graphed", tape())):
        bar = CountingBar(10)
        options: dict[str, Any] = {"enable_progress_bar": True, "num_sanity_val_steps": 0, "max_steps": 103}
        fit(LitDigits, tmp_path / name, callback, batch=BATCH, more=[bar, Off()], max_epochs=1, **options)
        ends.append(bar.last[0])
    assert ends == [70 if disabled else 100] * 2


class FinalCounts(TQDMProgressBar):
    """Keeps the count of each bar when it is closed or its epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[str, int]] = []

    def on_train_epoch_end(self, *args: Any) -> None:
        super().on_train_epoch_end(*args)
        self.counts.append(("train", self.train_progress_bar.n))

    def on_validation_end(self, *args: Any) -> None:
        super().on_validation_end(*args)
        self.counts += [("validation", self.val_progress_bar.n), ("train", self.train_progress_bar.n)]


@pytest.mark.usefixtures("still")
@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
@pytest.mark.parametrize(
    "options",
    [{}, {"val_check_interval": 0.3}, {"limit_val_batches": 7}, {"max_steps": 130}],
    ids=["whole epochs", "validation within", "few validation batches", "stopped"],
)
@pytest.mark.crossed(2)
def test_each_bar_keeps_its_own_count(options: dict[str, Any], tmp_path: Path) -> None:
    """Validation has a bar and a count of its own, and a bar ends where its batches ended."""
    counts = []
    for name in ("eager", "graphed"):
        bar, callback = FinalCounts(), tape() if name == "graphed" else None
        run_options = {"max_epochs": 2, "enable_progress_bar": True, "num_sanity_val_steps": 2, **options}
        found = fit(LitDigits, tmp_path / name, callback, batch=BATCH, more=[bar], **run_options)
        counts.append(bar.counts)
        assert callback is None or found.callback.stats.replayed > 100
    assert counts[0] == counts[1]
    assert len(counts[0]) >= 2


def test_a_bar_goes_on_as_time_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps that take long enough are all drawn."""
    clock = iter(range(10**6))
    monkeypatch.setattr(bars, "perf_counter", lambda: float(next(clock)))
    bar = CountingBar()
    run(tmp_path, bar, tape())
    assert len(bar.shown) >= STEPS


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("bar", [DecidingBar(), CountingBar()], ids=["deciding", "eager backend"])
def test_bars_that_are_left_alone(bar: CountingBar, tmp_path: Path) -> None:
    run(tmp_path, bar, tape() if isinstance(bar, DecidingBar) else None)
    assert len(bar.shown) >= STEPS


@pytest.mark.usefixtures("still")
def test_a_bar_is_its_own_again_after_the_fit(tmp_path: Path) -> None:
    bar = CountingBar()
    callback = tape()
    run(tmp_path, bar, callback)
    assert "_should_update" not in vars(bar)
    assert not copy.deepcopy(callback)._seams


class _Looks(Callback):
    """Looks at the logged values at the end of every second epoch only."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch % 2:
            self.seen.append([list(trainer.callback_metrics), list(trainer.logged_metrics)])
            self.seen.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def _now_and_then(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    if batch_idx % 3 == 0:
        self.log("rare", loss, on_step=True, on_epoch=True, prog_bar=True)
    self.log_dict({"loss": loss, "twice": 2 * loss}, on_step=True, on_epoch=True)
    return loss


def test_values_that_nobody_asks_for_until_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The dictionaries that Lightning fills after each batch have the same keys in the same order, and the same values;
    a value that was not logged in the last batch is still that of the last one in which it was.
    """
    monkeypatch.setattr(Observer, "on_train_batch_end", Callback.on_train_batch_end)
    monkeypatch.setattr(Observer, "on_train_epoch_end", Callback.on_train_epoch_end)
    eager, graphed = _Looks(), _Looks()
    options: dict[str, Any] = {"max_epochs": 4, "log_every_n_steps": 4}
    variant = {"eager_if": lambda batch, batch_idx: batch_idx % 3 == 0}
    expected = fit(with_step(_now_and_then), tmp_path / "eager", more=[eager], **options)
    found = fit(with_step(_now_and_then), tmp_path / "graphed", tape(**variant), more=[graphed], **options)
    assert found.callback.stats.replayed >= 12, found.callback.report()
    assert eager.seen == graphed.seen
    assert expected.trainer.progress_bar_metrics == found.trainer.progress_bar_metrics
    assert list(expected.trainer.logged_metrics) == list(found.trainer.logged_metrics)
    assert expected.rows == found.rows
