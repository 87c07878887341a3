"""Manual optimization: what is refused there. What is captured has its rows in the matrix."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR

from graphplan import HostEffectError, OptionError, RefusalError
from tests.lightning.parts import FUSED_ADAMW, assert_fit_equals_eager, assert_same_fits, fit, tape
from tests.lightning.rows_of_parts import Alternating, Manual
from tests.twins import line_of


def test_alternating_without_variant(tmp_path: Path) -> None:
    """``batch_idx % 2`` has two answers: each has a program."""
    assert assert_fit_equals_eager(Alternating, tmp_path, replayed=8).callback.stats.captured >= 2


class Accumulating(Manual):
    """Steps its optimizer after every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss_of(batch) / 3
        self.manual_backward(loss)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss.item())
        return loss


def test_accumulation_by_the_batch_index(tmp_path: Path) -> None:
    """The idiom of Lightning's documentation."""
    found = assert_fit_equals_eager(Accumulating, tmp_path, replayed=8, max_epochs=3)
    assert found.callback.stats.recaptured <= 1


class LogsRates(Accumulating):
    """Names its learning rate where it steps its optimizer, and that of its scheduler in every batch."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [ExponentialLR(optimizer, 0.9)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("last rate", self.lr_schedulers().get_last_lr()[0])  # type: ignore[union-attr]
        if (batch_idx + 1) % 3 == 0:
            self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return loss

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()  # type: ignore[union-attr]


def test_accumulation_with_rates_that_are_logged(tmp_path: Path) -> None:
    """Each way through the step has a program, once the scheduler's rate is known to change."""
    found = assert_fit_equals_eager(LogsRates, tmp_path, replayed=60, max_epochs=9, limit_train_batches=9)
    assert (found.callback.stats.captured, found.callback.stats.recaptured) == (3, 0), found.callback.report()


class Stepping(Manual):
    """A scheduler stepped inside the step."""

    def __init__(self, schedule: Any = None, after: Any = None) -> None:
        super().__init__()
        self.schedule = schedule or partial(StepLR, step_size=4, gamma=0.5)
        self.after = after

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [self.schedule(optimizer)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.lr_schedulers().step()  # type: ignore[union-attr]
        if self.after is not None:
            self.after(self)
        return result


class _Counting:
    """A schedule with a memory, which a checkpoint keeps."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


def _in_sequence(optimizer: Any) -> Any:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, 5), ExponentialLR(optimizer, 0.9)], [5])


SCHEDULES: dict[str, Any] = {
    "steps": partial(StepLR, step_size=4, gamma=0.5),
    "exponential": partial(ExponentialLR, gamma=0.9),
    "one cycle": partial(OneCycleLR, max_lr=0.01, total_steps=40, cycle_momentum=False),
    "a function": partial(LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
    "an object": lambda optimizer: LambdaLR(optimizer, _Counting()),
    "one after the other": _in_sequence,
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.crossed(2)
def test_a_scheduler_stepped_last(name: str, tmp_path: Path) -> None:
    """Its step on the host comes after the replay, and the next replay has the new learning rate."""
    found = assert_fit_equals_eager(partial(Stepping, SCHEDULES[name]), tmp_path, replayed=21)
    assert len({tuple(seen["lr"]) for seen in found.observer.batches}) >= 4


@pytest.mark.parametrize("verify", ["off", 1])
def test_a_scheduler_stepped_last_whatever_is_checked(verify: Any, tmp_path: Path) -> None:
    assert_fit_equals_eager(Stepping, tmp_path, replayed=21, callback=tape(verify=verify))


def test_a_scheduler_stepped_last_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    first = fit(Stepping, tmp_path / "first", tape(), max_epochs=1)
    expected = fit(Stepping, tmp_path / "eager", resume=first.last, max_epochs=3)
    found = fit(Stepping, tmp_path / "graphed", tape(), resume=first.last, max_epochs=3)
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= 12


class LastOfEpoch(Stepping):
    """The scheduler steps at an epoch's end, in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = Manual.training_step(self, batch, batch_idx)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()  # type: ignore[union-attr]
        return result


def test_a_scheduler_stepped_with_the_last_batch(tmp_path: Path) -> None:
    """Steps with and without it have programs that take turns."""
    found = assert_fit_equals_eager(LastOfEpoch, tmp_path, replayed=45, limit_train_batches=9, max_epochs=6)
    assert (found.callback.stats.captured, found.callback.stats.recaptured) == (2, 0)


def _steps_again(module: Any) -> None:
    module.optimizers().step()  # culprit


def _logs_rate(module: Any) -> None:
    module.log("rate", module.optimizers().param_groups[0]["lr"])  # culprit


def _logs_last(module: Any) -> None:
    module.log("rate", module.lr_schedulers().get_last_lr()[0])  # culprit


def _writes_rate(module: Any) -> None:
    for group in module.optimizers().param_groups:
        group["lr"] = 1e-3  # culprit


def _copies_group(module: Any) -> None:
    module.log("rate", dict(module.optimizers().param_groups[0])["lr"])  # culprit


def _counts_on(module: Any) -> None:
    module.lr_schedulers().last_epoch += 1  # culprit


def _sets_back(module: Any) -> None:
    module.lr_schedulers().last_epoch = 0  # culprit


def _hands_epoch(module: Any) -> None:
    module.lr_schedulers().step(3)  # culprit


AFTERWARDS = {
    _steps_again: "uses a learning rate of an optimizer whose scheduler it has stepped",
    _logs_rate: "uses a learning rate of an optimizer whose scheduler it has stepped",
    _writes_rate: "uses a learning rate of an optimizer whose scheduler it has stepped",
    _copies_group: "uses a learning rate of an optimizer whose scheduler it has stepped",
    _counts_on: "reads 'last_epoch' of a scheduler that it has stepped",
    _sets_back: "writes 'last_epoch' of a scheduler that it has stepped",
    _logs_last: "reads 'get_last_lr' of a scheduler that it has stepped",
    _hands_epoch: r"passes a value to lr_schedulers\[0\]\.step\(\)",
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("after", AFTERWARDS, ids=lambda after: after.__name__)
@pytest.mark.crossed(2)
def test_what_comes_of_new_rates_is_refused(after: Any, tmp_path: Path) -> None:
    """Or runs eagerly, with eager's numbers in every step."""
    make = partial(Stepping, after=after)
    text = rf"{AFTERWARDS[after]} at {line_of(after)}.*Call scheduler\.step\(\) at the end of training_step"
    with pytest.raises(HostEffectError, match=text):
        fit(make, tmp_path / "refused", tape())
    expected = fit(make, tmp_path / "eager")
    with pytest.warns(UserWarning, match=f"graphplan runs this step eagerly: .*{text}"):
        found = fit(make, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)


class TensorRate(Stepping):
    """The learning rate is a tensor of the user's, which the scheduler fills."""

    def configure_optimizers(self) -> Any:
        optimizer = FUSED_ADAMW(self.parameters(), lr=torch.tensor(3e-3))
        return [optimizer], [StepLR(optimizer, 2, 0.9)]


def test_a_learning_rate_of_the_users_own(tmp_path: Path) -> None:
    """Replays fill it as the steps that they stand for do, each way of the scheduler's by a program of its own."""
    expected = fit(TensorRate, tmp_path / "eager")
    found = fit(TensorRate, tmp_path / "graphed", tape())
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= 12


class EveryOther(Manual):
    """Trains on every other batch, as an attribute that the loop counts up says."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = ctypes.c_int(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # No guard looks there, and no stand-in can be put there.
        self.seen.value += 1
        return super().training_step(batch, batch_idx) if self.seen.value % 2 else self.loss_of(batch)


def test_a_line_of_lightnings_is_named_where_no_line_of_the_step_is_to_blame(tmp_path: Path) -> None:
    """Not the line that called ``fit``: whatever called the step is no part of it."""
    with pytest.raises(RefusalError, match=r"aten\.detach\.default at manual\.py:\d+ in from_training_step_output"):
        fit(EveryOther, tmp_path, tape())


class Sampling(Manual):
    """A step with a distribution, which checks its arguments."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.log("entropy", torch.distributions.Categorical(logits=batch[0].detach()).entropy().mean())
        return result


def test_arguments_that_a_distribution_checks(tmp_path: Path) -> None:
    """Lightning suppresses the end of an iterator around manual steps, and no exceptions that are raised here."""
    assert_fit_equals_eager(Sampling, tmp_path, replayed=10)


@pytest.mark.parametrize("variant", [3, ["a"]])
def test_what_variant_may_be(variant: Any) -> None:
    with pytest.raises(OptionError, match=r"variant is .*; expected a function of \(batch, batch_idx\)"):
        tape(variant=variant)


def test_a_method_that_the_module_lacks(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="variant is 'nowhere', and Manual has no such method"):
        fit(Manual, tmp_path, tape(variant="nowhere"))
