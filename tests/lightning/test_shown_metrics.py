"""Lightning's metrics show after each step what they would show without graphplan, whenever somebody looks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.crossing import pairs
from tests.facts import assert_same, flatten
from tests.lightning.parts import (
    LitDigits,
    assert_same_fits,
    fit,
    ignore_lightning_warnings,
    loaders,
    tape,
    trainer_of,
)


class _Logs(LitDigits):
    """Means of the epoch, with and without values of steps, among them some that only some batches log."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log values of several kinds."""
        loss = self.loss_of(batch)
        self.log("mean", loss, on_step=True, on_epoch=True)
        self.log("step", loss * 2, on_step=True, on_epoch=False)
        self.log("epoch", loss * 3, on_step=False, on_epoch=True)
        if len(batch[0]) < 32:
            self.log("short", loss * 4, on_step=True, on_epoch=True)
        return loss


class _MeansOnly(LitDigits):
    """Values that all are of the step and of the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log two of them."""
        loss = self.loss_of(batch)
        self.log("one", loss, on_step=True, on_epoch=True)
        self.log("two", loss * 2, on_step=True, on_epoch=True, prog_bar=True)
        return loss


class _Looks(Callback):
    """Looks at all that a metric shows, every so many batches; ``acts`` may then change something."""

    def __init__(self, every: int, act: str = "") -> None:
        self._every, self._act = every, act
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self._every:
            return
        results = trainer._results
        for metric in results.values():
            shown = (metric._update_count, metric.has_reset, metric._forward_cache, metric._computed, metric.value)
            self.seen.append(copy.deepcopy((metric.meta.name, *shown, getattr(metric, "cumulated_batch_size", None))))
        if self._act == "resets":
            results.reset(metrics=False, fx="training_step")
        elif self._act == "computes":
            self.seen += [metric.compute().clone() for metric in results.values() if metric._update_count]
        elif self._act == "copies":
            self.seen += [(m._update_count, m._forward_cache) for m in copy.deepcopy(results).values()]


@pairs(act=["", "resets", "computes", "copies"], every=[1, 4], make=[_Logs, _MeansOnly])
@pytest.mark.crossed(2)
def test_what_metrics_show(make: type[LitDigits], every: int, act: str, tmp_path: Path) -> None:
    """At every look, and after what a look does to them."""
    eager, graphed = _Looks(every, act), _Looks(every, act)
    expected = fit(make, tmp_path / "eager", more=[eager])
    found = fit(make, tmp_path / "graphed", tape(warmup_steps=1), more=[graphed])
    assert found.callback.stats.replayed > 10
    assert eager.seen
    assert_same(flatten(seen=eager.seen), flatten(seen=graphed.seen))
    assert_same_fits(expected, found)


class _Resets(Callback):
    """Resets metrics after some batches, and sees before the next ones what is left to read."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(copy.deepcopy(dict(trainer.callback_metrics)))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3:
            trainer._results.reset(metrics=False, fx="training_step")


def test_a_reset_before_anybody_looked(tmp_path: Path) -> None:
    """What was reset at a batch's end is not among that batch's metrics."""
    seen = []
    for callback in (None, tape(warmup_steps=1)):
        resets, folder = _Resets(), tmp_path / str(len(seen))
        torch.manual_seed(0)
        trainer = trainer_of(folder, [resets, *([callback] if callback else [])])
        with warnings.catch_warnings():
            ignore_lightning_warnings()
            trainer.fit(_MeansOnly(), *loaders())
        seen.append(flatten(seen=resets.seen))
        assert callback is None or callback.stats.replayed > 10
    assert_same(*seen)
