"""Scalars that a step returns: parts of one vector while a program has them, tensors of their own for the caller."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan import capture, compile_plan
from graphplan.compare.moving import apart


def _separate(x: Tensor) -> Any:
    return x.sum(), x.mean(), x.amax()


def _elements(x: Tensor) -> Any:
    vector = x.flatten().cumsum(0)
    return {"third": vector[2], "first": vector[0], "second": vector[1]}


def _elements_and_others(x: Tensor) -> Any:
    vector = x.flatten().cumsum(0)
    return [x.sum(), vector[3], vector[2], x.mean(), vector[0], vector[2], (x > 0).sum()]


def _every_other(x: Tensor) -> Any:
    vector = x.flatten().cumsum(0)
    return vector[0], vector[2], vector[4]


@pytest.mark.parametrize(
    ("step", "stacks"), [(_separate, 1), (_elements, 0), (_elements_and_others, 1), (_every_other, 1)]
)
def test_scalars_are_handed_out_as_they_were_returned(step: Any, stacks: int) -> None:
    """With one copy for those that lie next to each other already. Whatever is done to one of them stays with it."""
    batches = [torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    plan = compile_plan(step, batches[0])
    program = capture(plan, feed=(batches[0],), backend="tape")
    assert program._recording is not None
    assert program._recording.launches == plan.launches + stacks
    held: list[tuple[list[Tensor], list[float]]] = []
    for batch in batches:
        expected = torch.utils._pytree.tree_leaves(step(batch))
        found = torch.utils._pytree.tree_leaves(program.replay((batch,)))
        assert [value.item() for value in found] == [value.item() for value in expected]
        held.append((found, [value.item() for value in expected]))
    found, numbers = held[0]
    assert [value.item() for value in found] == numbers, "another replay does not write to it"
    found[0].add_(100)
    assert [value.item() for value in found[1:]] == numbers[1:]


@pytest.mark.parametrize("way", ["below views", "detached"])
def test_what_was_one_vector_is_as_good_as_tensors_of_their_own(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be written to, with what asks for gradients too, and nothing else changes."""
    if way == "detached":
        monkeypatch.setattr("graphplan.compare.moving._BELOW_VIEWS", None)
    one, two = apart(torch.tensor([1.0, 2.0]))
    weight = torch.tensor(3.0, requires_grad=True)
    one.mul_(weight)
    one.backward()
    assert (one.item(), two.item()) == (3.0, 2.0)
    assert weight.grad is not None
    assert weight.grad.item() == 1.0
    assert not two.requires_grad
    assert pickle.loads(pickle.dumps(two)).item() == 2.0
