"""Memory that a recording reads or writes, and that somebody gives back or swaps: the program is captured anew."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import GuardError, capture, compile_plan
from tests.facts import assert_same
from tests.models import Mlp, float_batches
from tests.twins import Rig, assert_equals_eager, build, drive, state_of

CALLS, WHEN = 24, 11
"""The call after ``WHEN`` is a replay, and no check: what it starts from is what a replay left."""


def _reallocate(tensor: Tensor, blockers: list[Tensor]) -> None:
    """Give the memory back, and take other memory for the same values: offloading does that."""
    kept = tensor.detach().clone()
    before, storage = tensor.data_ptr(), tensor.untyped_storage()
    size = storage.nbytes()
    for _ in range(1000):
        storage.resize_(0)
        # Whoever allocates next gets the same memory, most often.
        blockers.append(torch.empty_like(kept))
        storage.resize_(size)
        if tensor.data_ptr() != before:
            break
    assert tensor.data_ptr() != before
    with torch.no_grad():
        tensor.copy_(kept)


def _weight(model: nn.Module, weights: Tensor, blockers: list[Tensor]) -> None:
    _reallocate(model[0].weight, blockers)  # type: ignore[index]


def _buffer(model: nn.Module, weights: Tensor, blockers: list[Tensor]) -> None:
    _reallocate(model[1].running_var, blockers)  # type: ignore[index]


def _gradient(model: nn.Module, weights: Tensor, blockers: list[Tensor]) -> None:
    _reallocate(model[0].weight.grad, blockers)  # type: ignore[index]


def _freed_gradient(model: nn.Module, weights: Tensor, blockers: list[Tensor]) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.untyped_storage().resize_(0)
        parameter.grad = None


def _unowned(model: nn.Module, weights: Tensor, blockers: list[Tensor]) -> None:
    weights.data = weights.flip(0)


def _unowned_strides(model: nn.Module, weights: Tensor, blockers: list[Tensor]) -> None:
    weights.data = weights.as_strided((4,), (0,))


LOSSES: Mapping[str, tuple[Callable[[nn.Module, Tensor, list[Tensor]], None], str]] = {
    "parameter": (_weight, r"the memory of model\.0\.weight was freed"),
    "buffer": (_buffer, r"the memory of model\.1\.running_var was freed"),
    "gradient": (_gradient, r"the memory of model\.0\.weight\.grad was freed"),
    "gradients without memory": (_freed_gradient, r"the memory of model\.\d\.\w+\.grad was freed"),
    "unowned": (_unowned, r"unowned\[0\], which no owner holds, got other memory or another shape \(.*step"),
    "unowned, in place": (_unowned_strides, r"unowned\[0\], which no owner holds, got other memory"),
}


def losing_rig(name: str, *, set_to_none: bool = True) -> Rig:
    """A usual step whose class weights only a cache holds; after call ``WHEN`` somebody gives memory back."""
    lose, _ = LOSSES[name]
    model: Any = Mlp()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    blockers: list[Tensor] = []

    @lru_cache
    def weights(device: torch.device) -> Tensor:
        return torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = F.cross_entropy(model(x), y, weight=weights(x.device))
        loss.backward()
        optimizer.step()
        return loss

    def after(index: int) -> None:
        if index == WHEN:
            lose(model, weights(model[0].weight.device), blockers)

    return Rig(step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)), after)


REPLAYED = WHEN + 1 - 6 + CALLS - (WHEN + 1) - 4
"""A capture anew takes one eager step, two traces and the recording."""


KINDS = [(name, True) for name in LOSSES] + [(name, False) for name in LOSSES if name != "gradients without memory"]


@pytest.mark.parametrize(("name", "set_to_none"), KINDS)
@pytest.mark.crossed(2)
def test_what_lost_its_memory_is_captured_anew(name: str, set_to_none: bool) -> None:
    """A graph would go on reading and writing where something else lies by now."""
    make = partial(losing_rig, name, set_to_none=set_to_none)
    step = assert_equals_eager(make, captured=2, replayed=REPLAYED)
    (event,) = [event for event in step.stats.events if "recapture" in event]
    assert re.search(LOSSES[name][1], event)


@pytest.mark.parametrize("name", ["parameter", "gradient"])
def test_a_program_by_itself_says_so(name: str) -> None:
    """Nothing has run when it does."""
    rig = build(partial(losing_rig, name))
    drive(rig, rig.step, WHEN)
    program = capture(compile_plan(rig.step, *rig.calls[0], owners=rig.owners), feed=rig.calls[0])
    program.replay(rig.calls[0])
    rig.after(WHEN)
    before = state_of(rig)
    with pytest.raises(GuardError, match=f"no longer fits: {LOSSES[name][1]}.*; capture it again"):
        program.replay(rig.calls[0])
    assert_same(before, state_of(rig))
