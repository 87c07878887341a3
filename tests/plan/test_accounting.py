"""Exactly once: every batch is trained on once, every step is compiled once, every plan belongs to one object."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from graphplan import HostSyncError, Policy, SkipReason, capture, compile_cached, compile_plan, graph_step
from tests.facts import assert_same, flatten
from tests.models import float_batches, training_rig
from tests.twins import Rig, assert_equals_eager, build, drive, managed, state_of

make_rig = partial(training_rig, "mlp", "adamw", sizes=(8,) * 24)


def ledger_rig(sizes: tuple[int, ...]) -> Rig:
    """A step that books the number of the batch it trains on, as a tensor and in a Python counter."""
    model = nn.Linear(8, 4)
    model.register_buffer("ledger", torch.zeros(len(sizes), dtype=torch.int64))
    model.calls = 0
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)

    def train_step(x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.ledger.index_add_(0, number, torch.ones_like(number))
        model.calls += 1
        return loss

    calls = []
    for number, size in enumerate(sizes):
        x, y = float_batches(1, size)[0]
        calls.append((x, y, torch.tensor([number])))
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


@pytest.mark.parametrize("options", [{}, {"warmup_steps": 1}, {"eager_if": 5}], ids=str)
def test_every_batch_is_trained_on_once(options: dict[str, Any]) -> None:
    """Through warm-up, traces, capture, replays, ragged batches and eager ones, each batch is booked once."""
    sizes = tuple(5 if index % 7 == 6 else 8 for index in range(60))
    rig = build(partial(ledger_rig, sizes))
    step = managed(rig, **options)
    drive(rig, step)
    model = rig.owners["model"]
    assert model.ledger.tolist() == [1] * len(sizes)
    assert model.calls == len(sizes)
    stats = step.stats
    assert stats.eager + stats.traced + stats.captured + stats.replayed == len(sizes)
    assert stats.replayed > 20


@pytest.mark.parametrize("warmup", [1, 2, 11])
@pytest.mark.twice
def test_warmup_steps(warmup: int) -> None:
    """As many eager steps as asked for come before the two traced ones."""
    step = assert_equals_eager(make_rig, replayed=24 - warmup - 3, warmup_steps=warmup)
    assert (step.stats.eager, step.stats.traced, step.stats.captured) == (warmup, 2, 1)


def test_eager_if_takes_a_number_or_a_predicate() -> None:
    """Steps that are meant to run Python do, are counted, and the numbers stay eager's."""
    every_fourth = assert_equals_eager(make_rig, replayed=_replayed_with_every_fourth(24), eager_if=4)
    assert every_fourth.stats.skipped[SkipReason.EAGER_IF] == 24 // 4
    step = assert_equals_eager(make_rig, captured=0, replayed=0, eager_if=lambda x, y: True)
    assert step.stats.skipped[SkipReason.EAGER_IF] == 24 == step.stats.eager


def _replayed_with_every_fourth(calls: int) -> int:
    return calls - calls // 4 - 6


def test_the_eager_backend() -> None:
    """``backend="eager"`` runs every step as it is and says so in the statistics."""
    step = assert_equals_eager(make_rig, captured=0, replayed=0, backend="eager")
    assert step.stats.eager == 24
    assert step.stats.skipped[SkipReason.BACKEND_EAGER] == 24


def test_invalidate_recaptures() -> None:
    """An invalidated step goes on with the right numbers and is captured anew."""
    rig = build(make_rig)
    expected = drive(rig, rig.step)
    rig = build(make_rig)
    step = managed(rig)
    inner = rig.after

    def after(index: int) -> None:
        inner(index)
        if index == 12:
            step.invalidate("the test says so")

    rig.after = after
    found = drive(rig, step)
    assert_same(expected.state, found.state)
    assert_same(flatten(o=expected.outputs), flatten(o=found.outputs))
    stats = step.stats
    assert stats.recaptured == 1
    assert stats.eager + stats.traced + stats.captured + stats.replayed == 24
    assert stats.replayed >= 24 - 2 * 6


def test_compiling_a_thousand_times_compiles_once() -> None:
    """The cache gives the same plan, and the function runs only while it is compiled; another shape is another plan."""
    runs = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return x * 2

    first = compile_cached(counted, torch.ones(3))
    once = runs
    for index in range(1000):
        assert compile_cached(counted, torch.full((3,), float(index))) is first
    assert runs == once > 0
    assert compile_cached(counted, torch.ones(4)) is not first
    assert runs == 2 * once


class Scaler:
    """Two instances share their methods' code but not their tensors."""

    def __init__(self, scale: float) -> None:
        self.weight = torch.full((2,), scale)

    def apply(self, x: Tensor) -> Tensor:
        return x * self.weight

    def shift(self, x: Tensor) -> Tensor:
        return x + self.weight


def test_bound_methods_have_plans_of_their_own() -> None:
    """The same method of one object hits the cache; another object or another method does not."""
    one, two = Scaler(1.0), Scaler(2.0)
    x = torch.ones(2)
    plan = compile_cached(one.apply, x, owners={"one": one})
    assert compile_cached(one.apply, x, owners={"one": one}) is plan
    others = [compile_cached(f, x) for f in (two.apply, one.shift)]
    assert len({id(p) for p in (plan, *others)}) == 3
    assert capture(plan, feed=(x,), policy=Policy.train(), backend="tape").replay((x,)).tolist() == [1.0, 1.0]
    assert capture(others[0], feed=(x,), policy=Policy.train(), backend="tape").replay((x,)).tolist() == [2.0, 2.0]


def at_an_address_of(dead: set[int], scale: float) -> Scaler:
    """A new scaler, at the address of one that is dead where the allocator still has one of those to give.

    Which free slot of its size CPython hands out next depends on all that the process has allocated before: taking
    slots until one of them is a freed one does not.
    """
    taken = [Scaler.__new__(Scaler)]
    while dead and id(taken[-1]) not in dead and len(taken) < 200_000:
        taken.append(Scaler.__new__(Scaler))
    taken[-1].__init__(scale)  # type: ignore[misc]
    return taken[-1]


def test_a_reused_id_cannot_share_a_plan() -> None:
    """Objects that die and whose addresses are used again: every plan computes with its own object's tensor."""
    x = torch.ones(2)
    dead: set[int] = set()
    reused = 0
    for index in range(20):
        scaler = at_an_address_of(dead, float(index))
        reused += id(scaler) in dead
        plan = compile_cached(scaler.apply, x)
        program = capture(plan, feed=(x,), policy=Policy.train(), backend="tape")
        assert program.replay((x,)).tolist() == [float(index)] * 2
        program.close()
        dead.add(id(scaler))
        del plan, program, scaler
        gc.collect()
    assert reused, "no address was used twice, so this run has shown nothing"


def test_the_cache_keeps_nothing_alive() -> None:
    """A model whose plan is cached can be collected."""
    scaler = Scaler(1.0)
    alive = weakref.ref(scaler)
    compile_cached(scaler.apply, torch.ones(2), owners={"scaler": scaler})
    del scaler
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("closed", [True, False])
def test_a_step_can_be_collected(closed: bool) -> None:
    """A graphed step that goes out of scope takes its model, optimizer and buffers with it."""
    rig = build(make_rig)
    step = managed(rig)
    drive(rig, step)
    alive = [weakref.ref(rig.owners["model"]), weakref.ref(rig.owners["optimizer"]), weakref.ref(step.plan)]
    if closed:
        step.close()
    del rig, step
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


@pytest.mark.twice
def test_two_steps_on_two_models() -> None:
    """Steps of one function have their own plans and programs, and follow a generator that is reseeded outside."""
    makes = [make_rig, partial(training_rig, "mlp", "adagrad", sizes=(8,) * 24)]
    rigs, twins = [build(make) for make in makes], [build(make) for make in makes]
    steps = [managed(rig) for rig in rigs]
    for index in range(24):
        for rig, twin, step in zip(rigs, twins, steps, strict=True):
            for side, call in ((twin, twin.step), (rig, step)):
                torch.manual_seed(index)
                call(*side.calls[index])
                side.after(index)
            assert_same(state_of(twin) | {"generator": 0}, state_of(rig) | {"generator": 0})
    assert steps[0].plan is not steps[1].plan
    assert all(step.stats.replayed == 18 for step in steps)


def test_compile_restores_what_only_a_closure_holds() -> None:
    """Three runs of the step leave a tensor that nobody named as it was."""
    total = torch.zeros(())

    def step(x: Tensor) -> Tensor:
        return total.add_(x.sum())

    plan = compile_plan(step, torch.ones(3))
    assert total.item() == 0.0
    assert [e.name for e in plan.state] == ["total"]


@pytest.mark.parametrize("reads", [False, True])
def test_a_generator_of_the_step_s_own_is_put_back(reads: bool) -> None:
    """By compiling, which runs the step three times, and by a refused call."""
    noise = torch.Generator().manual_seed(3)

    def step(x: Tensor) -> Tensor:
        drawn = x + torch.randn(3, generator=noise)
        return drawn * complex(drawn.sum()).real if reads else drawn

    if reads:
        graphed = graph_step(step, backend="tape", warmup_steps=1)
        graphed(torch.ones(3))
        before = noise.get_state()
        with pytest.raises(HostSyncError, match=r"\.item\(\)"):
            graphed(torch.ones(3))
    else:
        before = noise.get_state()
        plan = compile_plan(step, torch.ones(3))
        assert torch.equal(noise.get_state(), before)
        capture(plan, feed=(torch.ones(3),), backend="tape")
    assert torch.equal(noise.get_state(), before)
