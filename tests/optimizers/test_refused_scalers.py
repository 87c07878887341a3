"""Gradient scalers that a replay cannot stand in for: refused, naming the optimizer, or the calls that go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer, RMSprop

from graphplan import CaptureError, HostEffectError, HostSyncError, RefusalError, SkipReason, capture, compile_plan
from tests.optimizers.test_gradient_scaler import MAKERS, prepared, scaled_rig, without
from tests.twins import SECOND_TRACE, Rig, assert_falls_back, assert_refused, build, drive, managed


class Decayed(AdamW):
    """A step of somebody's own, which a skipped step must skip as a whole."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.mul_(0.99)
        return result


def hooked(params: Iterable[Tensor]) -> Optimizer:
    """An optimizer after whose steps somebody does something."""
    optimizer = MAKERS["adamw"](params)
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


REFUSED: dict[str, tuple[Callable[..., Optimizer], str, dict[str, Any]]] = {
    "no kernel": (partial(RMSprop, lr=1e-3), "RMSprop", {}),
    "not prepared": (MAKERS["adamw"], "AdamW", {"prepare_optimizers": False}),
    "own step": (prepared(partial(Decayed, lr=1e-3)), "Decayed", {}),
    "step hooks": (prepared(hooked), "AdamW", {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_only_the_host_can_skip(name: str) -> None:
    """Refused as the optimizer's, by its name, with what would do; eagerly they go on as ever."""
    make, optimizer, options = REFUSED[name]
    patterns = [
        rf"whether to skip the step of {optimizer}\b",
        "fused=True",
        "hooks",
        "owners=",
        r"test_gradient_scaler\.py:\d+",
    ]
    error = assert_refused(partial(scaled_rig, make), HostSyncError, *patterns, **options)
    assert isinstance(error, RefusalError)
    assert error.component == "optimizer"
    assert_falls_back(partial(scaled_rig, make), SkipReason.HOST_SYNC, optimizer, **options)


def test_a_scaler_that_nobody_named() -> None:
    """Only a named scaler can be told to leave the decision to the kernel: the message asks for it."""
    rig = build(without("scaler", partial(scaled_rig, prepared(MAKERS["adamw"]))))
    with pytest.raises(HostSyncError, match=r"AdamW.*the scaler among owners="):
        drive(rig, managed(rig))


@pytest.mark.parametrize("half", ["backward", "step"])
def test_half_of_the_work_outside(half: str) -> None:
    """``unscale_`` in the step and ``step`` outside it, or the reverse: a replay would unscale twice, or not at all."""
    make = partial(scaled_rig, prepared(MAKERS["adamw"]), inside=[half])
    patterns = [r"scaler\.stage\[optimizer\]", "unscale_, step and update all inside the step"]
    assert_refused(make, HostEffectError, *patterns, done=SECOND_TRACE)


class Cautious(torch.amp.GradScaler):
    """A scaler that decides about steps in a way of its own."""

    def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> float | None:
        return super()._maybe_opt_step(*args, **kwargs)


def test_a_scaler_with_a_decision_of_its_own() -> None:
    """It is asked, on the host: nothing of it is replaced."""

    def make() -> Rig:
        rig = scaled_rig(prepared(MAKERS["adamw"]))
        rig.owners["scaler"].__class__ = Cautious
        return rig

    assert_refused(make, HostSyncError, "whether to skip the step of AdamW")


@pytest.mark.parametrize("stage", ["compile", "capture"])
def test_a_single_step_that_is_skipped(stage: str) -> None:
    """One stage at a time, on a batch that overflows: an optimizer without state cannot be stepped by a replay."""
    rig = build(partial(scaled_rig, prepared(MAKERS["adamw"]), overflows=[0]))
    overflowing, usual = rig.calls[0], rig.calls[1]
    if stage == "compile":
        with pytest.raises(HostSyncError, match="state from a step that was not skipped"):
            compile_plan(rig.step, *overflowing, owners=rig.owners)
    else:
        rig.step(*overflowing)
        plan = compile_plan(rig.step, *usual, owners=rig.owners)
        with pytest.raises(CaptureError, match="reads values on the host"):
            capture(plan, feed=overflowing, backend="tape")
