"""A Lightning fit on the device with the callback is the fit without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

from graphplan import CaptureError, GraphPlanCallback, SkipReason
from graphplan.callback.loop import training_loop as loop
from tests.devices import BACKEND, CUDA, DEVICE, Generators, needs_cuda
from tests.facts import assert_same, flatten
from tests.gpu.failing import recorded, too_much
from tests.lightning.endings import assert_nothing_installed
from tests.lightning.failing import Failing, fit_with
from tests.lightning.measured import METRICS, measured
from tests.lightning.parts import (
    FUSED_ADAMW,
    Fit,
    LitDigits,
    Observer,
    assert_same_fits,
    digits,
    fit,
    trainer_of,
    with_step,
)
from tests.lightning.rows_of_parts import Gan, Manual
from tests.lightning.test_evaluation import Evaluated, Outputs, loader, quiet
from tests.twins import BEFORE_REPLAY

EPOCHS, REPLAYED = 2, 18 - 6
"""Nine full batches in each epoch; the ragged one at its end is eager, and then traced."""
ON_DEVICE: dict[str, Any] = {"accelerator": "gpu" if CUDA else "cpu", "devices": 1, "max_epochs": EPOCHS}
VARIANTS: dict[str, dict[str, Any]] = {
    "32-true": {"precision": "32-true", "gradient_clip_val": 1.0},
    # Lightning's mixed precision refuses to clip the gradients of a fused optimizer.
    "bf16-mixed": {"precision": "bf16-mixed"},
    "accumulated": {"precision": "32-true", "accumulate_grad_batches": 2},
}


def callback(**options: Any) -> GraphPlanCallback:
    """The callback on the device's backend."""
    return GraphPlanCallback(backend=BACKEND, **options)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.twice
def test_a_fit_equals_the_eager_fit(variant: str, tmp_path: Path) -> None:
    """Weights, optimizer, schedule, CSV rows, metrics and checkpoints, bit by bit; nothing stays installed."""
    options = {**ON_DEVICE, **VARIANTS[variant]}
    make = partial(LitDigits, make_optimizer=FUSED_ADAMW)
    expected = fit(make, tmp_path / "eager", **options)
    generator = Generators()["device"]
    found = fit(make, tmp_path / "graphed", callback(), **options)
    assert_same_fits(expected, found)
    assert torch.equal(generator, Generators()["device"])
    stats = found.callback.stats
    if variant == "accumulated":
        assert stats.replayed > 0 and stats.captured >= 2, found.callback.report()
    else:
        assert (stats.traced, stats.captured, stats.replayed) == (2 + 1, 1, REPLAYED), found.callback.report()
    assert stats.eager + stats.traced + stats.captured + stats.replayed == len(found.observer.batches)
    assert len(found.rows.splitlines()) > EPOCHS * 5
    assert_nothing_installed(found.trainer, found.module)


@pytest.mark.parametrize("transfer", ["auto", "stock"])
@pytest.mark.twice
def test_batches_that_nobody_else_is_given(transfer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied from host memory into the program's inputs, or moved by Lightning first: the eager fit either way."""
    monkeypatch.setattr(Observer, "on_train_batch_end", Callback.on_train_batch_end)
    expected = fit(LitDigits, tmp_path / "eager", **ON_DEVICE)
    moved: list[Any] = []
    original = loop.move_data_to_device
    monkeypatch.setattr(loop, "move_data_to_device", lambda *args: (moved.append(args), original(*args))[1])
    found = fit(LitDigits, tmp_path / "graphed", callback(transfer=transfer), **ON_DEVICE)
    assert_same_fits(expected, found)
    # Lightning moves a fit's first batch, which warms the others up all the same.
    assert found.callback.stats.replayed == REPLAYED, found.callback.report()
    assert bool(moved) is (CUDA and transfer == "stock")


@pytest.mark.parametrize("watched", [True, False], ids=["moved by Lightning", "moved by the step"])
def test_one_side_of_the_step(watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit the eager fit, whether batches come from the device or from host memory."""
    if not watched:
        monkeypatch.setattr(Observer, "on_train_batch_end", Callback.on_train_batch_end)
    make = partial(LitDigits, make_optimizer=FUSED_ADAMW)
    options = {**ON_DEVICE, "gradient_clip_val": 0.5}
    expected = fit(make, tmp_path / "eager", **options)
    found = fit(make, tmp_path / "graphed", callback(components="forward_backward", min_speedup=0.0), **options)
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= REPLAYED - 1, found.callback.report()
    assert_nothing_installed(found.trainer, found.module)


@pytest.mark.parametrize(("make_optimizer", "clip"), [(FUSED_ADAMW, None), (partial(AdamW, lr=3e-3), 0.5)])
@pytest.mark.twice
def test_a_fit_with_a_scaler(make_optimizer: Any, clip: float | None, tmp_path: Path) -> None:
    """A stock AdamW is made fused, which Lightning would not clip if it knew; equal to the same steps run eagerly."""
    make = partial(LitDigits, make_optimizer=make_optimizer)

    def run(name: str, **options: Any) -> Fit:
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**13, growth_interval=3)
        plugin = MixedPrecision("16-mixed", DEVICE.type, scaler)
        return fit(make, tmp_path / name, callback(**options), plugins=[plugin], gradient_clip_val=clip, **ON_DEVICE)

    expected, found = run("eager", eager_if=1), run("graphed")
    assert_same_fits(expected, found)
    assert expected.callback.stats.replayed == 0
    assert found.callback.stats.replayed == REPLAYED, found.callback.report()
    assert "optimizer runs eagerly" not in found.callback.report()
    assert_nothing_installed(found.trainer, found.module)


@pytest.mark.parametrize("first", ["eager", "graphed"])
@pytest.mark.twice
def test_checkpoints_are_interchangeable(first: str, tmp_path: Path) -> None:
    """Two epochs without or with the callback, then two more the other way, are four epochs of either."""
    callbacks = {"eager": [None, callback()], "graphed": [callback(), None]}[first]
    begun = fit(LitDigits, tmp_path / "e1", **ON_DEVICE)
    expected = fit(LitDigits, tmp_path / "e2", resume=begun.last, **{**ON_DEVICE, "max_epochs": 4})
    begun = fit(LitDigits, tmp_path / "g1", callbacks[0], **ON_DEVICE)
    found = fit(LitDigits, tmp_path / "g2", callbacks[1], resume=begun.last, **{**ON_DEVICE, "max_epochs": 4})
    assert_same_fits(expected, found)
    graphed = begun if first == "graphed" else found
    assert graphed.callback.stats.replayed == REPLAYED


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize("first", ["host", "device"])
@pytest.mark.twice
def test_a_checkpoint_of_the_other_device(first: str, tmp_path: Path) -> None:
    """Moments and step counters come from a host's fit into a device's, or the reverse: it goes on as the eager fit."""
    host = {**ON_DEVICE, "accelerator": "cpu"}
    here, there = (host, ON_DEVICE) if first == "host" else (ON_DEVICE, host)
    begun = fit(LitDigits, tmp_path / "begun", GraphPlanCallback(), **here)
    expected = fit(LitDigits, tmp_path / "eager", resume=begun.last, **{**there, "max_epochs": 4})
    found = fit(LitDigits, tmp_path / "graphed", GraphPlanCallback(), resume=begun.last, **{**there, "max_epochs": 4})
    assert_same_fits(expected, found)
    assert begun.callback.stats.replayed == found.callback.stats.replayed == REPLAYED, found.callback.report()


@pytest.mark.parametrize("number", [0, 20, 40])
@pytest.mark.twice
def test_a_capture_that_runs_out_of_memory(number: int, tmp_path: Path) -> None:
    """The fit goes on eagerly, with one warning: weights, progress, logs and checkpoints are the eager fit's."""
    full = 9
    expected = fit_with(tmp_path / "eager", [], base=LitDigits, **{**ON_DEVICE, "max_epochs": 1})
    failing = Failing(BEFORE_REPLAY - 1, number, too_much, recorded)
    graphed = GraphPlanCallback(backend=BACKEND, on_failure="eager")
    with pytest.warns(UserWarning, match="memory ran out"):
        found = fit_with(tmp_path / "graphed", [failing, graphed], base=LitDigits, **{**ON_DEVICE, "max_epochs": 1})
    assert_same_fits(expected, found)
    assert (graphed.stats.skipped[SkipReason.CAPTURE], graphed.stats.replayed) == (full - BEFORE_REPLAY + 1, 0)
    assert_nothing_installed(found.trainer, found.module)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.twice
def test_a_fused_optimizer_is_clipped(precision: Any, tmp_path: Path) -> None:
    """Which Lightning alone refuses; the numbers are those of the same steps run eagerly."""

    def run(name: str, **options: Any) -> Fit:
        scaler = (
            torch.amp.GradScaler(DEVICE.type, init_scale=2.0**13, growth_interval=3) if precision[0] == "1" else None
        )
        plugin = MixedPrecision(precision, DEVICE.type, scaler)
        make = partial(LitDigits, make_optimizer=FUSED_ADAMW)
        return fit(make, tmp_path / name, callback(**options), plugins=[plugin], gradient_clip_val=0.5, **ON_DEVICE)

    expected, found = run("eager", eager_if=1), run("graphed")
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed == REPLAYED, found.callback.report()


def test_validation_is_replayed_in_the_pool_of_training(tmp_path: Path) -> None:
    """Weights are adopted: what training writes to them is seen, and nothing is captured twice."""
    options = {**ON_DEVICE, "max_epochs": 6}
    make = partial(Evaluated, make_optimizer=FUSED_ADAMW)
    expected = fit(make, tmp_path / "eager", **options)
    found = fit(make, tmp_path / "graphed", callback(eval=True, warmup_steps=1), **options)
    assert_same_fits(expected, found)
    stats = found.callback.eval_stats
    assert (stats.recaptured, found.callback.stats.recaptured) == (0, 0), found.callback.report()
    assert stats.replayed >= 4, found.callback.report()


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
@pytest.mark.twice
def test_evaluation_on_its_own(what: str, tmp_path: Path) -> None:
    """With what callbacks and callers get."""

    def run(graphed: GraphPlanCallback | None) -> Any:
        torch.manual_seed(0)
        seen = Outputs()
        options = {name: value for name, value in ON_DEVICE.items() if name != "max_epochs"}
        trainer = trainer_of(tmp_path, [seen, *([graphed] if graphed else [])], **options)
        return flatten(results=quiet(lambda: getattr(trainer, what)(Evaluated(), loader())), seen=seen.kept)

    graphed = callback(eval=True)
    assert_same(run(None), run(graphed))
    assert graphed.eval_stats.replayed == 15 - 6, graphed.report()


class _Watch(Callback):
    """Stands before a bar, and has torch refuse whatever waits for the device, from the end of a batch in which replays
    go on to the end of the epoch, where numbers are exact.
    """

    def __init__(self) -> None:
        self.watched = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.watched += torch.cuda.get_sync_debug_mode() == 2

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > 2 * BEFORE_REPLAY:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def _shown_step(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
    self.log_dict({"twice": 2 * loss, "half": loss / 2}, prog_bar=True)
    return loss


class _AtEnds(RichProgressBar):
    """Keeps what it shows at the ends of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.shown.append(self.get_metrics(trainer, module))
        super().on_train_epoch_end(trainer, module)


@needs_cuda
@pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`", "ignore:Synchronization debug mode is a prototype"
)
def test_a_bar_that_asks_after_every_batch_makes_nobody_wait(tmp_path: Path) -> None:
    """Steps, logs, rows and the bar from one batch to the next; at an epoch's end it shows eager's numbers."""
    data = DataLoader(digits()[0], 30)
    shown, rows = [], []
    for graphed in (False, True):
        torch.manual_seed(0)
        bar, watch = _AtEnds(), _Watch()
        own = [watch, callback(verify="off")] if graphed else []
        module = with_step(_shown_step)(FUSED_ADAMW)
        logger = CSVLogger(tmp_path / str(graphed), name="logs", version=0)
        options: dict[str, Any] = {"max_epochs": 4, "logger": logger, "log_every_n_steps": 2}
        options |= {"enable_checkpointing": False, "accelerator": "gpu", "devices": 1}
        trainer = Trainer(callbacks=[*own, bar], **options)
        try:
            quiet(partial(trainer.fit, module, data))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        shown.append(bar.shown)
        rows.append(Path(logger.log_dir, "metrics.csv").read_text())
    assert shown[0] == shown[1]
    assert rows[0] == rows[1]
    assert watch.watched >= 20


@needs_cuda
def test_a_module_compiled_with_graphs_of_its_own(tmp_path: Path) -> None:
    """Refused by name."""

    def make() -> LitDigits:
        module = LitDigits()
        module.net.compile(mode="reduce-overhead")
        return module

    with pytest.raises(CaptureError, match=r"gave Sequential CUDA graphs of its own"):
        fit(make, tmp_path, callback(), **ON_DEVICE)


@pytest.mark.parametrize("make", [Manual, Gan])
@pytest.mark.twice
def test_manual_optimization(make: Any, tmp_path: Path) -> None:
    """With every optimizer, toggle and random number in one graph."""
    expected = fit(make, tmp_path / "eager", callback(eager_if=1), **ON_DEVICE)
    found = fit(make, tmp_path / "graphed", callback(), **ON_DEVICE)
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed == REPLAYED, found.callback.report()


@pytest.mark.parametrize("name", METRICS)
def test_metrics_in_the_step(name: str, tmp_path: Path) -> None:
    """What they branch on is compared in each replay, and what they keep of the first steps is on another stream."""
    eager = fit(measured(name), tmp_path / "eager", **ON_DEVICE)
    found = fit(measured(name), tmp_path / "graphed", callback(), **ON_DEVICE)
    assert_same_fits(eager, found)
    assert found.callback.stats.replayed >= REPLAYED - 3, found.callback.report()
    assert found.callback.plan.branches
