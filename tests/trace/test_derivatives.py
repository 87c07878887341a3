"""Higher derivatives and functional transforms inside a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from graphplan import RefusalError
from tests.failure_modes.naive import changing_rig, run_eagerly, stay
from tests.twins import assert_same_runs, build, drive, managed


def _penalty(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A gradient penalty: a derivative of a derivative."""
    x = x.detach().requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def _hessian_product(model: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = model[0].weight
    loss = F.cross_entropy(model(x), y)
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    (second,) = torch.autograd.grad((first * first.detach()).sum(), weight, create_graph=True)
    return loss + 0.1 * second.square().sum()


def _per_sample(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Losses of samples through ``vmap`` of a functional call."""
    head = nn.Linear(8, 4)
    head.load_state_dict({"weight": model[0].weight[:4].detach(), "bias": model[0].bias[:4].detach()})
    params = {"weight": model[0].weight[:4], "bias": model[0].bias[:4]}

    def one(row: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(head, params, (row[None],)), label[None])

    return F.cross_entropy(model(x), y) + vmap(one)(x, y).mean()


def _functional_grad(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on ``grad`` of a function of the input."""
    weight = model[0].weight
    slope = grad(lambda row: F.linear(row, weight).square().sum())(x[0])
    return F.cross_entropy(model(x), y) + 0.01 * slope.square().sum()


@pytest.mark.parametrize("loss", [_penalty, _hessian_product])
@pytest.mark.twice
def test_double_backward(loss: Callable[..., Tensor]) -> None:
    """A backward pass through a backward pass is recorded like any other."""
    make = partial(changing_rig, stay, loss)
    expected = run_eagerly(make)
    rig = build(make)
    step = managed(rig)
    assert_same_runs(expected, drive(rig, step))
    assert step.stats.replayed == 18


@pytest.mark.parametrize("loss", [_per_sample, _functional_grad])
@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
@pytest.mark.twice
def test_functional_transforms(loss: Callable[..., Tensor]) -> None:
    """``torch.func`` inside a step: eager's numbers, or a refusal; never other numbers."""
    make = partial(changing_rig, stay, loss)
    expected = run_eagerly(make)
    rig = build(make)
    step = managed(rig)
    try:
        found = drive(rig, step)
    except RefusalError:
        rig = build(make)
        step = managed(rig, on_failure="eager")
        found = drive(rig, step)
        assert step.stats.skipped
    else:
        assert step.stats.replayed == 18
    assert_same_runs(expected, found)
