"""Where operators come from."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step
from graphplan.observe.source import Source, find_source, runs_step

Ask = Callable[[], None]


class Descends(torch.optim.Optimizer):
    """Does some of its work in a helper, which also calls the closure."""

    def __init__(self, params: Any, ask: Ask) -> None:
        super().__init__(params, {"lr": 0.1})
        self.ask = ask

    def step(self, closure: Any = None) -> None:
        self.ask()
        self._run(closure)

    def _run(self, closure: Any) -> None:
        self.ask()
        closure()
        self.ask()
        self._update()

    def _update(self) -> None:
        self.ask()


class Layer(nn.Module):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.ask()
        return x


def test_what_an_optimizers_step_runs_is_told_from_its_closure() -> None:
    found: list[Source] = []

    def asked() -> None:
        found.append(find_source())

    model = nn.Sequential(Layer(asked), nn.Sequential(Layer(asked), Layer(asked)))
    optimizer = Descends([nn.Parameter(torch.ones(2))], asked)

    def forward() -> None:
        asked()
        model(torch.ones(2))
        asked()

    @runs_step
    def run() -> None:
        forward()
        optimizer.step(forward)

    run()
    # What lies in the optimizer's own file may be its.
    components = [source.component for source in found]
    assert components == [*["step"] * 8, *["optimizer"] * 3, *["step"] * 6, *["optimizer"] * 3]
    assert {source.optimizer for source in found} == {"", "Descends"}


@pytest.mark.parametrize("fails", [False, True])
def test_frames_are_let_go_with_the_trace(fails: bool) -> None:
    """What a step's variables held would stay alive otherwise."""
    held: list[Any] = []

    class Value:
        pass

    def step(x: Tensor) -> Tensor:
        value = Value()
        held.append(weakref.ref(value))
        x = x + 1
        if fails and len(held) == 2:
            raise ValueError("the user's own")
        return x * 2

    fast = graph_step(step, backend="tape", warmup_steps=1, allow=("held",), on_failure="eager")
    gc.disable()
    try:
        for _ in range(2):
            with suppress(ValueError):
                fast(torch.ones(2))
            assert held[-1]() is None
    finally:
        gc.enable()
