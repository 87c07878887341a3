"""Steps that give their owners' tensors other memory (``q.data = ...``), as MoCo and BYOL update their teachers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import CarryError, HostEffectError, Policy, capture, compile_plan
from tests.crossing import each, pairs
from tests.facts import assert_same
from tests.models import CALLS, Box, Mlp, attributes, float_batches, updating_rig
from tests.program.test_copied_state import COPIED
from tests.twins import (
    BEFORE_REPLAY,
    BEFORE_TWO,
    Rig,
    assert_equals_eager,
    assert_refused,
    assert_same_as_eager,
    build,
    drive,
    managed,
)
from tests.verify.test_compare import noisy

Pairs = list[tuple[Tensor, Tensor]]


def ema(pairs: Pairs) -> None:
    """As MoCo does it."""
    for p, q in pairs:
        q.data = q.data * 0.9 + p.data * (1 - 0.9)


def _hard(pairs: Pairs) -> None:
    for p, q in pairs:
        q.data = p.data.clone()


def _lerp(pairs: Pairs) -> None:
    for p, q in pairs:
        q.data = torch.lerp(q.data, p.data, 0.1)


def _twice(pairs: Pairs) -> None:
    ema(pairs)
    _lerp(pairs)


def in_one_memory(pairs: Pairs) -> None:
    """New memory is one piece, of which each gets a part."""
    flat = torch.cat([(q * 0.9 + p * 0.1).flatten() for p, q in pairs])
    for (_, q), part in zip(pairs, flat.split([q.numel() for _, q in pairs]), strict=True):
        q.data = part.view_as(q)


def _in_turns(pairs: Pairs) -> None:
    pairs[0][1].data, pairs[2][1].data = pairs[2][1].data, pairs[0][1].data * 0.9 + pairs[0][0].data * 0.1


def _joined(pairs: Pairs) -> None:
    ema(pairs[:1])
    pairs[2][1].data = pairs[0][1].data


def _of_the_student(pairs: Pairs) -> None:
    for p, q in pairs:
        q.data = p.data


def _set(pairs: Pairs) -> None:
    _, q = pairs[0]
    q.set_((q * 0.9).detach())


def _of_one_vector(pairs: Pairs) -> None:
    """As evolution strategies do it: what lay there before is not read."""
    vector = nn.utils.parameters_to_vector(p for p, _ in pairs)
    nn.utils.vector_to_parameters(0.9 * vector, [q for _, q in pairs])


UPDATES: dict[str, Callable[[Pairs], None]] = {
    "ema": ema,
    "a copy": _hard,
    "lerp": _lerp,
    "twice in a step": _twice,
    "parts of one new memory": in_one_memory,
    "parts of one vector": _of_one_vector,
    "two that take turns": _in_turns,
    "two in one memory": _joined,
    "the student's memory": _of_the_student,
    "set_": _set,
}


def _square() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def teacher_rig(
    update: Callable[[Pairs], None],
    held: str = "parameters",
    *,
    first: bool = False,
    noise: Callable[[Tensor], Tensor] = torch.clone,
) -> Rig:
    """A student that follows its teacher, which ``update`` moves, ``first`` in the step or after the optimizer."""
    student, teacher = _square(), _square()
    teacher.requires_grad_(False)
    if held != "parameters":
        for layer in (teacher[0], teacher[2]):
            for name, value in list(layer.named_parameters()):
                delattr(layer, name)
                value = value.detach()
                if held == "buffers":
                    layer.register_buffer(name, value)
                else:
                    setattr(layer, name, value)
    optimizer = SGD(student.parameters(), lr=0.05, momentum=0.9, fused=True)

    def move() -> None:
        theirs = [getattr(layer, name) for layer in (teacher[0], teacher[2]) for name in ("weight", "bias")]
        with torch.no_grad():
            update(list(zip(student.parameters(), theirs, strict=True)))

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        if first:
            move()
        with torch.no_grad():
            key = teacher(x)
        loss = F.mse_loss(student(noise(x)), key + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not first:
            move()
        return loss

    owners = {"student": student, "teacher": teacher, "optimizer": optimizer}
    return Rig(train_step, owners, list(float_batches(CALLS)))


@pairs(verify=["off", "geometric"], held=["parameters", "buffers", "attributes"], name=UPDATES)
@pytest.mark.crossed(2)
def test_tensors_that_are_given_other_memory(name: str, held: str, verify: str) -> None:
    """They have the values that eager gives them."""
    assert_equals_eager(partial(teacher_rig, UPDATES[name], held), verify=verify)


@each(verify=["off", "geometric"], name=UPDATES)
def test_tensors_that_are_given_other_memory_before_they_are_used(name: str, verify: str) -> None:
    """What comes after it in the step uses the new memory."""
    assert_equals_eager(partial(teacher_rig, UPDATES[name], first=True), verify=verify)


def test_they_lie_where_they_lay() -> None:
    """A replay leaves a tensor in the memory that the recording knows: no copies are needed to bring it back."""
    rig = build(partial(teacher_rig, ema))
    step = managed(rig, verify="off")
    drive(rig, step, 7)
    teacher = list(rig.owners["teacher"].parameters())
    places = [q.data_ptr() for q in teacher]
    drive(rig, step)
    assert [q.data_ptr() for q in teacher] == places
    assert set(step.plan.rebindings.carries) == {
        f"teacher.{name}" for name, _ in rig.owners["teacher"].named_parameters()
    }


def by_hand_rig() -> Rig:
    """Parameters with gradients, trained without an optimizer, and one that nothing else in the step reads."""
    model = Mlp()
    model.shadow = nn.Parameter(torch.zeros(4), requires_grad=False)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        for param in model.parameters():
            param.grad = None
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for param in model.parameters():
            if param.grad is not None:
                param.data = param.data - 0.05 * param.grad
        model.shadow.data = loss.detach() * torch.ones(4, device=x.device)
        return loss, model.shadow

    return Rig(train_step, {"model": model}, list(float_batches(CALLS)))


@pytest.mark.parametrize("verify", ["off", "geometric"])
def test_parameters_that_are_trained_so(verify: str) -> None:
    """Gradients belong to the same parameters; what is returned is the parameter itself."""
    step = assert_equals_eager(by_hand_rig, verify=verify)
    assert "model.shadow" in step.plan.rebindings.carries
    rig = build(by_hand_rig)
    step = managed(rig, verify=verify)
    assert all(step(*args)[1] is rig.owners["model"].shadow for args in rig.calls)


def backed_up_rig() -> Rig:
    """Weights that are moved along their gradients, and given back what they held, from a dictionary that is let go."""
    model, held = Mlp(), SimpleNamespace(backup={})
    optimizer = SGD(model.parameters(), lr=0.01, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, param in model.named_parameters():
            held.backup[name] = param.data.clone()
            param.data.add_(param.grad)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for name, param in model.named_parameters():
            param.data = held.backup[name]
        held.backup = {}
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer, "held": held}
    return Rig(train_step, owners, list(float_batches(CALLS)))


@pytest.mark.parametrize("verify", ["off", "geometric"])
def test_weights_that_are_given_back_from_what_is_let_go(verify: str) -> None:
    """A check runs the step eagerly: what the walk holds of it is no other owner of the memory."""
    assert_equals_eager(backed_up_rig, verify=verify)


def moved_gradients_rig() -> Rig:
    """Gradients that are accumulated, and given other memory in each step."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.01, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.data = param.grad.data * 0.5
        optimizer.step()
        return loss

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)))


@pytest.mark.parametrize("verify", ["off", "geometric"])
def test_gradients_that_are_given_other_memory(verify: str) -> None:
    """A step that accumulates finds them as the step before left them."""
    assert_equals_eager(moved_gradients_rig, verify=verify)


def _to_gradients(pairs: Pairs) -> None:
    for p, q in pairs:
        assert p.grad is not None
        q.data = p.grad


def _away_from_a_view(pairs: Pairs) -> None:
    _, q = pairs[0]
    q.data = q.data * 0.9


@pytest.mark.parametrize(
    ("update", "views", "other", "done"),
    [(_to_gradients, False, r"student\.\d\.\w+\.grad", 4), (_away_from_a_view, True, r"teacher\.view", 6)],
)
def test_memory_that_another_tensor_shares(update: Callable[[Pairs], None], views: bool, other: str, done: int) -> None:
    """A replay leaves tensors where they lie, so that it could not keep together what eager does, nor part it."""

    def make() -> Rig:
        rig = teacher_rig(update)
        teacher = rig.owners["teacher"]
        if views:
            teacher.view = teacher[0].weight.data
            rig.after = lambda index: setattr(teacher, "view", teacher[0].weight.data)
        return rig

    pattern = rf"teacher\.\d\.\w+ other memory.*shares memory with {other}.*update it in place: .*\.data\.copy_\("
    assert_refused(make, HostEffectError, pattern, done=done)


def _longer(model: Any, x: Tensor, loss: Tensor) -> None:
    model.window.data = torch.cat([model.window.data, x[:1]])


def test_memory_of_another_shape() -> None:
    """As with what is rebound: there is no room in the old one."""
    make = partial(updating_rig, _longer, attributes(window=partial(torch.zeros, 3, 8)))
    assert_refused(make, CarryError, r"model\.window from torch\.float32 \[\d, 8\] to", done=4)


@pytest.mark.parametrize("first", [True, False])
def test_a_fault_on_top_of_noise_is_found(first: bool) -> None:
    """The eager step of a check gives tensors other memory; more replays, to tell noise, find them in their own."""
    hidden = Box(1.0)
    rig = build(partial(teacher_rig, ema, first=first, noise=lambda x: noisy(x) * hidden.item))
    rig.after = lambda index: setattr(hidden, "item", 1.0 if index < BEFORE_REPLAY + 3 else 1.001)
    step = managed(rig, verify=1)
    with pytest.warns(UserWarning, match=r"replay 5 of .*two replays differ by (0|\d\S*e-0[678]) "):
        drive(rig, step)
    assert step.stats.verified == 4


def test_two_shapes_take_turns() -> None:
    """Each program has memory of its own for the teacher, and finds there what the other one left."""

    def make() -> Rig:
        rig = teacher_rig(ema)
        ragged = float_batches(CALLS, size=4)
        rig.calls = [batch for pair in zip(rig.calls, ragged, strict=True) for batch in pair]
        return rig

    assert_equals_eager(make, captured=2, replayed=2 * CALLS - BEFORE_TWO)


def _load(rig: Rig, *, assign: bool) -> Rig:
    teacher = rig.owners["teacher"]
    start = {name: value.clone() for name, value in teacher.state_dict().items()}
    copies = lambda: {name: value.clone() for name, value in start.items()}  # noqa: E731
    rig.after = lambda index: index in (9, 14) and teacher.load_state_dict(copies(), assign=assign)
    return rig


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_is_loaded_between_calls(assign: bool) -> None:
    """Its values are what the next step starts from."""
    step = assert_same_as_eager(lambda: _load(teacher_rig(ema, "buffers"), assign=assign), verify="off")
    assert step.stats.replayed == CALLS - BEFORE_REPLAY


@pytest.mark.parametrize("policy", [Policy.train(), COPIED], ids=["adopted", "copied in"])
def test_a_program_by_itself(policy: Policy) -> None:
    """Capturing leaves the teacher as it was found, and each replay moves it on."""
    make = partial(teacher_rig, ema, "buffers")
    rig = build(make)
    drive(rig, rig.step, 1)
    expected = drive(rig, rig.step, 6)
    rig = build(make)
    drive(rig, rig.step, 1)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    program = capture(plan, feed=rig.calls[0], policy=policy, backend="tape")
    assert_same(expected.state, drive(rig, lambda *args: program.replay(args), 6).state)


def test_memory_that_was_given_back() -> None:
    """As some do who bring weights to another device and back: the recording's place is gone."""

    def make() -> Rig:
        model = nn.Linear(8, 4)

        def after(index: int) -> None:
            if index % 8 == 7:
                new = model.weight.data.clone()
                model.weight.untyped_storage().resize_(0)
                model.weight.data = new

        return Rig(
            lambda x: model(x).detach().square().sum(), {"model": model}, [(x,) for x, _ in float_batches(30)], after
        )

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.replayed > 10
    assert "the memory of model.weight was freed" in step.report()


def flattened(model: nn.Linear) -> Tensor:
    """One memory for all weights, as some do to average them fast."""
    whole = torch.cat([p.data.flatten() for p in model.parameters()])
    for p, part in zip(model.parameters(), whole.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = part.view(p.shape)
    return whole


def doubled(model: nn.Linear) -> Tensor:
    whole = model.bias.data * 2
    model.bias.data = whole
    return whole


@pytest.mark.parametrize("move", [flattened, doubled])
def test_memory_that_other_code_keeps_and_writes_to_later(move: Callable[[nn.Linear], Tensor]) -> None:
    """The weights have to go on lying there, so that the step is captured anew."""

    def make() -> Rig:
        model, kept = nn.Linear(8, 4), list[Tensor]()

        def after(index: int) -> None:
            if index == 10:
                kept.append(move(model))
            for whole in kept:
                whole.mul_(0.99)

        calls = [(x,) for x, _ in float_batches(30)]
        return Rig(lambda x: model(x).detach().square().sum(), {"model": model}, calls, after=after)

    step = assert_same_as_eager(make, verify="off")
    assert step.stats.captured == 2
    assert step.stats.replayed > 15
