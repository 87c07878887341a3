"""What changes at the end of an epoch may change between the two traces of a plan: the fit goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchmetrics.classification import MulticlassAccuracy

from graphplan import SkipReason
from tests.crossing import each
from tests.lightning.parts import (
    LitDigits,
    assert_fit_equals_eager,
    assert_same_fits,
    digits,
    fit,
    tape,
    with_step,
)


def by_epoch(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * complex(1 + self.current_epoch / 50).real


def by_attribute(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * complex(self.beta).real


def set_beta(self: Any, last: int) -> None:
    self.beta = 1 + min(self.current_epoch, last) / 50


def set_dropout(self: Any) -> None:
    self.net[3].p = 0.1 * (1 + min(self.current_epoch, 2))


def plain(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch)


def until(last: int) -> type[LitDigits]:
    """A module whose value grows with each epoch up to this one."""
    return with_step(by_attribute, on_train_epoch_start=lambda self: set_beta(self, last), beta=1.0)


WAYS = {
    "the epoch": with_step(by_epoch),
    "an attribute": until(2),
    "a layer's setting": with_step(plain, on_train_epoch_start=set_dropout),
}


@each(batches=[4, 5, 7], way=WAYS)
def test_a_value_of_each_epoch(way: str, batches: int, tmp_path: Path) -> None:
    """An epoch ends after the first trace, or after the second, or after the capture."""
    # The epoch itself goes on: each has a capture, and what is left of it.
    replayed = 4 * (batches - 4) if way == "the epoch" else 8
    found = assert_fit_equals_eager(WAYS[way], tmp_path, replayed=replayed, sizes=(16,) * batches, max_epochs=5)
    stats = found.callback.stats
    assert stats.captured > 1
    # A layer asks whether its probability is one, and needs its value.
    needed = {SkipReason.HOST_SCALAR} if way == "a layer's setting" else set()
    assert not stats.skipped.keys() - {SkipReason.SHAPE} - needed, found.callback.report()
    anew = [text for text in stats.events if " one step before and is " in text]
    assert bool(anew) == (batches == 4), found.callback.report()


@pytest.mark.twice
def test_the_smaller_last_batch_gets_its_plan_once_the_value_stays(tmp_path: Path) -> None:
    """Its traces come from two epochs. That of the others is captured in each epoch anew."""
    sizes = (16,) * 8 + (6,)
    found = assert_fit_equals_eager(until(3), tmp_path, replayed=1, sizes=sizes, max_epochs=9)
    stats = found.callback.stats
    assert stats.captured == 4 + 1, found.callback.report()
    assert stats.skipped.keys() == {SkipReason.SHAPE, SkipReason.GUARD}
    # One eager step, four traces and the capture: three replays are left to the last batches.
    assert stats.replayed == 9 * 9 - 6 - 3 * 4 - 6, found.callback.report()


@pytest.mark.twice
def test_the_smaller_last_batch_stays_eager_where_the_value_never_does(tmp_path: Path) -> None:
    make, sizes = until(100), (16,) * 8 + (6,)
    expected = fit(make, tmp_path / "eager", sizes=sizes, max_epochs=8)
    with pytest.warns(
        UserWarning, match=r"runs this step eagerly: .* uses model\.beta at .*, which is \d\.\d+ before one step"
    ):
        found = fit(make, tmp_path / "graphed", tape(), sizes=sizes, max_epochs=8)
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed == 30, found.callback.report()
    assert found.callback.stats.skipped[SkipReason.HOST_SCALAR] > 0


class TwoLoaders(LitDigits):
    """Validates with one metric on two loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(10, average="micro", validate_args=False)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.accuracy(self(x), y)
        if dataloader_idx == 0:
            self.log("val_loss", self.loss_of(batch), add_dataloader_idx=False)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)

    def val_dataloader(self) -> Any:
        """Three batches each."""
        return [DataLoader(Subset(digits()[1], range(start, start + 30)), 10) for start in (0, 30)]


def test_one_metric_on_two_validation_loaders(tmp_path: Path) -> None:
    """What an epoch's end worked out from it is there in the first step of the next, and only there."""

    def run(folder: Path, *callbacks: Any) -> Any:
        return fit(TwoLoaders, folder, *callbacks, validates=False, max_epochs=6, sizes=(16,) * 4)

    expected, found = run(tmp_path / "eager"), run(tmp_path / "graphed", tape(eval=True))
    assert_same_fits(expected, found)
    assert found.callback.eval_stats.replayed > 10, found.callback.report()


def _unused(self: Any, loss: Tensor) -> Tensor:
    epoch = self.current_epoch  # noqa: F841
    step = self.global_step  # noqa: F841
    return loss


def _compared(self: Any, loss: Tensor) -> Tensor:
    return 2 * loss if self.current_epoch >= 2 and self.trainer.global_step < 10**6 else loss


def _computed(self: Any, loss: Tensor) -> Tensor:
    return loss * (1 + self.current_epoch)


def _divided(self: Any, loss: Tensor) -> Tensor:
    return loss * complex(1 + self.current_epoch).real


LOOKS = [(_unused, 1, 21), (_compared, 2, 17), (_computed, 1, 21), (_divided, 3, 13)]


@pytest.mark.parametrize(("use", "captured", "replayed"), LOOKS)
@pytest.mark.twice
def test_a_step_that_looks_at_the_epoch(use: Any, captured: int, replayed: int, tmp_path: Path) -> None:
    """It is captured anew where what it does with the number comes out otherwise, not in each epoch. Of 30 steps, the
    last one of an epoch has another shape.
    """
    make = with_step(lambda self, batch, batch_idx: use(self, self.loss_of(batch)))
    found = assert_fit_equals_eager(make, tmp_path, replayed=replayed)
    assert found.callback.stats.captured == captured
