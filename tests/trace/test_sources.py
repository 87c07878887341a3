"""Where operators come from, asked one after another: as if each were looked for alone."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step
from graphplan.errors import LearningRateError
from graphplan.observe.source import Source, Sources, find_source, runs_step
from graphplan.tensors.storages import storage_id
from graphplan.trace.mode import TraceMode
from graphplan.trace.rate_reads import RateWatch
from graphplan.trace.records import Trace

Ask = Callable[[], None]


class _Asked:
    """Asks both ways."""

    def __init__(self) -> None:
        self.sources = Sources()
        self.pairs: list[tuple[Source, Source]] = []

    def __call__(self) -> None:
        caller = sys._getframe(1)
        self.pairs.append((self.sources.find(caller), find_source(caller)))


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


def test_each_is_named_as_if_it_were_alone() -> None:
    asked = _Asked()
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
        for each in (asked for _ in range(3)):
            each()
        optimizer.step(lambda: model(torch.ones(2)))

    run()
    assert len(asked.pairs) == 8 + 4 + 8 + 3 + 4 + 6
    assert all(found == expected for found, expected in asked.pairs)
    assert [expected.component for _, expected in asked.pairs][8:12] == [*["optimizer"] * 3, "step"]
    assert {expected.optimizer for _, expected in asked.pairs} == {"", "Descends"}


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


def test_a_helper_of_a_method_called_step_is_let_go_when_it_has_returned() -> None:
    """What its variables held would be there in the backward pass, and what asks for it would see it."""
    seen: list[bool] = []

    class Loop:
        def __init__(self) -> None:
            self.model = nn.Linear(2, 2)

        def loss(self, x: Tensor) -> Tensor:
            hidden = self.model(x) * 2
            held = weakref.ref(hidden)
            out = (hidden + 1).mean()
            out.register_hook(lambda grad: seen.append(held() is not None))
            return out

        def step(self, x: Tensor) -> None:
            self.model.zero_grad()
            self.loss(x).backward()

    loop = Loop()
    fast = graph_step(loop.step, backend="tape", warmup_steps=1, allow=("seen",))
    for _ in range(6):
        fast(torch.ones(1, 2))
    assert fast.stats.traced and fast.stats.captured == 1
    assert seen and not any(seen)


def test_one_of_the_steps_own_is_not_taken_for_the_optimizers() -> None:
    """After an operator that the trace before has not got, the next one there may only look like it."""
    rate, weight = torch.tensor(0.1), torch.ones(3)

    class Scales(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([nn.Parameter(torch.ones(3))], {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            weight.mul_(rate)

    optimizer = Scales()

    @runs_step
    def step(branches: bool) -> None:
        x = torch.zeros(3)
        if branches:
            x.detach()
            weight.mul_(rate)
        optimizer.step()

    before: Trace | None = None
    for branches, components in ((False, "so"), (True, "ssso"), (True, "ssso")):
        record = Trace()
        with TraceMode(record, RateWatch(record, lambda: {storage_id(rate) or 0}), before):
            step(branches)
        assert "".join(each.source.component[0] for each in record.operators) == components
        assert isinstance(record.violation, LearningRateError) is branches
        before = record
