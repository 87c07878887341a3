"""Dropout that an operator draws from a state of its own: cuDNN's between the layers of an RNN."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import compile_plan, graph_step
from graphplan.environment.devices import set_generator
from tests.twins import Rig, assert_same_as_eager


@pytest.fixture
def recurrent() -> Iterator[None]:
    """An operator with the arguments of cuDNN's, which moves on a state that its schema says it only reads."""
    library = torch.library.Library("graphplan_tests", "FRAGMENT")
    library.define("recurrent(Tensor x, float dropout, bool train, Tensor? dropout_state) -> Tensor")

    def run(x: Tensor, dropout: float, train: bool, state: Tensor | None) -> Tensor:
        return x * state.add_(1) if state is not None and train and dropout else x * 1

    library.impl("recurrent", run, "CPU")
    yield
    library._destroy()


def _rig(state: Tensor | None, dropout: float = 0.5) -> Rig:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    # torch's own lies in C++.
    hidden = itertools.repeat(state).__next__

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        drawn = torch.ops.graphplan_tests.recurrent(x, dropout, model.training, hidden())
        loss: Tensor = model(drawn).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    calls = [(torch.randn(2, 4),) for _ in range(20)]
    return Rig(step, {"model": model, "optimizer": optimizer}, calls, extra={} if state is None else {"state": state})


@pytest.mark.usefixtures("recurrent")
def test_a_state_that_operators_draw_from_is_state_of_the_step() -> None:
    """It is put back by checks, and goes on with replays."""
    step = assert_same_as_eager(lambda: _rig(torch.zeros(1)))
    # One trace finds it, and makes the plan.
    assert (step.stats.traced, step.stats.captured) == (1, 1)
    assert step.stats.replayed >= 10
    assert step.stats.verified >= 3
    assert [e.name for e in step.plan.state if "dropout" in e.name] == ["dropout_states.cpu"]


@pytest.mark.usefixtures("recurrent")
@pytest.mark.parametrize(("state", "dropout"), [(None, 0.5), (torch.zeros(1), 0.0)])
def test_what_draws_nothing_has_no_state(state: Tensor | None, dropout: float) -> None:
    step = assert_same_as_eager(lambda: _rig(state, dropout))
    assert step.stats.replayed >= 10
    assert not [e.name for e in step.plan.state if "dropout" in e.name]


@pytest.mark.usefixtures("recurrent")
def test_what_does_not_train_has_no_state() -> None:
    state = torch.zeros(1)

    def make() -> Rig:
        rig = _rig(state)
        rig.owners["model"].eval()
        return rig

    step = assert_same_as_eager(make)
    assert step.stats.replayed >= 10
    assert state == 0


@pytest.mark.usefixtures("recurrent")
def test_a_plan_alone_leaves_the_state_as_it_was() -> None:
    state = torch.zeros(1)
    rig = _rig(state)
    plan = compile_plan(rig.step, *rig.calls[0], owners=rig.owners)
    assert state == 0
    assert "dropout_states.cpu" in [e.name for e in plan.state]


def test_a_generator_is_put_back() -> None:
    generator = torch.Generator()
    state = generator.get_state()
    first = torch.rand(3, generator=generator)
    set_generator(generator, state)
    assert torch.equal(torch.rand(3, generator=generator), first)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_with_dropout_is_replayed_on_the_cpu(kind: Any) -> None:
    model = kind(4, 4, num_layers=2, dropout=0.5)
    step = graph_step(lambda x: model(x)[0].square().mean(), owners={"model": model}, min_speedup=0)
    for _ in range(12):
        step(torch.randn(3, 2, 4))
    assert step.stats.replayed > 5
