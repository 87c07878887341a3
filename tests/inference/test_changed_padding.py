"""Functions that begin to do something else with padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import SkipReason, graphed


class Changing(nn.Module):
    """What comes out is another structure, or shape, from some call on."""

    way = "plain"

    def forward(self, x: Tensor) -> Any:
        """One result, a pair, or a transposed one."""
        y = x * 2
        if self.way == "other":
            return x * 3
        return (y, y + 1) if self.way == "pair" else y.T if self.way == "transposed" else y


@pytest.mark.parametrize("way", ["pair", "transposed"])
def test_padded_results_that_become_others(way: str) -> None:
    """The first such call is made without padding, as a new function's first call is."""
    model = Changing()
    fast = graphed(model, shapes="bucket", buckets={0: [8]}, backend="tape")
    x = torch.arange(20.0).reshape(5, 4)
    with torch.no_grad():
        for _ in range(12):
            assert torch.equal(fast(x), x * 2)
        model.way = way
        for _ in range(6):
            assert all(map(torch.equal, _as_tuple(model(x)), _as_tuple(fast(x))))


class Detecting(nn.Module):
    """Returns something else while it trains."""

    def forward(self, x: Tensor) -> Any:
        """One result, or three."""
        return (x, x.sum(1), x.T + 1) if self.training else x.T * 2


@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_results_that_alternate(outputs: str) -> None:
    """Two programs of one capture size, of which each returns another structure."""
    model = Detecting()
    fast = graphed(model, shapes="bucket", buckets={0: [4]}, backend="tape", outputs=outputs, verify="off")
    x = torch.arange(12.0).reshape(3, 4)
    with torch.no_grad():
        for number in range(40):
            model.train(number % 3 == 0)
            assert all(map(torch.equal, _as_tuple(model(x)), [leaf + 0 for leaf in _as_tuple(fast(x))]))
    assert fast.stats.captured == 2, fast.report()
    assert fast.stats.replayed > 20


class Mixing(nn.Module):
    """Begins to look at the other rows, in results of the same shape."""

    mixes = False

    def forward(self, x: Tensor) -> Tensor:
        """Twice the input, with its mean or without."""
        y = x * 2
        return y + y.mean(0) if self.mixes else y


@pytest.mark.parametrize("whole", [False, True])
def test_padding_that_begins_to_matter(whole: bool) -> None:
    """The padding is checked again for whatever was captured since, and if by a call without any padding."""
    model = Mixing()
    fast = graphed(model, shapes="bucket", buckets={0: [8]}, backend="tape", on_failure="eager")
    five, eight = torch.arange(20.0).reshape(5, 4), torch.arange(32.0).reshape(8, 4)
    with torch.no_grad():
        for _ in range(20):
            assert torch.equal(fast(five), model(five))
        assert fast.stats.replayed > 10
        checked = fast.shapes.checked
        model.mixes = True
        for _ in range(6 if whole else 0):
            assert torch.equal(fast(eight), model(eight))
        with pytest.warns(UserWarning, match="padding from 5 to 8 changes the outcome of the step: result: 20 of 20"):
            assert torch.equal(fast(five), model(five))
        assert fast.shapes.checked == checked
        assert torch.equal(fast(five), model(five))


@pytest.mark.twice
def test_a_captured_program_is_checked_with_padding() -> None:
    """One that turns out well is padded from then on, checked as often as any other."""
    model = Changing()
    fast = graphed(model, shapes="bucket", buckets={0: [8]}, backend="tape")
    x = torch.arange(20.0).reshape(5, 4)
    with torch.no_grad():
        for _ in range(20):
            fast(x)
        checked, model.way = fast.shapes.checked, "other"
        for _ in range(10):
            assert torch.equal(fast(x), model(x))
    assert fast.stats.captured == 2
    assert fast.shapes.checked == checked + 5, "one eager call, two traces, a capture and a replay"


def test_padded_calls_of_a_refused_function_are_right() -> None:
    """They stay eager, and are cut like others."""

    def function(x: Tensor) -> Tensor:
        return x * x.sum(1).max().tolist()

    fast = graphed(function, shapes="bucket", buckets={0: [8]}, backend="tape", on_failure="eager")
    x = torch.arange(20.0).reshape(5, 4)
    with torch.no_grad():
        fast(x)
        fast(x)
        with pytest.warns(UserWarning, match="Tensor.tolist reads"):
            assert torch.equal(fast(x), function(x))
        for _ in range(6):
            assert torch.equal(fast(x), function(x))
    assert fast.stats.replayed == 0
    assert fast.stats.skipped[SkipReason.HOST_SYNC] >= 5


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
