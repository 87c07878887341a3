"""Averages of weights whose factor a step computes of a count: operators take it as ``alpha`` or as a weight, and
replays go on with that of their own step.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from graphplan import HostScalarError
from tests.trace.test_refused_host import HANDED_OVER
from tests.twins import BEFORE_REPLAY, LAST_TRACE, Rig, assert_refused, line_of

CALLS = 16
Average = Callable[[list[Tensor], list[Tensor], float], object]


def by_alpha(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.mul_(factor).add_(weight, alpha=1 - factor)


def by_difference(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.sub_(average - weight, alpha=1 - factor)


def by_functions(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(torch.lerp(weight, torch.add(average, weight, alpha=factor), weight=0.5))


def by_lerp(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight, 1 - factor)


def by_named_weight(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(torch.lerp(average, weight, weight=1 - factor))


def by_lists(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    torch._foreach_mul_(averages, factor)
    torch._foreach_add_(averages, weights, alpha=1 - factor)


def by_new_lists(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    found = torch._foreach_sub(torch._foreach_mul(averages, factor), weights, alpha=factor - 1)
    torch._foreach_copy_(averages, found)


def by_lerp_of_lists(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    torch._foreach_lerp_(averages, weights, 1 - factor)


def by_what_lists_give(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    """Some releases of torch return the list that they write to, others nothing."""
    returned: Any = torch._foreach_mul_(averages, factor)
    torch._foreach_add_(averages if returned is None else returned, weights, alpha=1 - factor)
    made: Any = torch._foreach_mul(weights, factor)
    torch._foreach_mul_(averages, 1.0 if type(made) is tuple and returned is averages else 0.5)


def averaging_rig(average: Average, dtype: torch.dtype = torch.float32) -> Rig:
    """A student that is trained, and a teacher that follows it, first fast and then slowly."""
    student = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(dtype)
    teacher = deepcopy(student).requires_grad_(False)
    optimizer = SGD(student.parameters(), lr=0.1, fused=True)
    state = {"count": 0}

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (student(x) - teacher(x)).square().mean()
        loss.backward()
        optimizer.step()
        state["count"] += 1
        with torch.no_grad():
            average(list(teacher.parameters()), list(student.parameters()), 1 - 1 / (state["count"] + 1))
        return loss.detach()

    owners = {"student": student, "teacher": teacher, "optimizer": optimizer, "state": state}
    return Rig(train_step, owners, [(torch.randn(4, 8, dtype=dtype),) for _ in range(CALLS)])


AVERAGES = [by_alpha, by_difference, by_functions, by_lerp, by_named_weight, by_lists, by_new_lists, by_lerp_of_lists]
AVERAGES += [by_what_lists_give]


@HANDED_OVER
@pytest.mark.parametrize("average", AVERAGES, ids=lambda average: average.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_factor_that_changes_with_each_step(
    average: Average, dtype: torch.dtype, equals_eager: Callable[..., Any]
) -> None:
    """The bits are those of the number itself, without checks to put them right. Two traces find that it changes."""
    equals_eager(partial(averaging_rig, average, dtype), exact=True, verify="off", replayed=CALLS - BEFORE_REPLAY - 2)


def of_half_precision(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    """The kernel takes the number in single precision, which no tensor of half precision holds."""
    for average, weight in zip(averages, weights, strict=True):
        average.bfloat16().add_(weight.bfloat16(), alpha=factor)  # culprit


def of_one_number(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    """Another kernel rounds what is the same for all elements."""
    for average, weight in zip(averages, weights, strict=True):
        average.add_(weight.mean(), alpha=factor)  # culprit


def with_gradients(averages: list[Tensor], weights: list[Tensor], factor: float) -> None:
    """The derivative of ``lerp`` computes with the number itself."""
    with torch.enable_grad():
        averages[0].lerp(weights[0], 1 - factor).sum().backward()  # culprit
    averages[0].add_(weights[0].grad)


@HANDED_OVER
@pytest.mark.parametrize(
    ("average", "taken"), [(of_half_precision, "add_"), (of_one_number, "add_"), (with_gradients, "lerp")],
    ids=lambda each: getattr(each, "__name__", ""),
)  # fmt: skip
def test_a_factor_that_is_needed_as_a_number(average: Average, taken: str) -> None:
    patterns = [rf"uses state\.count at .*{line_of(average)}", rf"but an argument of `{taken}` needs the value"]
    assert_refused(partial(averaging_rig, average), HostScalarError, *patterns, done=LAST_TRACE)
