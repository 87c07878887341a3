"""FSDP2: a step gathers parameters into memory that is there only meanwhile, and all that it owns are DTensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import FeedError, HostEffectError, SkipReason, capture, compile_plan
from tests.facts import assert_same, flatten
from tests.models import Box
from tests.sharded import CALLS, batches, evaluate, one_rank, rest, sharded_net, sharded_rig
from tests.twins import (
    BEFORE_REPLAY,
    Rig,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    assert_same_runs,
    build,
    drive,
    managed,
)

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch's gloo")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def gathered(net: Any) -> list[Tensor]:
    """What the net gathers its parameters into."""
    states = [part._get_fsdp_state() for part in net.modules() if isinstance(part, FSDPModule)]
    return [out for state in states for p in state._fsdp_param_group.fsdp_params for out in p.all_gather_outputs]


@pytest.mark.parametrize("verify", ["off", "geometric"])
def test_a_step_is_replayed(verify: str) -> None:
    """With evaluations in between, after which stock FSDP2 keeps the root's parameters gathered."""
    assert_equals_eager(partial(sharded_rig, evaluate), verify=verify)


@pytest.mark.twice
def test_a_replay_gives_gathered_memory_back() -> None:
    rig = build(sharded_rig)
    step = managed(rig)
    drive(rig, step)
    assert step.stats.replayed == CALLS - BEFORE_REPLAY
    memory = gathered(rig.owners["net"])
    assert len(memory) == 8
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in memory)


def _loads(index: int, net: Any, optimizer: Any) -> None:
    if index == 12:
        state = copy.deepcopy(optimizer.state_dict())
        for moments in state["state"].values():
            moments["exp_avg"].mul_(0.1)
        optimizer.load_state_dict(state)


def test_loaded_optimizer_state_is_followed() -> None:
    """New DTensors come in: their shards are copied to where the recording reads them."""
    assert_equals_eager(partial(sharded_rig, _loads))


def _halves(index: int, net: Any, optimizer: Any) -> None:
    if index == 12:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.5)


def test_a_parameter_that_is_written_to_between_steps() -> None:
    assert_equals_eager(partial(sharded_rig, _halves))


def _shifts(index: int, net: Any, optimizer: Any) -> None:
    if index == 12:
        net[0].weight._local_tensor = net[0].weight._local_tensor.clone()
        net[0]._get_fsdp_state()._fsdp_param_group.fsdp_params[0].reset_sharded_param()


def test_a_shard_that_lies_elsewhere_is_captured_anew() -> None:
    """FSDP2 gathers from a view of its own, which nobody could move back."""
    step = assert_equals_eager(partial(sharded_rig, _shifts), captured=2, replayed=CALLS - BEFORE_REPLAY - 4)
    assert "the shard of net.0.weight has another address" in step.report()


def _scales(index: int, net: Any, optimizer: Any) -> None:
    if index == 9:
        net[0].set_gradient_divide_factor(4.0)


def test_a_setting_of_fsdp_that_changes_leads_to_another_program() -> None:
    step = assert_equals_eager(partial(sharded_rig, _scales), captured=2, replayed=CALLS - 2 * BEFORE_REPLAY)
    assert "FSDPParamGroup.gradient_divide_factor: None then 4.0" in step.report()


def held_rig(where: str) -> Rig:
    """Gradients that are not reduced, in the step itself or before each call from the fourth on."""
    rig = sharded_rig()
    net = rig.owners["net"]

    def keep_gradients(index: int = 3) -> None:
        net.set_requires_gradient_sync(False)
        F.cross_entropy(net(torch.ones(2, 20)), torch.ones(2, dtype=torch.long)).backward()
        net.set_requires_gradient_sync(True)

    def step(x: Tensor, y: Tensor) -> Any:
        result = rig.step(x, y)
        keep_gradients()
        return result

    if where == "inside":
        return Rig(step, rig.owners, rig.calls)
    return Rig(rig.step, rig.owners, rig.calls, after=lambda index: keep_gradients() if index >= 2 else None)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_gradients_that_are_not_reduced_are_refused(where: str) -> None:
    text = r"a module under fully_shard keeps gradients that it did not reduce \(set_requires_gradient_sync\(False\), "
    done = 3 if where == "inside" else 6
    assert_refused(partial(held_rig, where), HostEffectError, text, done=done)
    assert_falls_back(partial(held_rig, where), SkipReason.HOST_EFFECT, text)


def test_a_step_that_stays_eager_begins_and_ends_at_rest_too() -> None:
    """Else a rank that stays eager would gather less after an evaluation than one that replays, and both would hang."""
    rig = build(partial(sharded_rig, evaluate))
    group = rig.owners["net"]._get_fsdp_state()._fsdp_param_group
    seen = []

    def step(x: Tensor, y: Tensor) -> Any:
        seen.append(group.is_sharded)
        result = rig.step(x, y)
        complex(result[0].detach())
        return result

    graphed = managed(Rig(step, rig.owners, rig.calls), on_failure="eager")
    rig.owners["net"](torch.ones(2, 20))
    with pytest.warns(UserWarning, match=r"graphplan runs this step eagerly: .*_local_scalar_dense"):
        drive(Rig(step, rig.owners, rig.calls, rig.after), graphed)
    assert graphed.stats.replayed == 0
    assert seen == [True] * CALLS


def test_gradients_that_the_caller_keeps_stay_what_they_are() -> None:
    """A replay writes the next ones elsewhere, and binds them."""

    def run(graphed: bool) -> dict[str, Any]:
        rig = build(sharded_rig)
        step = managed(rig, verify="off") if graphed else rig.step
        kept = []
        for call in rig.calls:
            step(*call)
            kept.append([parameter.grad for parameter in rig.owners["net"].parameters()])
        return flatten(kept=kept)

    assert_same(run(graphed=False), run(graphed=True))


def test_an_average_of_shards_that_is_replaced() -> None:
    """Its shard is copied, and it stays a DTensor."""

    def make() -> Rig:
        rig = sharded_rig()
        net, plain = rig.owners["net"], rig.step
        box: Any = nn.Module()
        box.average = next(net.parameters()).detach().clone()

        def step(x: Tensor, y: Tensor) -> Any:
            result = plain(x, y)
            box.average = box.average * 0.5 + next(net.parameters()).detach()
            return result

        def reset(index: int) -> None:
            if index in (BEFORE_REPLAY - 2, 12):
                box.average = next(net.parameters()).detach().clone()

        return Rig(step, {**rig.owners, "box": box}, rig.calls, reset)

    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, verify="off")
    assert_same_runs(expected, drive(rig, step))
    assert type(rig.owners["box"].average) is DTensor
    assert step.stats.replayed >= CALLS - 2 * BEFORE_REPLAY


def test_momentum_that_is_made_before_the_capture_is_followed() -> None:
    """torch's fused SGD does not take DTensors, so it is not chosen for them."""

    def make() -> Rig:
        rig = sharded_rig()
        net = rig.owners["net"]
        optimizer = SGD(net.parameters(), lr=0.05, momentum=0.9)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return Rig(step, {"net": net, "optimizer": optimizer}, rig.calls)

    assert_equals_eager(make)


def test_a_plan_and_a_program_for_inference() -> None:
    """The gathered parameters are no externals; what an evaluation left gathered is gathered anew."""
    net = sharded_net().eval()
    x = batches(1)[0][0]
    with torch.no_grad():
        expected = net(x)
        plan = compile_plan(net, x, owners={"net": net})
        assert {external.name for external in plan.params} >= {"net.0.weight", "net.1.weight", "net.4.bias"}
        assert not [external for external in plan.externals if external.path is None and external.leaf is None]
        net(x)
        program = capture(plan, feed=(x,), backend="tape")
        rest(net)
        for _ in range(3):
            assert_same({"y": expected}, {"y": program.replay((x,))})


def test_a_dtensor_is_not_fed() -> None:
    rig = build(sharded_rig)
    weight = rig.owners["net"][0].weight.detach()
    with pytest.raises(FeedError, match=r"args\[0\] is a DTensor.*to_local\(\)"):
        managed(rig)(weight, rig.calls[0][1])


class Stop(torch.nn.GELU):
    """Fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        # Hidden: another value of what the step reads would lead to another trace.
        self.fails = Box(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.fails.item:
            raise ZeroDivisionError("stopped")
        return super().forward(x)


def stopping_rig() -> Rig:
    rig = sharded_rig()
    rig.owners["net"][2] = Stop()
    return rig


@pytest.mark.parametrize("call", [4, 5])
@pytest.mark.twice
def test_a_trace_or_capture_that_is_broken_off_leaves_fsdp_at_rest(call: int) -> None:
    """The error comes in the middle of the forward pass, with parameters gathered. A trace is an eager step up to
    there, a capture has not happened.
    """

    def stumble(rig: Rig, step: Any, stumbles: bool) -> Any:
        net, calls = rig.owners["net"], iter(range(100))

        def stumbling(x: Tensor, y: Tensor) -> Any:
            if next(calls) == call and stumbles:
                net[2].fails.item = True
                with pytest.raises(ZeroDivisionError, match="stopped"):
                    step(x, y)
                net[2].fails.item = False
            return step(x, y)

        return drive(rig, stumbling)

    rig = build(stopping_rig)
    expected = stumble(rig, rig.step, call == 4)
    rig = build(stopping_rig)
    step = managed(rig)
    assert_same_runs(expected, stumble(rig, step, True))
    assert step.stats.replayed > 0
