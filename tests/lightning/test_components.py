"""One side of the step captured, the other one Python: chosen, and where one side cannot be captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan import HostScalarError, HostSyncError, NotCapturedError, OptionError
from tests.crossing import each
from tests.lightning.parts import FUSED_ADAMW, LitDigits, assert_same_fits, fit, tape


class Branching(LitDigits):
    """Its forward reads a value on the host and goes on by it; its hook before the optimizer's step logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * 1.5 if complex(loss.detach()).real > 1.0 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [param.grad.norm() for param in self.parameters() if param.grad is not None]
        self.log("norm", torch.stack(norms).max())


def fused() -> LitDigits:
    return LitDigits(FUSED_ADAMW)


@each(
    options=[{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}],
    sides=[("forward_backward",), ("forward_backward", "optimizer")],
)
def test_sides_that_are_named_are_captured(sides: tuple[str, ...], options: dict[str, Any], tmp_path: Path) -> None:
    """Bit by bit like the eager fit, with what else there is in a step: clipping, accumulation, a schedule, logs."""
    callback = tape(components=sides)
    expected = fit(fused, tmp_path / "eager", **options)
    found = fit(fused, tmp_path / "graphed", callback, **options)
    assert_same_fits(expected, found)
    assert callback.stats.captured >= 1 and callback.stats.replayed >= 5, callback.report()
    note = "optimizer runs eagerly after the replay of forward and backward: components names"
    assert (note in callback.report()) == (sides == ("forward_backward",))


def test_nothing_is_split_unasked(tmp_path: Path) -> None:
    """Under on_failure='raise' what cannot be captured is told; under 'eager' the fit goes on without graphplan."""
    with pytest.raises((HostScalarError, HostSyncError), match=r"test_components\.py"):
        fit(Branching, tmp_path / "auto", tape())
    for components in ("auto", ("forward_backward", "optimizer")):
        callback = tape(components=components, on_failure="eager")
        with pytest.warns(UserWarning, match="runs this step eagerly"):
            fit(Branching, tmp_path / "both", callback)
        assert callback.stats.captured == 0


@pytest.mark.parametrize("value", [(), ("forward",), "optimiser", 3, ("optimizer", "forward"), "optimizer"])
def test_sides_that_there_are_not(value: Any) -> None:
    with pytest.raises(OptionError, match=r"components is .*; expected 'auto', or what is to be captured: "):
        tape(components=value)


def test_sides_that_cannot_be_split(tmp_path: Path) -> None:
    class Manual(LitDigits):
        automatic_optimization = False

    with pytest.raises(NotCapturedError, match=r"with manual optimization the module's own code decides"):
        fit(Manual, tmp_path / "manual", tape(components=("forward_backward",)))
