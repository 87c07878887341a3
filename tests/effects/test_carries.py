"""Steps that rebind their owners' tensors: replays chain, and leave the owners as eager does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import GradientError, HostEffectError, Policy, Program, compile_plan, graph_step
from graphplan.feed.buffers import Buffers
from graphplan.feed.signature import flatten
from graphplan.program.adopted_tensors import AdoptedTensors
from graphplan.program.capture import capture_program
from graphplan.step.runner import Backends
from tests.models import CALLS, Memory, attributes, float_batches, updating_rig
from tests.twins import (
    BEFORE_REPLAY,
    BEFORE_TWO,
    SECOND_TRACE,
    Rig,
    assert_equals_eager,
    assert_refused,
    assert_same_as_eager,
    build,
    drive,
    managed,
)


def _ema(model: Any, x: Tensor, loss: Tensor) -> None:
    model.ema = 0.9 * model.ema + 0.1 * x.mean()


def _ema_returned(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.ema = 0.9 * model.ema + 0.1 * loss.detach()
    return model.ema


def _previous_and_current(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.prev = model.cur
    model.cur = torch.tanh(model.cur + x.mean(0))
    return model.cur - model.prev


def _rotation(model: Any, x: Tensor, loss: Tensor) -> None:
    model.a, model.b, model.c = model.b, model.c, 0.5 * model.a + x.mean()


def _swap(model: Any, x: Tensor, loss: Tensor) -> None:
    model.a, model.b = model.b, model.a
    model.a.add_(x.mean())


def _in_containers(model: Any, x: Tensor, loss: Tensor) -> None:
    model.memory["h"] = 0.5 * model.memory["h"] + x.mean(0)
    model.memory["parts"][1] = model.memory["parts"][0] + x.mean()


def _sliding_window(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.window = torch.cat([model.window[1:], x[:1]])
    return model.window.mean()


def _slice_of_a_queue(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.queue = torch.cat([x[:1].T, model.queue], 1)[:, :4]
    return model.queue.mean()


def _last_loss(model: Any, x: Tensor, loss: Tensor) -> None:
    model.last = loss.detach()


def _in_place(model: Any, x: Tensor, loss: Tensor) -> None:
    model.total += loss.detach()
    model.seen.add_(len(x))


def _submodule(model: Any, x: Tensor, loss: Tensor) -> None:
    model[1].extra = model[1].extra * 0.9 + x.var()


def _tuple_of_objects(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    # The first row is made on the CPU.
    before = model.memory[0].row.to(x.device)
    model.memory = (SimpleRow(0.5 * before + x.mean(0)), {"loss": loss.detach()})
    return before.mean()


def _numbers_in_tuples(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    (_, before), *_ = model.memory
    model.memory = [("mean", {"row": 0.5 * before["row"] + x.mean(0)}), (x.dtype, ((8,), {"loss": loss.detach()}))]
    return before["row"].mean()


def _two_names(kind: type) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def update(model: Any, x: Tensor, loss: Tensor) -> Tensor:
        before = model.last["row"] + model.memory[0]["row"]
        model.last = {"row": 0.25 * before + x.mean(0)}
        model.memory = kind([model.last])
        return before.mean()

    return update


def _prepare_two_names(model: Any, kind: type) -> None:
    model.last = {"row": ROW()}
    model.memory = kind([model.last])


class SimpleRow:
    """Has one row."""

    def __init__(self, row: Tensor) -> None:
        self.row = row


def _buffer(name: str, value: Tensor) -> Callable[[nn.Module], None]:
    return lambda model: model.register_buffer(name, value.clone())


def _three(model: nn.Module) -> None:
    model.a, model.b, model.c = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)


ZERO, ROW = partial(torch.zeros, ()), partial(torch.zeros, 8)
CARRIES: dict[str, tuple[Callable[..., Any], Callable[[nn.Module], object]]] = {
    "ema of a buffer": (_ema, _buffer("ema", torch.zeros(()))),
    "ema of an attribute": (_ema, attributes(ema=ZERO)),
    "ema that is returned": (_ema_returned, attributes(ema=ZERO)),
    "previous and current": (_previous_and_current, attributes(prev=ROW, cur=ROW)),
    "rotation of three": (_rotation, _three),
    "swap and write in place": (_swap, _three),
    "dict and list items": (_in_containers, attributes(memory=lambda: {"h": ROW(), "parts": [torch.ones(()), ZERO()]})),
    "objects in a tuple": (_tuple_of_objects, attributes(memory=lambda: (SimpleRow(ROW()), {"loss": ZERO()}))),
    "numbers in tuples": (
        _numbers_in_tuples,
        attributes(memory=lambda: [("mean", {"row": ROW()}), (torch.float32, ((8,), {"loss": ZERO()}))]),
    ),
    "a dictionary and a list with it": (_two_names(list), partial(_prepare_two_names, kind=list)),
    "a dictionary and a tuple with it": (_two_names(tuple), partial(_prepare_two_names, kind=tuple)),
    "a sliding window": (_sliding_window, attributes(window=partial(torch.zeros, 3, 8))),
    "a slice with gaps": (_slice_of_a_queue, _buffer("queue", torch.zeros(8, 4))),
    "the last loss": (_last_loss, attributes(last=None)),
    "in place": (_in_place, attributes(total=ZERO, seen=partial(torch.zeros, (), dtype=torch.int64))),
    "attribute of a submodule": (_submodule, lambda model: setattr(model[1], "extra", torch.zeros(()))),
}


@pytest.mark.parametrize("name", CARRIES)
def test_rebound_tensors_are_carried(name: str, equals_eager: Callable[..., Any]) -> None:
    """Each replay starts from what the one before it left."""
    update, prepare = CARRIES[name]
    equals_eager(partial(updating_rig, update, prepare))


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("name", ["last", "memory"])
def test_names_of_a_carried_dictionary_that_part(name: str, kind: type) -> None:
    """The host puts another dictionary under one of two names, both of which each step makes anew."""

    def replace(model: Any, index: int) -> None:
        if index == BEFORE_REPLAY + 3:
            other = {"row": torch.full((8,), float(index))}
            setattr(model, name, other if name == "last" else kind([other]))

    make = partial(updating_rig, _two_names(kind), partial(_prepare_two_names, kind=kind), replace)
    assert assert_same_as_eager(make, verify="off").stats.replayed > 0


def _counting(model: Any, x: Tensor, loss: Tensor) -> None:
    model.memory = (model.memory[0] + 1, {"loss": loss.detach()})


def test_a_number_that_changes_in_a_tuple_is_refused() -> None:
    """It cannot be assigned after a replay."""
    make = partial(updating_rig, _counting, attributes(memory=lambda: (0, {"loss": ZERO()})))
    assert_refused(make, HostEffectError, r"changes model\.memory", done=SECOND_TRACE)


def _conjugated(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    before = model.phase.mean()
    model.phase = torch.complex(model.phase, x.repeat(1, 32).mean(0)).conj().imag
    return before


def test_a_carried_tensor_that_is_a_negative_view() -> None:
    """It has gaps and is marked as negative: eager adds up a dense copy."""
    make = partial(updating_rig, _conjugated, _buffer("phase", torch.zeros(256)))
    assert assert_same_as_eager(make, verify="off").stats.replayed > 5


def _normalised(model: nn.Module) -> Rig:
    """torch's older spectral norm, which computes ``weight`` anew in each step and leaves it there."""
    torch.nn.utils.spectral_norm(model[1])
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)))


def test_a_rebound_tensor_that_asks_for_gradients() -> None:
    """It asks for them after a replay as after an eager step."""
    assert_equals_eager(lambda: _normalised(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))))


def test_no_gradients_flow_into_a_replay() -> None:
    """Eager's graph is gone by then, too, unless the step keeps it; a replay has none at all."""
    rig = build(lambda: _normalised(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))))
    drive(rig, managed(rig))
    weight = rig.owners["model"][1].weight
    with pytest.raises(GradientError, match=r"reaches model\.1\.weight, which a replay left there"):
        weight.sum().backward()


def test_a_carry_is_listed_in_the_plan() -> None:
    """The plan names the rebound slot as state that is carried."""
    step = assert_equals_eager(partial(updating_rig, _ema, attributes(ema=ZERO)))
    (carry,) = [external for external in step.plan.state if external.name == "model.ema"]
    assert carry.carried


@pytest.mark.parametrize("period", [1, 4])
def test_a_reset_between_calls_is_honoured(period: int) -> None:
    """A host that rebinds the carried attribute, as a metric's reset does, is followed and nothing is recaptured."""

    def reset(model: Any, index: int) -> None:
        if index % period == period - 1:
            model.ema = torch.full((), float(index))

    step = assert_equals_eager(partial(updating_rig, _ema, attributes(ema=ZERO), reset))
    assert step.stats.recaptured == 0


class Recurrent(nn.Module):
    """An LSTM that keeps its hidden state from batch to batch, None before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, batch_first=True)
        self.head = nn.Linear(7, 3)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.lstm(x, self.hidden)
        self.hidden = (h.detach(), c.detach())
        return self.head(out[:, -1])


def recurrent_rig(forget_every: int | None = None) -> Rig:
    """Truncated back-propagation through time; the host may zero the hidden state between calls."""
    model = Recurrent()
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def forget(index: int) -> None:
        if forget_every and index % forget_every == forget_every - 1:
            model.hidden = (torch.zeros(1, 4, 7), torch.zeros(1, 4, 7))

    calls = [(torch.randn(4, 3, 5),) for _ in range(CALLS)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls, after=forget)


@pytest.mark.parametrize("forget_every", [None, 5])
def test_a_tuple_of_hidden_states_is_carried(forget_every: int | None) -> None:
    """``self.hidden = (h.detach(), c.detach())``: a new tuple of new tensors in each step."""
    assert_equals_eager(partial(recurrent_rig, forget_every))


def functional_rig() -> Rig:
    """A functional optimizer: every step makes new weights and new momenta, on an object that is no module."""
    memory = Memory(
        weights={"w": torch.randn(8, 4, requires_grad=True), "b": torch.zeros(4, requires_grad=True)},
        momenta={"w": torch.zeros(8, 4), "b": torch.zeros(4)},
    )

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(x @ memory.weights["w"] + memory.weights["b"], y)
        grads = torch.autograd.grad(loss, list(memory.weights.values()))
        for name, grad in zip(memory.weights, grads, strict=True):
            memory.momenta[name] = 0.9 * memory.momenta[name] + grad
            weight = memory.weights[name] - 0.1 * memory.momenta[name]
            memory.weights[name] = weight.detach().requires_grad_()
        return loss.detach()

    return Rig(train_step, {"memory": memory}, list(float_batches(CALLS)))


def test_functional_optimizers() -> None:
    """Rebound leaves that require gradients chain from replay to replay."""
    assert_equals_eager(functional_rig)


def test_two_shapes_share_their_carries() -> None:
    """Programs of two batch shapes read and write the same carried tensor."""

    def make() -> Rig:
        rig = updating_rig(_previous_and_current, attributes(prev=ROW, cur=ROW))
        ragged = float_batches(CALLS, size=4)
        rig.calls = [batch for pair in zip(rig.calls, ragged, strict=True) for batch in pair]
        return rig

    assert_equals_eager(make, captured=2, replayed=2 * CALLS - BEFORE_TWO)


class Smoothed(nn.Module):
    """A layer, and two averages that its step rebinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("other", torch.ones(4))


def _alternating(*, graphed: bool, disturb: Callable[[Any, int], None]) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model: Any = Smoothed()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model.layer(x) + model.average).square().mean()
        loss.backward()
        optimizer.step()
        model.average = 0.9 * model.average + 0.1 * x.mean(0)
        model.other = model.other * 0.5 + model.average
        return loss.detach()

    owners = {"model": model, "optimizer": optimizer}
    call: Any = graph_step(step, owners=owners, verify="off", prepare_optimizers=False) if graphed else step
    generator, losses = torch.Generator().manual_seed(1), []
    for index in range(60):
        rows = 4 if index < 12 else 3 if index < 24 else 3 + index % 2
        losses.append(call(torch.randn(rows, 4, generator=generator)).clone())
        disturb(model, index)
    return [*losses, *model.parameters(), model.average, model.other], call


def _left_alone(model: Any, index: int) -> None:
    pass


def _swapped(model: Any, index: int) -> None:
    if index % 7 == 6:
        model.average, model.other = model.other, model.average


def _replaced(model: Any, index: int) -> None:
    if index % 5 == 4:
        model.average = model.average.clone()


@pytest.mark.parametrize("disturb", [_left_alone, _swapped, _replaced])
def test_programs_that_take_turns_share_what_they_carry(
    disturb: Callable[[Any, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shapes, two programs: nobody has to move the averages from one to the other in each turn."""
    moves: list[Program] = []
    resync = Program.resync
    monkeypatch.setattr(Program, "resync", lambda self, *args: (moves.append(self), resync(self, *args))[1])
    expected, _ = _alternating(graphed=False, disturb=disturb)
    found, call = _alternating(graphed=True, disturb=disturb)
    assert [tensor.tolist() for tensor in expected] == [tensor.tolist() for tensor in found]
    assert (call.stats.captured, call.stats.replayed) == (2, 50), call.report()
    assert len(moves) <= {_left_alone: 0, _swapped: 14, _replaced: 18}[disturb]


def test_two_carries_do_not_move_into_one_tensor() -> None:
    """Programs may have each other's tensor for theirs, after somebody swapped them."""
    torch.manual_seed(0)
    model: Any = Smoothed()

    def step(x: Tensor) -> Tensor:
        model.average = 0.9 * model.average + x.mean(0)
        model.other = 0.5 * model.other + model.average
        return model.other.sum()

    x, twin = torch.randn(3, 4), (model.average.clone(), model.other.clone())
    plan = compile_plan(step, x, owners={"model": model})
    home = torch.full((4,), 7.0)
    backend, homes = Backends().get("tape", plan.device), dict.fromkeys(plan.rebindings.carries, home)
    assert len(homes) == 2
    model.average, model.other = twin[0].clone(), twin[1].clone()
    program = capture_program(
        plan, flatten((x,), {}), policy=Policy.train(), backend=backend, buffers=Buffers(), homes=homes
    )
    program.run_recorded([x], executed=True)
    assert [model.average is home, model.other is home].count(True) == 1
    average = 0.9 * twin[0] + x.mean(0)
    assert torch.equal(model.average, average)
    assert torch.equal(model.other, 0.5 * twin[1] + average)


class Total(nn.Module):
    """Adds up what it computes, in another tensor each time, as a metric does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.reset()

    def reset(self) -> None:
        self.total = torch.zeros(())


def test_programs_share_what_is_carried_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program for another shape has followed the new tensor as a third one is captured: no turn copies from then
    on.
    """
    followed: list[AdoptedTensors] = []
    follow = AdoptedTensors.follow_tensors

    def counted(adopted: AdoptedTensors) -> bool:
        followed.append(adopted)
        return follow(adopted)

    torch.manual_seed(0)
    models = [Total(), Total()]
    models[1].load_state_dict(models[0].state_dict())

    def step_of(model: Total) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            out = model.layer(x).sum().detach()
            model.total = model.total + out
            return out

        return step

    steps = [step_of(models[0]), graph_step(step_of(models[1]), owners={"model": models[1]}, verify="off")]

    def run(sizes: list[int]) -> None:
        for size in sizes:
            for step in steps:
                step(torch.ones(size, 4))

    run([8] * 8 + [5] * 6)
    for model in models:
        model.reset()
    run([5] + [3] * 6)
    monkeypatch.setattr(AdoptedTensors, "follow_tensors", counted)
    run([8, 5, 3] * 10)
    assert torch.equal(models[0].total, models[1].total)
    assert steps[1].stats.captured == 3
    # Two have not seen the new tensor yet.
    assert len(followed) <= 2
