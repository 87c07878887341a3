"""Manual optimization: what is refused there. What is captured has its rows in the matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import StepLR

from graphplan import OptionError, RefusalError
from tests.lightning.parts import assert_same_fits, fit, tape
from tests.lightning.rows_of_parts import Alternating, Manual


def test_alternating_without_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusalError, match=r"computes with batch_idx at .*variant= for"):
        fit(Alternating, tmp_path, tape())


class Stepping(Manual):
    """A scheduler stepped inside the step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 2, 0.9)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()  # type: ignore[union-attr]


def test_a_scheduler_stepped_inside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusalError, match=r"lr|scheduler"):
        fit(Stepping, tmp_path / "refused", tape())


def test_a_scheduler_stepped_inside_runs_eagerly_where_that_is_allowed(tmp_path: Path) -> None:
    expected = fit(Stepping, tmp_path / "eager")
    with pytest.warns(UserWarning, match="graphplan runs this step eagerly"):
        found = fit(Stepping, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)


class EveryOther(Manual):
    """Trains on every other batch, as an attribute that the loop counts up says."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.seen % 2 else self.loss_of(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1


def test_a_line_of_lightnings_is_named_where_no_line_of_the_step_is_to_blame(tmp_path: Path) -> None:
    """Not the line that called ``fit``: whatever called the step is no part of it."""
    with pytest.raises(RefusalError, match=r"aten\.detach\.default at manual\.py:\d+ in from_training_step_output"):
        fit(EveryOther, tmp_path, tape())


@pytest.mark.parametrize("variant", [3, ["a"]])
def test_what_variant_may_be(variant: Any) -> None:
    with pytest.raises(OptionError, match=r"variant is .*; expected a function of \(batch, batch_idx\)"):
        tape(variant=variant)


def test_a_method_that_the_module_lacks(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="variant is 'nowhere', and Manual has no such method"):
        fit(Manual, tmp_path, tape(variant="nowhere"))
