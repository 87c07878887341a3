"""Capture sizes in a Trainer: only ``training_step`` sees the padded batch, and the fit is the one of padded steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from graphplan import GraphPlanCallback, PaddingError, SkipReason
from tests.facts import assert_same, flatten
from tests.lightning.endings import assert_nothing_installed
from tests.lightning.parts import Fit, Observer, ignore_lightning_warnings, tape, trainer_of
from tests.step.test_training_buckets import (
    FIX,
    SIZES,
    UNPADDED,
    Batch,
    Masked,
    Normalised,
    batches,
    loss_of,
    padded_to,
)

COUNT = 40
ROWS = {"buckets": [4, 8], "dynamic": {"batch": 0}}
"""Capture sizes of rows."""


class LitMasked(L.LightningModule):
    """A masked model that logs, and returns what has the batch's length.

    Args:
        pad: how it pads its batches itself, as the callback would.
        first: so many of them it does not.
        log: options of what it logs.
    """

    def __init__(
        self,
        pad: Callable[[Batch], Batch] | None = None,
        make: Callable[[], nn.Module] = Masked,
        first: int = UNPADDED,
        **log: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make()
        self._pad, self._log, self._count = pad, log, [first]

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        rows, length = batch["input_ids"].shape
        if self._pad is not None:
            self._count[0] -= 1
            batch = self._pad(batch) if self._count[0] < 0 else batch
        loss, logits = loss_of(self.net, batch)
        self.log("loss", loss, on_step=True, on_epoch=True, **self._log)
        logits = logits.detach()
        return {"loss": loss, "logits": logits if self._pad is None else logits[:rows, :length]}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch)[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class LitManual(LitMasked):
    """With manual optimization."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        result = super().training_step(batch, batch_idx)
        self.manual_backward(result["loss"])
        optimizer.step()
        return {"loss": result["loss"].detach(), "logits": result["logits"]}


class Hooks(Callback):
    """Keeps what hooks are given."""

    def __init__(self) -> None:
        self.starts: list[Any] = []
        self.ends: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.starts.append((batch, batch_idx))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append((batch, batch_idx))
        assert outputs["logits"].shape[:2] == batch["input_ids"].shape


def sentences(rows: list[int] | int = 3) -> list[Batch]:
    """Batches of different lengths; or of different numbers of rows as well, where ``rows`` has several."""
    if isinstance(rows, int):
        return batches(COUNT, rows=rows)
    made = zip(rows, batches(len(rows), longest=8, rows=max(rows)), strict=True)
    return [{name: batch[name][:count] for name in ("input_ids", "attention_mask", "labels")} for count, batch in made]


def fit(module: LitMasked, folder: Path, callback: GraphPlanCallback | None = None, **options: Any) -> Fit:
    """Fit on sentences, and see that hooks get the batches as they came."""
    data, observer, hooks = sentences(options.pop("rows", 3)), Observer(), Hooks()
    callbacks: list[Callback] = [observer, hooks, *([callback] if callback else [])]
    trainer = trainer_of(folder, callbacks, **{"max_epochs": 2, **options})
    torch.manual_seed(1)
    with warnings.catch_warnings():
        ignore_lightning_warnings()
        # Lightning takes strings for something that has a batch size.
        warnings.filterwarnings("ignore", message=".*from an ambiguous collection")
        trainer.fit(module, DataLoader(data, batch_size=None), DataLoader(sentences()[:2], batch_size=None))
    expected = [(batch, index) for _ in range(2) for index, batch in enumerate(data)][: len(hooks.ends)]
    for given in (hooks.starts, hooks.ends):
        assert_same(flatten(given=expected), flatten(given=given))
    return Fit(module, trainer, observer, callback, folder)


def facts(found: Fit) -> dict[str, Any]:
    """What a fit leaves, and what an ordinary callback and the logger saw of it."""
    return flatten(
        net=found.module.net,
        optimizers=found.trainer.optimizers,
        metrics=dict(found.trainer.callback_metrics),
        rows=found.rows.splitlines(),
        batches=found.observer.batches,
        epochs=found.observer.epochs,
        generator=torch.get_rng_state(),
    )


def bucketed(**options: Any) -> GraphPlanCallback:
    options = {"buckets": {1: SIZES}, "dynamic": {"batch": 1}, "pad": {"labels": -100}, **options}
    return tape(shapes="bucket", **options)


@pytest.mark.parametrize(
    ("kind", "options", "callback"),
    [
        (LitMasked, {}, {}),
        (LitMasked, {}, {"loop": "stock"}),
        (LitMasked, {"accumulate_grad_batches": 3}, {}),
        (LitMasked, {"gradient_clip_val": 0.5}, {"eval": True}),
        (LitMasked, {}, {"components": ("forward_backward",)}),
        (LitManual, {}, {}),
    ],
    ids=["", "stock loop", "accumulation", "clipping", "forward and backward", "manual"],
)
@pytest.mark.crossed(2)
def test_the_fit_is_that_of_padded_steps(kind: Any, options: Any, callback: Any, tmp_path: Path) -> None:
    """Bit by bit, what is logged and returned included; strings beside the tensors do no harm."""
    expected = fit(kind(padded_to), tmp_path / "eager", **options)
    found = fit(kind(), tmp_path / "graphed", bucketed(**callback), **options)
    assert_same(facts(expected), facts(found))
    stats, report = found.callback.stats, found.callback.report()
    assert stats.replayed > 20 and stats.calls == 2 * COUNT, report
    assert stats.skipped.keys() <= {SkipReason.SHAPE}
    assert " on 3 capture sizes; " in report or "accumulate_grad_batches" in options
    assert "(dimension 1 at 8, 16, 32)" in report and " calls padded; " in report
    assert_nothing_installed(found.trainer, found.module)


@pytest.mark.soak
def test_rows_count_as_they_came_in_means_over_the_epoch(tmp_path: Path) -> None:
    rows = [8, 3, 5, 4, 7, 2, 6, 8, 1] * 5

    def pad(batch: Batch) -> Batch:
        count = len(batch["input_ids"])
        size = 4 if count <= 4 else 8
        values = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            name: torch.cat([batch[name], batch[name].new_full((size - count, *batch[name].shape[1:]), value)])
            for name, value in values.items()
        }

    lengths = {"rows": rows}
    expected = fit(LitMasked(pad), tmp_path / "eager", **lengths)
    found = fit(LitMasked(), tmp_path / "graphed", bucketed(**ROWS), **lengths)
    assert_same(facts(expected), facts(found))
    report = found.callback.report()
    assert found.callback.stats.captured <= 2 * len({b["input_ids"].shape[1] for b in sentences(rows)}), report
    losses = [row["seen"]["loss_step"] for row in expected.observer.batches]
    mean = sum(loss * count for loss, count in zip(losses[-len(rows) :], rows, strict=True)) / sum(rows)
    torch.testing.assert_close(found.trainer.callback_metrics["loss_epoch"], mean)


class LitSized(LitMasked):
    """Logs with a batch size of its own, which is that of the padded batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self._log["batch_size"] = len(batch["input_ids"])
        return super().training_step(batch, batch_idx)


def test_a_batch_size_that_the_step_counts_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PaddingError, match=r"\['logs'\]\[0\] is self\.log\('loss'\) in training_step without padding"):
        fit(LitSized(), tmp_path, bucketed(**ROWS), rows=[3, 2] * 4)


REFUSED = r"changes the outcome of the step: model\.net\.norm\.running_mean: 24 of 24 elements differ, .*" + FIX


def test_batch_norm_ends_the_fit(tmp_path: Path) -> None:
    module = LitMasked(make=Normalised)
    with pytest.raises(PaddingError, match=REFUSED):
        fit(module, tmp_path, bucketed())
    assert module.net.norm.num_batches_tracked == UNPADDED, "the batch that was compared has not been trained on"


def test_batch_norm_leaves_the_fit_as_it_is_without_padding(tmp_path: Path) -> None:
    expected = fit(LitMasked(make=Normalised), tmp_path / "eager")
    with pytest.warns(UserWarning, match=f"graphplan no longer pads this step's batches: .*{REFUSED}"):
        found = fit(LitMasked(make=Normalised), tmp_path / "graphed", bucketed(on_failure="eager"))
    assert_same(facts(expected), facts(found))
    assert "no longer padded: padding from" in found.callback.report()


def test_steps_that_are_timed_first_are_not_padded(tmp_path: Path) -> None:
    """Seven are Lightning's own, and two more are eager steps as they came."""
    expected = fit(LitMasked(padded_to, first=7 + UNPADDED), tmp_path / "eager")
    found = fit(LitMasked(), tmp_path / "graphed", bucketed(min_speedup=1e-6))
    assert_same(facts(expected), facts(found))
    assert found.callback.stats.replayed > 20


@pytest.mark.soak
def test_dropout_draws_for_the_padded_batch(tmp_path: Path) -> None:
    make: Any = lambda: Masked(0.1)  # noqa: E731
    expected = fit(LitMasked(padded_to, make), tmp_path / "eager")
    found = fit(LitMasked(make=make), tmp_path / "graphed", bucketed())
    assert_same(facts(expected), facts(found))
    assert found.callback.stats.replayed > 20
