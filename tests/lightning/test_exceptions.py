"""Exceptions of the user's own in the middle of a fit: what the user reads."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

import graphplan
from tests.crossing import pairs
from tests.lightning.parts import LitDigits, fit, tape, with_step

FORMS: dict[str, Any] = {
    "whole": "auto",
    "forward and backward": ("forward_backward",),
}


class Failed(Exception):
    """Raised by a step."""


class Backward(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Raises."""
        raise Failed


def _raise(loss: Tensor) -> Tensor:
    raise Failed


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "Python": _raise,
    "operator": lambda loss: loss.expand(3, 4) @ loss.expand(3, 4),
    "backward": Backward.apply,
}


def frames_of(folder: Path, fault: str, at: int, callback: Any, *, manual: bool) -> list[traceback.FrameSummary]:
    """What a user reads where call ``at`` of ``training_step`` fails."""
    calls = 0

    class Module(LitDigits):
        """Fails in one of its steps."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            """The loss, or the fault."""
            nonlocal calls
            calls += 1
            loss = self.loss_of(batch)
            loss = FAULTS[fault](loss) if calls == at else loss
            if manual:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    def make() -> L.LightningModule:
        module = Module()
        module.automatic_optimization = not manual
        return module

    with pytest.raises((Failed, RuntimeError)) as caught:
        fit(make, folder, callback)
    # The first two are the test's.
    return list(traceback.extract_tb(caught.value.__traceback__))[2:]


@pairs(at=[1, 3, 4, 6], form=[*FORMS, "manual"], fault=FAULTS)
@pytest.mark.crossed(2, 1)
def test_the_traceback_of_a_users_error(fault: str, form: str, at: int, tmp_path: Path) -> None:
    """It has the frames that it has without the callback, and none of this package's: in the first step, in warm-up, in
    the first trace and in the capture.
    """
    manual = form == "manual"
    callback = tape(components=FORMS.get(form, "auto"), on_failure="eager", allow=("calls",))
    found = frames_of(tmp_path / "graphed", fault, at, callback, manual=manual)
    expected = frames_of(tmp_path / "eager", fault, at, None, manual=manual)
    assert len(found) <= len(expected)
    assert not [frame for frame in found if f"{Path(graphplan.__file__).parent}/" in frame.filename]
    assert (found[-1].name, found[-1].line) == (expected[-1].name, expected[-1].line)


def test_an_error_of_this_package_keeps_its_frames(tmp_path: Path) -> None:
    """A refusal says where it comes from."""
    with pytest.raises(graphplan.HostSyncError, match="reads a tensor's value") as caught:
        fit(
            with_step(lambda self, batch, batch_idx: self.loss_of(batch) * complex(self.loss_of(batch).detach()).real),
            tmp_path,
            tape(),
        )
    assert any("graphplan" in frame.filename for frame in traceback.extract_tb(caught.value.__traceback__))
