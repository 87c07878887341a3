"""Manual optimization: what is refused there. What is captured has its rows in the matrix."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from graphplan import LearningRateError, OptionError, RefusalError
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


class Stepping(Manual):
    """A scheduler stepped inside the step."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [StepLR(optimizer, step_size=4, gamma=0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.lr_schedulers().step()  # type: ignore[union-attr]  # culprit
        return result


def test_a_scheduler_stepped_in_each_step_is_refused(tmp_path: Path) -> None:
    """Or all steps run eagerly, with eager's numbers."""
    text = (
        rf"computes with a learning rate at {line_of(Stepping.training_step)}.*Call scheduler.step\(\) after the step"
    )
    with pytest.raises(LearningRateError, match=text):
        fit(Stepping, tmp_path / "refused", tape())
    expected = fit(Stepping, tmp_path / "eager")
    with pytest.warns(UserWarning, match=f"graphplan runs this step eagerly: .*{text}"):
        found = fit(Stepping, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)


class LastOfEpoch(Stepping):
    """The scheduler steps at an epoch's end, in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = Manual.training_step(self, batch, batch_idx)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()  # type: ignore[union-attr]
        return result


@pytest.mark.filterwarnings("ignore:graphplan runs such calls eagerly.*Call scheduler.step")
def test_a_scheduler_stepped_with_the_last_batch(tmp_path: Path) -> None:
    """Steps without it have a program; those with it are eager."""
    found = assert_fit_equals_eager(LastOfEpoch, tmp_path, replayed=40, limit_train_batches=9, max_epochs=6)
    assert (found.callback.stats.captured, found.callback.stats.recaptured) == (1, 0)


class TensorRate(Stepping):
    """The learning rate is a tensor of the user's, which the scheduler fills."""

    def configure_optimizers(self) -> Any:
        optimizer = FUSED_ADAMW(self.parameters(), lr=torch.tensor(3e-3))
        return [optimizer], [StepLR(optimizer, 2, 0.9)]


@pytest.mark.filterwarnings("ignore:graphplan")
def test_a_learning_rate_of_the_users_own_is_no_host_work(tmp_path: Path) -> None:
    expected = fit(TensorRate, tmp_path / "eager")
    found = fit(TensorRate, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed == 0


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
