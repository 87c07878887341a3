"""Plans and programs on their own: compile, capture, replay, swap weights, close; each leaves state as it says."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import (
    CaptureError,
    ClosedError,
    FeedError,
    GuardError,
    HostSyncError,
    Policy,
    PolicyError,
    capture,
    compile_cached,
    compile_plan,
    graph_step,
)
from tests.facts import assert_same, flatten
from tests.models import Mlp, float_batches, training_rig
from tests.twins import Rig, build, drive, managed, state_of

make_rig = partial(training_rig, "mlp", "adamw", sizes=(8,) * 12)


def _fresh(calls: int = 0) -> Rig:
    """A rig after so many eager calls."""
    rig = build(make_rig)
    drive(rig, rig.step, calls)
    return rig


@pytest.mark.parametrize("calls", [0, 4])
def test_compile_plan_restores_what_it_touched(calls: int) -> None:
    """Parameters, buffers, gradients, optimizer state (also that which did not exist) and generator are as found."""
    rig = _fresh(calls)
    before = state_of(rig)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners, restore=True)
    assert_same(before, state_of(rig))
    assert plan.launches > 10
    trained = drive(rig, rig.step, 3).state
    twin = _fresh(calls)
    assert_same(drive(twin, twin.step, 3).state, trained)


def test_capture_leaves_state_alone_and_replay_trains() -> None:
    """``capture`` is no training step; every ``replay`` is one."""
    rig, twin = _fresh(4), _fresh(4)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    before = state_of(rig)
    program = capture(plan, feed=rig.calls[0], policy=Policy.train(), backend="tape")
    assert_same(before, state_of(rig))
    for index in range(4, 10):
        torch.manual_seed(index)
        expected = twin.step(*twin.calls[index])
        twin.after(index)
        left = state_of(twin)
        torch.manual_seed(index)
        found = program.replay(rig.calls[index])
        rig.after(index)
        assert torch.equal(expected, found)
        assert_same(left, state_of(rig))


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def test_hot_weight_swap() -> None:
    """With ``copy_roles=(input, param)`` a replay takes a state dict and leaves the model's own weights alone."""
    models = [Mlp().eval() for _ in range(3)]
    model, x = models[0], float_batches(1)[0][0]
    before = flatten(model=model)
    plan = compile_plan(partial(_logits, model), x, owners={"model": model})
    policy = Policy("inference", static_roles=("input", "param"), copy_roles=("input", "param"))
    program = capture(plan, feed=(x,), policy=policy, backend="tape")
    for other in [*models, *models]:
        assert torch.equal(program.replay((x,), params=other.state_dict()), _logits(other, x))
    assert_same(before, flatten(model=model))


def test_a_name_that_several_owners_have_is_no_short_one() -> None:
    """Three models have a ``0.weight``, so that name alone sets none of them."""
    models = {name: Mlp().eval() for name in ("first", "second", "third")}

    def logits(x: Tensor) -> Tensor:
        with torch.no_grad():
            return sum((model(x) for model in models.values()), start=torch.zeros(()))

    x = float_batches(1)[0][0]
    plan = compile_plan(logits, x, owners=models)
    policy = Policy("inference", static_roles=("input", "param"), copy_roles=("input", "param"))
    program = capture(plan, feed=(x,), policy=policy, backend="tape")
    every = {f"{name}.{key}": value for name, model in models.items() for key, value in model.state_dict().items()}
    ambiguous = {**every, "0.weight": torch.zeros_like(every["third.0.weight"])}
    assert torch.equal(program.replay((x,), params=ambiguous), logits(x))
    with pytest.raises(FeedError, match=r"first\.0\.weight is missing \(24 of the param values are\)"):
        program.replay((x,), params=models["third"].state_dict())


def _short(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != "0.weight"}


def _wrong(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "0.weight": torch.zeros(3, 3)}


def _more(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "0.wieght": torch.zeros(16, 8)}


MISFITS = {
    _short: r"model\.0\.weight is missing \(1 of the param values are\); expected a value for every copied param",
    _wrong: r"0\.weight is f32\[3, 3\].*; expected f32\[16, 8\].*nothing is cast",
    _more: r"no copied param called '0\.wieght'; expected one of: .*0\.weight",
}


@pytest.mark.parametrize("change", MISFITS, ids=lambda change: change.__name__)
def test_a_state_dict_that_does_not_fit(change: Callable[..., dict[str, Tensor]]) -> None:
    """A missing, misshapen or unknown weight is named."""
    model, x = Mlp().eval(), float_batches(1)[0][0]
    plan = compile_plan(partial(_logits, model), x, owners={"model": model})
    policy = Policy("inference", static_roles=("input", "param"), copy_roles=("input", "param"))
    program = capture(plan, feed=(x,), policy=policy, backend="tape")
    with pytest.raises(FeedError, match=MISFITS[change]):
        program.replay((x,), params=change(model.state_dict()))


def test_params_without_a_copied_role() -> None:
    """``params=`` is an error where the policy adopts the parameters."""
    rig = _fresh(2)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    program = capture(plan, feed=rig.calls[0], policy=Policy.train(), backend="tape")
    with pytest.raises(FeedError, match=r"param values are given \(0\.weight, .*copy_roles=\('input', 'param'\)"):
        program.replay(rig.calls[0], params=rig.owners["model"].state_dict())


def test_parameters_that_the_step_trains_are_not_copied() -> None:
    """A copy would be trained in the parameter's place: the parameter is named."""
    rig = _fresh(2)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    policy = Policy("train", static_roles=("input", "param", "state"), copy_roles=("input", "param"))
    before = state_of(rig)
    with pytest.raises(PolicyError, match=r"copy_roles has param, but the step itself changes model\.\d\.\w+: a copy"):
        capture(plan, feed=rig.calls[0], policy=policy, backend="tape")
    assert_same(before, state_of(rig))


def test_state_that_the_step_makes() -> None:
    """No replay could be the first step of an optimizer: the slot is named, and what the step made is gone again."""
    weight = torch.ones(2, requires_grad=True)
    optimizer = SGD([weight], lr=0.1, momentum=0.9)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()

    plan = compile_plan(step, torch.ones(2), owners={"weight": [weight], "optimizer": optimizer})
    with pytest.raises(CaptureError, match=r"momentum_buffer does not exist yet, and a replay .*eagerly once"):
        capture(plan, feed=(torch.ones(2),), backend="tape")
    assert not optimizer.state
    step(torch.ones(2))
    capture(plan, feed=(torch.ones(2),), backend="tape").replay((torch.ones(2),))


def test_a_cached_plan_whose_function_is_gone() -> None:
    """The cache keeps no function alive; a plan that outlives its own says so when it is captured."""

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    plan = compile_cached(doubled, torch.ones(2))
    del doubled
    gc.collect()
    with pytest.raises(ClosedError, match=r"the function .*doubled of this plan no longer exists; keep it, or compile"):
        capture(plan, feed=(torch.ones(2),), backend="tape")


def test_a_plan_of_a_step_that_reads_on_the_host() -> None:
    """What a trace notes by itself is refused by a bare plan too."""
    with pytest.raises(
        HostSyncError, match=r"\.item\(\).* at test_programs\.py:\d+ in .*`.*complex\(x\.sum\(\)\)\.real"
    ):
        compile_plan(lambda x: x * complex(x.sum()).real, torch.ones(2))


def test_inputs_that_share_memory_with_one_that_the_step_changes() -> None:
    """A replay has a copy of each, so the change would not show in the other: both are named."""
    x = torch.ones(4)
    text = r"changes args\[0\], which shares memory with args\[1\].*Clone one of them before the call"
    with pytest.raises(FeedError, match=text):
        compile_plan(lambda a, b: a.add_(1) + b, x[:3], x[1:])


def test_a_closed_step() -> None:
    """``close`` can be called twice; a call after it says so, and the state is as the last step left it."""
    rig = build(make_rig)
    step = managed(rig)
    for args in rig.calls:
        step(*args)
    before = state_of(rig)
    step.close()
    step.close()
    with pytest.raises(ClosedError, match="this step was closed; make a new one with graph_step"):
        step(*rig.calls[0])
    assert_same(before, state_of(rig))
    loss = rig.step(*rig.calls[0])
    assert loss.requires_grad and not any(isinstance(g["lr"], Tensor) for g in rig.owners["optimizer"].param_groups)


def test_a_closed_program() -> None:
    """A program that was closed cannot be replayed."""
    rig = build(make_rig)
    rig.step(*rig.calls[0])
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    program = capture(plan, feed=rig.calls[0], policy=Policy.train(), backend="tape")
    program.close()
    with pytest.raises(ClosedError, match=r"the program of .*train_step was closed; capture it again"):
        program.replay(rig.calls[0])


def test_a_plan_cannot_be_changed() -> None:
    """Plans and their externals are frozen records."""
    rig = build(make_rig)
    rig.step(*rig.calls[0])
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    assert isinstance(plan.externals, tuple)
    for record, name in ((plan, "externals"), (plan, "launches"), (plan.externals[0], "role")):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(record, name, None)
    with pytest.raises((AttributeError, TypeError), match=r"note|super"):
        plan.note = "new attribute"


@pytest.mark.twice
def test_gradients_that_a_step_accumulates_into_and_then_drops() -> None:
    """Zeroed at the end of every second step: that program finds gradients and leaves none."""

    def run(graphed: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

        def step(x: Tensor, last: bool) -> Tensor:
            loss = model(x).square().mean() / 2
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        owners = {"model": model, "optimizer": optimizer}
        call: Any = graph_step(step, owners=owners, backend="tape") if graphed else step
        torch.manual_seed(1)
        losses = [call(torch.randn(4, 6), index % 2 == 1).detach().clone() for index in range(40)]
        return [tensor.tolist() for tensor in [*losses, *model.parameters()]], call

    eager, _ = run(graphed=False)
    graphed, step = run(graphed=True)
    assert eager == graphed
    assert (step.stats.captured, step.stats.recaptured) == (2, 0), step.report()
    assert step.stats.replayed == 28


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze_": lambda x: x[:, :1].clone().squeeze_(1),
    "squeeze_ of dimensions": lambda x: torch.ops.aten.squeeze_.dims(x[:, :1, None].clone(), [1, 2]),
    "unsqueeze_": lambda x: x.clone().unsqueeze_(0) * x,
    "t_": lambda x: x.clone().t_() @ x,
    "swapaxes_": lambda x: x.clone().swapaxes_(0, 1) @ x,
    "as_strided_": lambda x: x.clone().as_strided_((4,), (1,)),
    "set_": lambda x: torch.empty(0).set_(x.detach().clone()) * x,
    "of what the step reads again": lambda x: (y := x.sin()).unsqueeze_(0).sum() * y.squeeze_(0).t_() @ x,
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_tensors_that_a_step_turns_where_they_lie(turn: Callable[[Tensor], Tensor]) -> None:
    """A replay has them as the recorded step left them: it would turn them once more each time, or fail."""
    weight = nn.Parameter(torch.randn(4, 4))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        weight.grad = None
        out = turn(x @ weight)
        out.sum().backward()
        assert weight.grad is not None
        return out.detach(), weight.grad

    fast = graph_step(step, owners={"weight": weight}, backend="tape", verify="off")
    for x in [torch.randn(6, 4) for _ in range(12)]:
        found = [part.clone() for part in fast(x)]
        assert all(map(torch.equal, found, step(x)))
    assert fast.stats.replayed == 6


def normed() -> nn.Sequential:
    """A model in evaluation mode whose results depend on the mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)).eval()


CONDITIONS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "mode": (nn.Module.train, r"BatchNorm1d\.training: False then True"),
    "hook": (lambda model: model[0].register_forward_hook(lambda *args: args[2] * 2), "hooks: "),
    "flag": (lambda model: model[0].weight.requires_grad_(False), r"model\.0\.weight\.requires_grad: True then False"),
    "switch": (lambda model: torch.use_deterministic_algorithms(True), "deterministic"),
}


@pytest.fixture
def _stock_switches() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_stock_switches")
@pytest.mark.parametrize("name", CONDITIONS)
@torch.no_grad()
def test_programs_and_plans_know_their_conditions(name: str) -> None:
    """A replay, or a capture, under other modes, flags or hooks would not be what the step does."""
    change, text = CONDITIONS[name]
    model, x = normed(), torch.randn(8, 2)
    plan = compile_plan(model, x, owners={"model": model})
    program = capture(plan, feed=(x,), policy=Policy.inference(), backend="tape")
    assert torch.equal(program.replay((x,)), model(x))
    before = state_of(Rig(model, {"model": model}, []))
    change(model)
    with pytest.raises(GuardError, match=f"the program of Sequential no longer fits: .*{text}"):
        program.replay((x,))
    with pytest.raises(CaptureError, match=f"the plan of Sequential does not describe this step any more: .*{text}"):
        capture(plan, feed=(x,), policy=Policy.inference(), backend="tape")
    assert torch.equal(before["model.1.running_mean"], model[1].running_mean)


@torch.no_grad()
def test_cached_plans_belong_to_modes_and_owners() -> None:
    """Going back to earlier ones finds the earlier plan."""
    model, other, x = normed(), nn.Linear(1, 1), torch.randn(8, 2)
    plan = compile_cached(model, x)
    assert compile_cached(model, x) is plan
    trained = compile_cached(model.train(), x)
    assert trained is not plan
    assert trained.state
    assert compile_cached(model.eval(), x) is plan
    assert compile_cached(model.train(), x) is trained
    assert compile_cached(model, x, owners={"other": other}) is not trained
