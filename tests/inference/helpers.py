"""Layers and calls that the tests of graphed functions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from graphplan import Graphed, graphed
from tests.facts import assert_same, flatten

TO_REPLAY = 5
"""The call that is the first replay: one warms up, two are traced, one is captured."""


class Layer(nn.Module):
    """A linear layer with a scale of its own, and a method beside ``forward``."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, causal: bool = True) -> Tensor:
        x = self.linear(x) * self.scale
        x = x.cumsum(0) if causal else x
        return x if mask is None else x * mask


def keep(value: Any) -> Any:
    """Copies of the tensors in ``value``."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def assert_replays(fn: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **options: Any) -> Graphed:
    """Check that each call of the graphed function is bit by bit what the function itself gives, and returns the
    former; the calls after the fourth of a shape have to be replays.
    """
    fast: Graphed = graphed(fn, **{"backend": "tape", **options})
    for args in calls:
        expected = keep(fn(*keep(args)))
        assert_same(flatten(result=expected), flatten(result=keep(fast(*args))))
    return fast
