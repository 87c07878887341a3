"""Partial functions are fed like containers: what they hold is fed with them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import FeedError
from tests.models import float_batches
from tests.plan.test_feeds import rig_of
from tests.twins import Rig, assert_equals_eager, build, managed


def _multiplied(x: Tensor, *, by: Any, shift: float = 0.0) -> Tensor:
    return x * by + shift


def test_a_partial_whose_keywords_change() -> None:
    """The same object: its numbers are in the signature, its tensors are copied in, its attributes stay with it."""

    def apply(model: nn.Module, x: Tensor, y: Tensor, function: Any) -> Tensor:
        return F.cross_entropy(model(function(x)), y) * function.scale

    def make() -> Rig:
        functions = [partial(_multiplied, by=2.0), partial(_multiplied, by=torch.ones(8))]
        for function in functions:
            function.scale = 0.5  # type: ignore[attr-defined]
        batches = enumerate(float_batches(44))
        rig = rig_of(apply, [(*batch, functions[number // 22]) for number, batch in batches])

        def after(index: int) -> None:
            if index == 10:
                functions[0].keywords["by"] = 3.0
            if index >= 30:
                functions[1].keywords["by"] = torch.full((8,), float(index))

        rig.after = after
        return rig

    assert_equals_eager(make, captured=3, replayed=44 - 3 * 6, verify="off")


def test_a_partial_that_holds_what_cannot_be_fed() -> None:
    def apply(model: nn.Module, x: Tensor, function: Any) -> Tensor:
        return (model(x) * len(function.keywords["by"])).square().mean()

    rig = build(lambda: rig_of(apply, [(x, partial(_multiplied, by={1, 2})) for x, _ in float_batches(6)]))
    step = managed(rig)
    with pytest.raises(FeedError, match=r"args\[1\]\.keywords\['by'\]: a set is fed, which is neither"):
        for args in rig.calls:
            step(*args)
