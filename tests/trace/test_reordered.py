"""Operators that another thread runs in an order of its own, as autograd's engine does on devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from graphplan import ControlFlowError, graph_step
from tests.models import Box

X = torch.arange(4.0)


def elsewhere(body: Callable[[], Any], *, derives: bool = False) -> Any:
    """What ``body`` returns in another thread, with the modes of this one, as the engine's threads have them; with
    gradients enabled as for a derivative that is to be derived again, if it ``derives``.
    """
    modes, found = _get_current_dispatch_mode_stack(), []

    def run() -> None:
        for mode in modes:
            mode.__enter__()
        try:
            with torch.set_grad_enabled(derives):
                found.append(body())
        finally:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


class Work(nn.Module):
    """Two products that do not depend on each other, in an order that changes every other step up to step ``until``."""

    def __init__(self, until: int, *, threaded: bool) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.steps, self.until, self.threaded = Box(0), until, threaded

    def body(self, x: Tensor) -> Tensor:
        """The products, and their sum."""
        swap = self.steps.item % 2 == 1 and self.steps.item < self.until
        if swap:
            b = x.sinh()
            a = x.cosh()
        else:
            a = x.cosh()
            b = x.sinh()
        return a * 2 + b

    def forward(self, x: Tensor) -> Tensor:
        """Adds what it computes to its total."""
        found = elsewhere(lambda: self.body(x)) if self.threaded else self.body(x)
        self.total.add_(found)
        return found


def run(until: int, *, threaded: bool, calls: int) -> tuple[list[Tensor], Tensor, Any]:
    work = Work(until, threaded=threaded)
    step = graph_step(work, backend="tape", allow=("work.steps*", "*steps.item", "Thread.start"), verify=1)
    outputs = []
    for _ in range(calls):
        with torch.no_grad():
            outputs.append(step(X))
        work.steps.item += 1
    return outputs, work.total, step


@pytest.mark.twice
def test_an_order_that_settles_is_waited_for() -> None:
    """Each time twice as long; every call is a step all the same."""
    outputs, total, step = run(12, threaded=True, calls=40)
    assert step.stats.captured == 1
    assert step.stats.replayed > 10
    assert step.stats.verified == step.stats.replayed
    assert "traced anew: autograd's engine ran the same operators in another order" in step.report()
    expected = X.cosh() * 2 + X.sinh()
    assert all(torch.equal(output, expected) for output in outputs)
    assert torch.equal(total, sum(outputs[1:], outputs[0].clone()))


@pytest.mark.twice
def test_an_order_that_never_settles_is_refused() -> None:
    with pytest.raises(ControlFlowError, match=r"operator \d+ is aten\.(sinh|cosh)\.default .* on one step and aten\."):
        run(10**6, threaded=True, calls=200)


@pytest.mark.twice
def test_an_order_that_the_steps_own_code_changes_is_refused_at_once() -> None:
    with pytest.raises(ControlFlowError, match=r"operator \d+ is aten\.(sinh|cosh)\.default .* on one step and aten\."):
        run(10**6, threaded=False, calls=6)


class Sums(nn.Module):
    """A sum of three terms that is added up in one of two orders, which round differently."""

    def __init__(self, order: Box, *, threaded: bool, recomputes: bool = False) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(64))
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64))
        self.order, self.threaded, self.recomputes = order, threaded, recomputes

    def body(self, x: Tensor) -> Tensor:
        """The sum."""
        if self.recomputes:
            found: Tensor = checkpoint(self.add, x, use_reentrant=False)
            return found
        return self.add(x)

    def add(self, x: Tensor) -> Tensor:
        """The three terms, added up."""
        order, factor = self.order.item
        a, b, c = x * self.weight, (x.cos() * self.weight).sin(), x.sin() * factor
        return (a + b) + c if order == "first" else a + (b + c)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the sum to the total."""
        found = elsewhere(lambda: self.body(x), derives=True) if self.threaded else self.body(x)
        self.total.add_(found.detach())
        return found.detach()


def checked(factor: float, **how: bool) -> Any:
    """A step, replayed once as it was recorded, and then checked beside eager steps of the other order."""
    order = Box(("first", 1.0))
    step = graph_step(Sums(order, **how), backend="tape", allow=("order.item", "Thread.start"), verify="geometric")
    x = torch.linspace(-3, 3, 64)
    for _ in range(7):
        step(x)
    assert (step.stats.replayed, step.stats.verified) == (1, 1)
    order.item = "second", factor
    for _ in range(7):
        step(x)
    return step


def test_an_order_that_changes_later_is_no_fault() -> None:
    """The engine's threads may add up in another order than when they were recorded: that is eager's own noise."""
    step = checked(1.0, threaded=True)
    assert (step.stats.replayed, step.stats.verified) == (8, 4)


@pytest.mark.twice
def test_an_order_of_the_steps_own_that_changes_later_is_a_fault() -> None:
    with pytest.warns(UserWarning, match=r"replay 2 of Sums is not what the eager step does: .*total"):
        checked(1.0, threaded=False)


@pytest.mark.twice
def test_what_a_checkpoint_recomputes_is_in_no_order_of_the_engines() -> None:
    with pytest.warns(UserWarning, match=r"replay 2 of Sums is not what the eager step does: .*total"):
        checked(1.0, threaded=True, recomputes=True)


def test_no_order_explains_another_sum() -> None:
    with pytest.warns(UserWarning, match=r"replay 2 of Sums is not what the eager step does: .*total"):
        checked(1.0001, threaded=True)
