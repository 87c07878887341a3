"""Plans and programs on the device: compiled, captured, replayed, invalidated; inference and swapped weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from graphplan import ClosedError, FeedError, Policy, SkipReason, capture, compile_plan, graph_step
from tests.devices import BACKEND, DEVICE, assert_like_eager, is_healthy, needs_cuda, on_device, oracle, to_device
from tests.facts import assert_same, flatten
from tests.gpu.test_equality import scheduled_rig
from tests.models import CALLS, Mlp, Transformer, float_batches, training_rig
from tests.twins import Record, assert_same_runs, build, drive, managed, state_of

make_rig = on_device(partial(scheduled_rig, "mlp", "adamw fused", sizes=(8,) * 16))


def test_compile_and_capture_leave_state_alone_and_replays_train() -> None:
    """Neither is a training step; every replay is one."""
    twin = build(make_rig)
    expected = drive(twin, oracle(twin))
    rig = build(make_rig)
    begun = drive(rig, oracle(rig), 4)
    before = state_of(rig)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    assert_same(before, state_of(rig))
    program = capture(plan, feed=rig.calls[0], policy=Policy.train(), backend=BACKEND)
    assert_same(before, state_of(rig))
    rest = drive(
        replace(rig, calls=rig.calls[4:], after=lambda index: rig.after(index + 4)), lambda *args: program.replay(args)
    )
    assert_same_runs(expected, Record(begun.outputs + rest.outputs, state_of(rig)))
    assert plan.device == DEVICE and plan.launches > 10


@pytest.mark.parametrize(("fixed", "adds"), [(False, True), (True, True), (False, False)])
def test_a_device_may_add_in_another_order(fixed: bool, adds: bool) -> None:
    """What an eager step and a replay may differ by, though replays do not, unless algorithms are deterministic."""
    total, index = torch.zeros(4, device=DEVICE), torch.randint(4, (4096,), device=DEVICE)

    def step(x: Tensor) -> Tensor:
        return total.index_add(0, index, x) if adds else total + x[:4]

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(fixed)
    try:
        plan = compile_plan(step, torch.randn(4096, device=DEVICE), owners={"total": total, "index": index})
    finally:
        torch.use_deterministic_algorithms(before)
    assert plan.may_reorder == (adds and not fixed and DEVICE.type == "cuda")


def test_a_program_refuses_what_it_was_not_captured_for() -> None:
    """Another shape, dtype or device: nothing is broadcast, cast or moved; a closed program says that it is closed."""
    rig = build(make_rig)
    drive(rig, rig.step, 1)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    program = capture(plan, feed=rig.calls[0], policy=Policy.train(), backend=BACKEND)
    x, y = rig.calls[1]
    before = state_of(rig)
    for wrong in (x[:1], x.double(), x.T.contiguous().T[:, :4]):
        with pytest.raises(FeedError, match=r"args\[0\]"):
            program.replay((wrong, y))
    assert_same(before, state_of(rig))
    program.replay((x, y))
    program.close()
    with pytest.raises(ClosedError, match="close"):
        program.replay((x, y))
    is_healthy()


@needs_cuda
def test_a_program_refuses_a_host_batch() -> None:
    """A program of CUDA tensors names the leaf that is on the host."""
    rig = build(make_rig)
    drive(rig, rig.step, 1)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    program = capture(plan, feed=rig.calls[0], policy=Policy.train(), backend=BACKEND)
    x, y = rig.calls[1]
    with pytest.raises(FeedError, match=r"args\[1\].*cpu"):
        program.replay((x, y.cpu()))


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


@pytest.mark.twice
def test_inference() -> None:
    """The inference policy: no state, eager's numbers; weights trained in place meanwhile are seen."""
    torch.manual_seed(0)
    model = Transformer().to(DEVICE).eval()
    tokens = [torch.randint(24, (5, 6), device=DEVICE) for _ in range(CALLS)]
    step = graph_step(partial(_logits, model), owners={"model": model}, mode="inference", backend=BACKEND)
    for index, x in enumerate(tokens):
        if index == 12:
            with torch.no_grad():
                model.head.weight.mul_(0.5)
        assert torch.equal(step(x), _logits(model, x)), index
    assert step.stats.replayed == CALLS - 6
    assert step.plan is not None and step.plan.state == ()


def test_hot_weight_swap() -> None:
    """With copied parameters a replay takes a state dict, on the device or the host, and leaves the model alone."""
    torch.manual_seed(0)
    models = [Mlp().eval() for _ in range(3)]
    model, x = Mlp().eval().to(DEVICE), to_device(float_batches(1)[0][0])
    before = flatten(model=model)
    plan = compile_plan(partial(_logits, model), x, owners={"model": model})
    policy = Policy("inference", static_roles=("input", "param"), copy_roles=("input", "param"))
    program = capture(plan, feed=(x,), policy=policy, backend=BACKEND)
    for other in [*models, *models]:
        weights = to_device(dict(other.state_dict()))
        expected = _logits(other.to(DEVICE), x)
        assert torch.equal(program.replay((x,), params=weights), expected)
    assert_same(before, flatten(model=model))


def test_inputs_that_are_not_copied() -> None:
    """Replays read what is fed where it lies, and take nothing that lies elsewhere."""
    model = Mlp().eval().to(DEVICE)
    batches = [to_device(x) for x, _ in float_batches(4)]
    x = batches[0].clone()
    plan = compile_plan(partial(_logits, model), x, owners={"model": model})
    policy = Policy("inference", static_roles=("input", "param"), copy_roles=())
    program = capture(plan, feed=(x,), policy=policy, backend=BACKEND)
    for batch in batches:
        x.copy_(batch)
        assert torch.equal(program.replay((x,)), _logits(model, x))
    assert program.bytes_per_replay == 0
    with pytest.raises(FeedError, match="other addresses than in the captured call, and copy_roles lacks input"):
        program.replay((x.clone(),))


def test_an_invalidated_step_captures_again() -> None:
    """After ``invalidate`` the next calls trace and capture anew, and the run stays eager's."""
    rig = build(make_rig)
    expected = drive(rig, oracle(rig))
    rig = build(make_rig)
    step = managed(rig, backend=BACKEND)
    outputs = []
    for index, args in enumerate(rig.calls):
        if index == 8:
            step.invalidate("a test")
        outputs.append(step(*args).detach().clone())
        rig.after(index)
    assert_same(flatten(losses=expected.outputs), flatten(losses=outputs))
    assert_same(expected.state, state_of(rig))
    assert step.stats.captured == 2 and step.stats.recaptured == 1


def test_eager_calls_between_replays() -> None:
    """Every fourth call is asked to be eager: it runs beside the graph, on the same state."""
    step, _ = assert_like_eager(make_rig, replayed=16 - 4 - 6, eager_if=4)
    assert step.stats.skipped[SkipReason.EAGER_IF] == 4


@pytest.mark.twice
def test_two_steps_at_once() -> None:
    """Two graphed steps of two models take turns; each equals its own eager run."""
    runs = []
    for graphed in (False, True):
        rigs = [
            build(on_device(partial(training_rig, name, "adamw", sizes=(8,) * 16))) for name in ("mlp", "transformer")
        ]
        torch.manual_seed(3)
        steps = [managed(rig, backend=BACKEND) if graphed else oracle(rig) for rig in rigs]
        losses = []
        for index in range(16):
            for rig, step in zip(rigs, steps, strict=True):
                losses.append(step(*rig.calls[index]).detach().clone())
                rig.after(index)
        runs.append(
            flatten(losses=losses) | {f"{i}.{k}": v for i, rig in enumerate(rigs) for k, v in state_of(rig).items()}
        )
        if graphed:
            assert [step.stats.replayed for step in steps] == [10, 10]
    assert_same(*runs)


@needs_cuda
def test_a_step_on_another_stream() -> None:
    """Calls from a side stream are ordered on that stream: the batch it computes is read, its result can be used."""
    make = on_device(partial(scheduled_rig, "mlp", "adamw fused"))
    rig = build(make)
    expected = drive(rig, oracle(rig))
    rig = build(make)
    step = managed(rig, backend=BACKEND)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    weight = torch.full((2048, 2048), 1e-3, device=DEVICE)
    outputs = []
    with torch.cuda.stream(side):
        for index, (x, y) in enumerate(rig.calls):
            busy = weight @ weight @ weight
            fed = x + 0 * busy[0, 0]
            outputs.append(step(fed, y).detach().clone())
            rig.after(index)
    torch.cuda.current_stream().wait_stream(side)
    assert_same(flatten(losses=expected.outputs), flatten(losses=outputs))
