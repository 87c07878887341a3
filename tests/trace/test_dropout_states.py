"""Dropout that an operator draws from a state of its own: cuDNN's between the layers of an RNN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step
from graphplan.errors import GeneratorSeekError

_STATE = torch.zeros(1)


@pytest.fixture
def recurrent() -> Iterator[None]:
    """An operator with the arguments of cuDNN's."""
    library = torch.library.Library("graphplan_tests", "FRAGMENT")
    library.define("recurrent(Tensor x, bool train, Tensor? dropout_state) -> Tensor")
    library.impl("recurrent", lambda x, train, state: x * 1 if state is None else x * state.add_(1), "CPU")
    yield
    library._destroy()


def _run(model: nn.Module, state: Tensor | None) -> int:
    """Twelve calls; how many were replays."""

    def step(x: Tensor) -> Tensor:
        return torch.ops.graphplan_tests.recurrent(model(x).detach(), model.training, state)

    run = graph_step(step, owners={"model": model}, min_speedup=0)
    for _ in range(12):
        run(torch.randn(2, 4))
    return run.stats.replayed


@pytest.mark.usefixtures("recurrent")
def test_draws_from_an_operators_own_state_are_refused() -> None:
    with pytest.raises(GeneratorSeekError, match=r"recurrent.default draws dropout .* nn\.Dropout between layers"):
        _run(nn.Linear(4, 4), _STATE)


@pytest.mark.usefixtures("recurrent")
def test_without_draws_the_operator_is_replayed() -> None:
    assert _run(nn.Linear(4, 4).eval(), None) > 5


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_with_dropout_is_replayed_on_the_cpu(kind: Any) -> None:
    model = kind(4, 4, num_layers=2, dropout=0.5)
    step = graph_step(lambda x: model(x)[0].square().mean(), owners={"model": model}, min_speedup=0)
    for _ in range(12):
        step(torch.randn(3, 2, 4))
    assert step.stats.replayed > 5
