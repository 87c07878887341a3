"""Steps that run in ``torch.inference_mode``, as a whole or in part: what is made there is written to only there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import HostSyncError, SkipReason, graph_step
from tests.failure_modes.naive import changing_rig, loss_of, stay
from tests.models import CALLS, Memory, Mlp, float_batches
from tests.twins import Rig, assert_equals_eager, assert_refused, by_chance


def predicting_rig(update: Callable[[Any, Tensor], Tensor]) -> Rig:
    """Predictions of a decorated function that may keep something on an object."""
    model, memory = Mlp().eval(), Memory(mean=torch.zeros(8), seen=torch.zeros(()))

    @torch.inference_mode()
    def predict(x: Tensor) -> Tensor:
        return model(x + update(memory, x))

    owners = {"model": model, "memory": memory}
    return Rig(predict, owners, [(x,) for x, _ in float_batches(CALLS)])


def _nothing(memory: Any, x: Tensor) -> Tensor:
    return torch.zeros(8)


def _rebinds(memory: Any, x: Tensor) -> Tensor:
    memory.mean = 0.5 * memory.mean + x.mean(0)
    return memory.mean


def _writes(memory: Any, x: Tensor) -> Tensor:
    memory.seen += len(x)
    return memory.mean.mul_(0.5).add_(x.mean(0)) / memory.seen


@pytest.mark.parametrize("verify", ["off", 1])
@pytest.mark.parametrize("update", [_nothing, _rebinds, _writes])
def test_a_decorated_step(update: Callable[[Any, Tensor], Tensor], verify: Any) -> None:
    """The caller is not in inference mode when it replays; state that was made in it is carried all the same."""
    assert_equals_eager(partial(predicting_rig, update), verify=verify)


def test_the_host_replaces_what_was_made_in_inference_mode() -> None:
    """The new value is copied to where the old one lies."""

    def make() -> Rig:
        rig = predicting_rig(_rebinds)
        memory = rig.owners["memory"]
        rig.after = lambda index: setattr(memory, "mean", torch.ones(8)) if index % 5 == 4 else None
        return rig

    assert_equals_eager(make, verify="off")


@pytest.mark.parametrize("verify", ["off", 1])
def test_a_teacher_in_inference_mode(verify: Any) -> None:
    """A training step, a part of which runs in inference mode."""

    def make() -> Rig:
        teacher = nn.Linear(8, 4)

        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            with torch.inference_mode():
                wanted = teacher(x).softmax(1)
            return loss_of(model, x, y) - (F.log_softmax(model(x), 1) * wanted.clone()).mean()

        return changing_rig(stay, loss)

    assert_equals_eager(make, verify=verify)


def test_a_refusal_in_inference_mode() -> None:
    """What the refused call wrote is put back, though it was made in inference mode."""

    def reads(memory: Any, x: Tensor) -> Tensor:
        memory.mean = memory.mean * 2 + 1
        memory.seen.add_(1.0)
        return memory.mean ** memory.seen.item()

    assert_refused(partial(predicting_rig, reads), HostSyncError, r"\.item\(\)")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operators_that_are_composite_and_have_a_kernel(mode: Callable[[], Any]) -> None:
    """They stay whole: their parts round otherwise."""
    grad, x = torch.rand(8, 16), torch.randn(8, 16)
    fast = graph_step(lambda x: torch.ops.aten.silu_backward(grad, x), backend="tape", verify=1)
    with mode():
        for _ in range(8):
            assert torch.equal(fast(x), torch.ops.aten.silu_backward(grad, x))
    assert fast.stats.verified >= 2
    assert fast.plan.operators["aten.silu_backward.default"] == 1


def test_operators_on_tensors_that_were_made_in_inference_mode_are_taken_apart() -> None:
    """Though the step is not in it: else what they read on the host would go unseen."""

    def step(x: Tensor) -> Tensor:
        with torch.inference_mode():
            flag = by_chance(x).all()
        return x * 2 if flag else x

    fast = graph_step(step, backend="tape")
    for index in range(12):
        x = torch.ones(2) * (index != 10)
        assert torch.equal(fast(x), x * 2 if x.all() else x)
    assert fast.stats.replayed > 0
    assert fast.stats.skipped[SkipReason.HOST_SYNC] == 1
