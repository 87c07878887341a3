"""Values that are logged, and losses, in steps that go on to change their memory: what was there leaves the step.

A capture copies most of them at the step's end. What that saves is counted in operators.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan.backends.tape import TapeBackend
from recipes.benchmarks.contenders import Loop
from recipes.benchmarks.measuring import Feed, Job
from recipes.benchmarks.trainers import LOGGED, lightning
from tests.crossing import each
from tests.lightning.parts import LitDigits, assert_same_fits, fit, tape, with_step

Recorded = list[int]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """How many operators each recording has, the latest last."""
    counts: Recorded = []
    plain = TapeBackend.record

    def record(self: TapeBackend, body: Any, traced: Any) -> Any:
        recording, result = plain(self, body, traced)
        counts.append(recording.launches)
        return recording, result

    monkeypatch.setattr(TapeBackend, "record", record)
    return counts


class Stateful(LitDigits):
    """A module with state that its steps, its hooks or its optimizer change."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.kept = torch.zeros(())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.adds_between:
            self.seen += 1
        if isinstance(outputs, dict) and "also" in outputs:
            # Memory of its own: nothing else that was handed out follows.
            outputs["loss"].add_(5)

    adds_between = False


def _log(self: Any, **values: Tensor) -> None:
    for name, value in values.items():
        self.log(name, value, on_step=True, on_epoch=True)


def _nothing(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    _log(self, value=loss * 2, shown=loss)
    return loss


def _in_place(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    value = loss.detach() * 2
    _log(self, value=value, shown=loss)
    value.mul_(3)
    return loss


def _through_a_view(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    pair = torch.stack([loss.detach(), loss.detach() * 2])
    _log(self, value=pair[1], shown=loss)
    pair.zero_()
    return loss


def _buffer(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    _log(self, value=self.seen, shown=loss)
    self.seen += 1
    return loss


def _buffer_of_others(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    _log(self, value=self.seen, shown=loss)
    return loss


def _weight(self: Any, batch: Any, batch_idx: int) -> Any:
    """The optimizer changes it, and does not tell a tensor that ``.data`` gave."""
    loss = self.loss_of(batch)
    _log(self, value=self.net[0].bias.data[3], shown=loss)
    return loss


def _rebound(self: Any, batch: Any, batch_idx: int) -> Any:
    """State that is carried from step to step in one place, which the step's end overwrites."""
    loss = self.loss_of(batch)
    _log(self, value=self.kept, shown=loss)
    self.kept = self.kept + loss.detach()
    return loss


def _input(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    _log(self, value=batch[0][0, 20], shown=loss)
    return loss


def _extra(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    return {"loss": loss, "also": loss.detach(), "twice": loss.detach() * 2}


def _two_kinds(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    _log(self, value=loss, double=loss.double())
    self.log("largest", loss, on_step=True, on_epoch=True, reduce_fx="max")
    return {"loss": loss, "also": loss.detach()}


def _halves(self: Any, loss: Tensor) -> None:
    loss.mul_(0.5)


def _halves_result(self: Any, loss: Tensor) -> None:
    self.kept_loss.mul_(0.5)


def _keeps(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    _log(self, value=loss)
    self.kept_loss = loss.detach()
    return loss


STEPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing": (_nothing, {}),
    "in place": (_in_place, {}),
    "through a view": (_through_a_view, {}),
    "buffer": (_buffer, {}),
    "buffer of others": (_buffer_of_others, {"adds_between": True}),
    "weight": (_weight, {}),
    "rebound": (_rebound, {}),
    "input": (_input, {}),
    "extra": (_extra, {}),
    "two kinds": (_two_kinds, {}),
    "loss in a hook": (_nothing, {"on_before_backward": _halves}),
    "result in a hook": (_keeps, {"on_before_backward": _halves_result}),
}


@each(accumulate=[1, 2], name=STEPS)
@pytest.mark.crossed(3)
def test_what_leaves_a_step_is_what_was_there(name: str, accumulate: int, tmp_path: Path) -> None:
    """Rows, means, outputs and checkpoints."""
    step, members = STEPS[name]
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    make = with_step(step, Stateful, **members)
    expected = fit(make, tmp_path / "eager", **options)
    found = fit(make, tmp_path / "graphed", tape(), **options)
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= 10, found.callback.report()


@pytest.mark.parametrize(
    ("name", "copies"),
    [("in place", 1), ("through a view", 1), ("buffer", 1), ("weight", 1), ("rebound", 0), ("nothing", 0)],
)
@pytest.mark.crossed(2)
def test_only_what_is_changed_is_copied_at_once(
    name: str, copies: int, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One by one; everything else in one go."""
    make = with_step(STEPS[name][0], Stateful)
    fit(make, tmp_path / "late", tape(), max_epochs=1)
    late = recorded[-1]
    monkeypatch.setattr("graphplan.callback.logging.late_copies.is_recorded", lambda: False)
    fit(make, tmp_path / "at once", tape(), max_epochs=1)
    # Two values and the loss, and the loss by one and back.
    assert recorded[-1] - late == 2 + 1 + 2 - copies


def _now_and_then(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    value = loss.detach() * 2
    _log(self, value=value, shown=loss)
    if batch_idx % 4 == 3:
        value.mul_(3)
    return loss


@pytest.mark.twice
def test_what_only_some_steps_change(tmp_path: Path, recorded: Recorded) -> None:
    """Each way through the step is traced, and captured, on its own."""
    options = {"variant": lambda batch, index: index % 4 == 3, "allow": ["batch_idx"], "warmup_steps": 1}
    expected = fit(with_step(_now_and_then), tmp_path / "eager")
    found = fit(with_step(_now_and_then), tmp_path / "graphed", tape(**options))
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= 14, found.callback.report()
    often, seldom = recorded
    assert seldom == often + 2, "the multiplication, and a copy before it"


def _grows(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    _log(self, value=self.net(batch[0]).detach().repeat(1, 1 + 6_000 // len(batch[0]))[0, 0], shown=loss)
    return loss


@pytest.mark.twice
def test_large_memory_is_not_kept_for_a_number_in_it(tmp_path: Path, recorded: Recorded) -> None:
    make = with_step(_grows)
    assert_same_fits(fit(make, tmp_path / "eager"), fit(make, tmp_path / "graphed", tape()))
    large = recorded[-1]
    fit(with_step(_grows_less), tmp_path / "small", tape(), max_epochs=1)
    assert large == recorded[-1] + 1


def _grows_less(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    _log(self, value=self.net(batch[0]).detach().repeat(1, 1)[0, 0], shown=loss)
    return loss


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workload", ["mlp", "resnet"])
def test_a_typical_trainers_step_has_little_more_to_run_than_the_step_alone(workload: str, recorded: Recorded) -> None:
    """The benchmark's: five values logged per step and epoch, clipping, a schedule, a bar, a logger, checkpoints."""
    job = partial(Job, workload, cpu=True, steps=2, repeats=1, warmup=8)
    alone, typical = job("graph_step"), job("typical_callback")
    loop = Loop(alone)
    for x, y in Feed(alone, alone.work.pool(4, pin=False)):
        loop(x, y)
    lightning(typical)
    step, trainers = recorded
    own_products = LOGGED - 1
    assert trainers - step - own_products == 2, "one copy of all values and the loss, and one sum"


def test_a_fit_leaves_no_class_behind(tmp_path: Path) -> None:
    """Lightning's metrics are Lightning's again, and hold the sums of sizes that were counted."""
    make = partial(with_step(_nothing))
    expected, found = fit(make, tmp_path / "eager"), fit(make, tmp_path / "graphed", tape())
    for name, metric in found.trainer.fit_loop.epoch_loop._results.items():
        plain = expected.trainer.fit_loop.epoch_loop._results[name]
        assert type(metric) is type(plain)
        assert vars(metric).keys() == vars(plain).keys()
        assert torch.equal(metric.cumulated_batch_size, plain.cumulated_batch_size)
