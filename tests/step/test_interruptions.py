"""Interrupts, errors of hooks, second models, copied owners: a clear end, and runs that go on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import CaptureError, HostSyncError, SkipReason, graph_step
from graphplan.environment.origin import is_library
from graphplan.observe.source import find_raise, raising_code
from graphplan.trace.given_values import DeviceConstants
from tests.crossing import each
from tests.facts import assert_same
from tests.health import FailAt, Planted, carrying_rig, process_facts, scaled_rig
from tests.models import Box, Mlp, float_batches, training_rig
from tests.twins import Record, Rig, assert_same_runs, build, drive, keep, managed, state_of

PHASES = {"warm-up": 1, "first trace": 3, "second trace": 4, "capture": 5, "replay": 7}
LSTM = partial(training_rig, "lstm", "adamw", sizes=(4,) * 12)


@each(phase=PHASES, error=[KeyboardInterrupt, SystemExit, Planted])
@pytest.mark.twice
def test_an_interrupt_leaves_a_step_that_goes_on(error: type[BaseException], phase: str) -> None:
    """Wherever it comes; a twin that gets the state of that moment goes on in the same way."""
    at = PHASES[phase]
    for number in (0, 5, 40):
        rig, twin = build(LSTM), build(LSTM)
        step, facts = managed(rig), process_facts()
        drive(rig, step, at)
        with pytest.raises(error, match="now") as caught, FailAt(number, error("now")):
            step(*rig.calls[at])
        assert type(caught.value) is error
        assert process_facts() == facts
        assert all(type(group["lr"]) is float for group in rig.owners["optimizer"].param_groups)
        if phase == "warm-up":
            continue  # An eager step that makes the optimizer's state has no twin that could take over from it.
        drive(twin, managed(twin), at)
        for name in ("model", "optimizer"):
            twin.owners[name].load_state_dict(copy.deepcopy(rig.owners[name].state_dict()))
        rng = torch.get_rng_state()
        expected = drive(replace(twin, calls=twin.calls[at:]), twin.step)
        torch.set_rng_state(rng)
        found = drive(replace(rig, calls=rig.calls[at:]), step)
        assert_same_runs(expected, found)
        assert step.stats.replayed == len(rig.calls) - 6


def _in_forward(rig: Rig, hook: Callable[[], object]) -> Any:
    return rig.owners["model"].head.register_forward_hook(lambda module, args, out: hook())


def _in_backward(rig: Rig, hook: Callable[[], object]) -> Any:
    return rig.owners["model"].head.weight.register_hook(lambda grad: hook())


def _in_optimizer(rig: Rig, hook: Callable[[], object]) -> Any:
    return rig.owners["optimizer"].register_step_pre_hook(lambda optimizer, args, kwargs: hook())


def fail_in_a_hook(register: Callable[[Rig, Any], Any], phase: str, wrap: Callable[[Rig], Any]) -> tuple[Any, ...]:
    """States before and after a call that a hook ends, the run that goes on with its batch, and the step."""

    def hook() -> None:
        if armed.item is not None:
            raise armed.item

    armed = Box(None)
    rig = build(LSTM)
    register(rig, hook)
    step, at = wrap(rig), PHASES[phase]
    begun = drive(rig, step, at)
    armed.item = Planted("from a hook")
    with pytest.raises(Planted, match="from a hook"):
        step(*rig.calls[at])
    left = state_of(rig)
    armed.item = None
    rest = drive(replace(rig, calls=rig.calls[at:]), step)
    return begun.state, left, Record(begun.outputs + rest.outputs, state_of(rig)), step


REGISTERS = pytest.mark.parametrize("register", [_in_forward, _in_backward, _in_optimizer])


@pytest.mark.parametrize("phase", ["warm-up", "first trace", "second trace"])
@REGISTERS
@pytest.mark.twice
def test_an_error_of_a_hook(register: Callable[[Rig, Any], Any], phase: str) -> None:
    """It comes out, and leaves what it leaves in an eager step, which a trace is; the run goes on as eager's does."""
    _, expected, run, _ = fail_in_a_hook(register, phase, lambda rig: rig.step)
    _, left, found, step = fail_in_a_hook(register, phase, managed)
    assert_same(expected, left)
    assert_same_runs(run, found)
    assert step.stats.captured == 1


@REGISTERS
@pytest.mark.twice
def test_an_error_of_a_hook_in_the_capture(register: Callable[[Rig, Any], Any]) -> None:
    """It comes out, the call has not happened, and the run equals eager's."""
    rig = build(LSTM)
    expected = drive(rig, rig.step)
    before, left, found, step = fail_in_a_hook(register, "capture", managed)
    assert_same(before, left)
    assert_same_runs(expected, found)
    assert step.stats.captured == 1


def reading_rig(at: int) -> Rig:
    """A step that reads a value on the host in call number ``at`` only."""
    rig = carrying_rig()
    calls: list[int] = []

    def step(x: Tensor, y: Tensor) -> Any:
        result = train(x, y)
        if len(calls) == at:
            result[0].detach().item()  # culprit
        return result

    train, rig.step = rig.step, step
    rig.after = calls.append
    return rig


def test_a_host_read_that_only_the_capture_sees() -> None:
    """The recording is refused with the line, after the step has run; the call is undone."""
    rig = build(partial(reading_rig, 5))
    step = managed(rig)
    begun = drive(rig, step, 5)
    with pytest.raises(CaptureError, match=r"cannot record.*_local_scalar_dense.*result\[0\].*traced steps did not"):
        step(*rig.calls[5])
    assert_same(begun.state, state_of(rig))
    rig = build(partial(reading_rig, 5))
    expected = drive(rig, rig.step)
    rig = build(partial(reading_rig, 5))
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match="cannot record"):
        found = drive(rig, step)
    assert_same_runs(expected, found)
    assert step.stats.skipped == {SkipReason.CAPTURE: 4}


def halve_in_place(grad: Tensor) -> None:
    """Write to a gradient."""
    grad.mul_(0.5)


def give_other_memory(grad: Tensor) -> None:
    """Replace a gradient's memory, which no operator does."""
    grad.data = grad.data * 0.5


@pytest.mark.parametrize("change", [halve_in_place, give_other_memory])
@pytest.mark.parametrize("apart", [True, False])
def test_gradients_that_a_refused_trace_has_changed(change: Callable[[Tensor], None], *, apart: bool) -> None:
    """A trace copies them before it writes: also where they are parts of one buffer, and the tensors stay the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, torch.randn(26).split([12, 4, 8, 2]), strict=True):
        parameter.grad = part.view_as(parameter).clone() if apart else part.view_as(parameter)

    def train_step(x: Tensor) -> int:
        model(x).square().sum().backward()
        for parameter in parameters:
            assert parameter.grad is not None
            change(parameter.grad)
        return int(model(x).sum())

    step = graph_step(train_step, owners={"model": model}, backend="tape")
    for _ in range(3):
        step(torch.randn(5, 3))
    before = [(p.grad, p.grad.data_ptr(), p.grad.clone()) for p in parameters if p.grad is not None]
    with pytest.raises(HostSyncError, match=r"int\(model\(x\)\.sum\(\)\)"):
        step(torch.randn(5, 3))
    for parameter, (grad, address, value) in zip(parameters, before, strict=True):
        assert parameter.grad is grad
        assert grad.data_ptr() == address
        assert torch.equal(grad, value)


@pytest.mark.twice
def test_a_second_model_in_the_process() -> None:
    """Two steps in turn, one of which cannot be captured: both runs are eager's."""

    def run(wrap: Callable[[Rig], Any], around: Any) -> list[Any]:
        first, second = build(scaled_rig), build(LSTM)
        steps, outputs = (wrap(first), wrap(second)), []
        for index, (one, two) in enumerate(zip(first.calls, second.calls, strict=False)):
            with FailAt(10**9 if index != 5 else 30, around):
                outputs.append(keep(steps[0](*one)))
            outputs.append(keep(steps[1](*two)))
            first.after(index)
            second.after(index)
        facts = [step.stats.replayed for step in steps if step not in (first.step, second.step)]
        return [Record(outputs, {**state_of(first), **state_of(second)}), facts]

    expected, _ = run(lambda rig: rig.step, lambda: None)
    with pytest.warns(UserWarning, match="memory ran out"):
        found, replayed = run(partial(managed, on_failure="eager"), torch.OutOfMemoryError("CUDA out of memory"))
    assert_same_runs(expected, found)
    assert replayed == [0, 3]


@pytest.mark.parametrize("calls", [2, 8])
def test_owners_can_be_copied_while_a_step_manages_them(calls: int) -> None:
    """The copy trains on as an eager model of its own, with the numbers of the original."""
    rig = build(LSTM)
    step = managed(rig)
    drive(rig, step, calls)
    model, optimizer = copy.deepcopy((rig.owners["model"], rig.owners["optimizer"]))
    rng = torch.get_rng_state()
    for args in rig.calls[:3]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(args[0]), args[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.set_rng_state(rng)
    for args in rig.calls[:3]:
        step(*args)
    assert_same(dict(model.state_dict()), dict(rig.owners["model"].state_dict()))


def _multiply() -> None:
    torch.ones(2) @ torch.ones(3)


def _ask_torch() -> None:
    nn.MultiheadAttention(3, 2)


def _raise() -> None:
    raise Planted("own")


def _raise_again() -> None:
    try:
        _multiply()
    except RuntimeError as error:
        raise Planted("own") from error


@pytest.mark.parametrize(
    ("call", "own"), [(_multiply, False), (_ask_torch, False), (_raise, True), (_raise_again, True)]
)
def test_who_raised_an_error(call: Callable[[], None], own: bool) -> None:
    """A ``raise`` of the user's, as opposed to errors of torch's operators and of torch's Python."""
    with pytest.raises((RuntimeError, AssertionError, ValueError), match=r"own|size|embed_dim") as caught:
        call()
    code = raising_code(caught.value)
    assert (code is not None and not is_library(code.co_filename)) is own
    source = find_raise(caught.value)
    assert source is not None and (source.filename, source.function) == (__file__, call.__name__)
    assert source.line == call.__code__.co_firstlineno + (4 if call is _raise_again else 1)
    assert raising_code(Planted("never raised")) is None
    assert find_raise(Planted("never raised")) is None


def test_constants_that_only_the_capture_makes() -> None:
    """Constants on a device come from the traces: another value is refused with its line."""
    made = torch.ones(2)
    with DeviceConstants([made]):
        assert torch.equal(torch.tensor([1.0, 1.0], device="meta"), made)
        assert torch.equal(torch.empty(1, device="meta").new_tensor([1.0, 1.0]), made)
        text = r"makes a device constant \[3\.0, 1\.0\] at test_interruptions\.py:\d+.*the traced steps did not make"
        with pytest.raises(CaptureError, match=text):
            torch.tensor([3.0, 1.0], device="meta")


def test_lists_in_the_index_of_a_devices_tensor() -> None:
    """Those are constants as well; what torch reads as several indices, and indices that are no lists, are its own."""
    rows, on_device = torch.tensor([1, 0]), torch.empty(3, 4, device="meta")
    with DeviceConstants([rows, torch.tensor([], dtype=torch.long), torch.tensor([[0, 1], [2, 2]])]):
        assert on_device[[1, 0]].shape == (2, 4)
        assert on_device[:, [1, 0]].shape == on_device[:, (1, 0)].shape == (3, 2)
        assert on_device[[1, 0], ..., range(1, -1, -1)].shape == (2,)
        assert on_device[[]].shape == (0, 4)
        assert on_device[:, [[0, 1], [2, 2]]].shape == (3, 2, 2)
        assert on_device[1:, None, 0].shape == (2, 1)
        on_device[:, [1, 0]] = 1.0
        assert torch.equal(torch.arange(3)[[2, 1]], torch.tensor([2, 1]))
        with pytest.raises(CaptureError, match=r"makes a device constant \[True, False, True\] at test_interruptions"):
            on_device[[True, False, True]]


class Decaying(SGD):
    """Multiplies its own learning rates in each step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.9
        super().step(closure)


def grouped_rig() -> Rig:
    """Two groups, whose learning rates change between the steps and in the optimizer's own."""
    model = Mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": 0.02}]
    optimizer = Decaying(groups, lr=0.1, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def after(index: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(3)), after)


@pytest.mark.parametrize("name", ["aten.fill_.Scalar", "aten._local_scalar_dense.default"])
@pytest.mark.parametrize("number", [0, 1])
def test_learning_rates_are_numbers_again(number: int, name: str) -> None:
    """Also where one of them cannot be copied to the device before the step, or read from it after the step."""
    rig = build(grouped_rig)
    step = managed(rig)
    drive(rig, step, 1)
    mode = FailAt(number, Planted("planted"), lambda func: str(func) == name)
    with pytest.raises(Planted, match="planted"), mode:
        step(*rig.calls[1])
    assert [type(group["lr"]) for group in rig.owners["optimizer"].param_groups] == [float, float]
    step(*rig.calls[2])
    assert [type(group["lr"]) for group in rig.owners["optimizer"].param_groups] == [float, float]
