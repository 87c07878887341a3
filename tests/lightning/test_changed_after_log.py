"""Values that are logged, and losses, in steps that go on to change their memory: what was there leaves the step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.crossing import each
from tests.lightning.parts import LitDigits, assert_same_fits, fit, tape, with_step


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


def test_a_fit_leaves_no_class_behind(tmp_path: Path) -> None:
    """Lightning's metrics are Lightning's again, and hold the sums of sizes that were counted."""
    make = partial(with_step(_nothing))
    expected, found = fit(make, tmp_path / "eager"), fit(make, tmp_path / "graphed", tape())
    for name, metric in found.trainer.fit_loop.epoch_loop._results.items():
        plain = expected.trainer.fit_loop.epoch_loop._results[name]
        assert type(metric) is type(plain)
        assert vars(metric).keys() == vars(plain).keys()
        assert torch.equal(metric.cumulated_batch_size, plain.cumulated_batch_size)
