"""What checks make of noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step
from tests.models import Box, descent

pytestmark = pytest.mark.usefixtures("room")
NOISE = Box(np.random.default_rng(3))
RUNS = Box(0)


@torch.library.custom_op("graphplan_tests::shaky", mutates_args=())
def shaky(x: Tensor) -> Tensor:
    """``x`` with noise, which is counted."""
    RUNS.item += 1
    return x * (1 + 1e-6 * torch.from_numpy(NOISE.item.standard_normal(x.shape, dtype=np.float32)))


@shaky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


shaky.register_autograd(lambda ctx, grad: grad)


@pytest.mark.twice
def test_each_check_measures_the_noise() -> None:
    """A third run of the step tells it, and a fault is still found."""
    torch.manual_seed(0)
    NOISE.item, hidden = np.random.default_rng(3), Box(1.0)
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

    step: Any = descent(model, optimizer, lambda x: shaky(model(x)).square().mean() * hidden.item)
    graphed = graph_step(step, owners=step.owners, backend="tape", verify=1, allow=("hidden.item", "NOISE", "RUNS"))
    runs = []
    for _ in range(16):
        before = RUNS.item
        graphed(torch.randn(8, 32))
        runs.append(RUNS.item - before)
    assert graphed.stats.verified == graphed.stats.replayed == 10
    assert min(runs[6:]) >= 3
    hidden.item = 1.001
    text = (
        r"replay 11 of .* is not what the eager step does: .*result: .*since the previous check may also have differed"
    )
    with pytest.warns(UserWarning, match=text):
        graphed(torch.randn(8, 32))


@pytest.mark.parametrize(
    ("noise", "coarse"),
    [(True, False), (False, False), (True, True)],
    ids=["noise", "no noise", "noise, and updates that are smaller than rounding"],
)
@pytest.mark.twice
def test_a_fault_in_what_the_step_writes_to_is_found(noise: bool, coarse: bool) -> None:
    """More replays write where the eager step has written, and what that left must not be lost: updates that are no
    longer made show in the parameters alone. What rounds these is no excuse.
    """
    torch.manual_seed(0)
    NOISE.item, hidden = np.random.default_rng(3), Box(1.0)
    model = torch.nn.Linear(32, 32)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=coarse):
            out = model(x).float()
        loss = (shaky(out) if noise else out).square().mean()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad * (0.01 * hidden.item))
        return loss.detach()

    graphed = graph_step(
        step, owners={"model": model}, backend="tape", verify=1, allow=("hidden.item", "NOISE", "RUNS")
    )
    for _ in range(16):
        graphed(torch.randn(8, 32))
    assert graphed.stats.verified == graphed.stats.replayed == 10
    hidden.item, before = 0.0, model.weight.detach().clone()
    match = (
        r"replay 11 of .* model\.weight: \d+ of 1024 .* the replay's update is 0\.\d+ long, the eager step's 0; .*bias"
    )
    with pytest.warns(UserWarning, match=match):
        graphed(torch.randn(8, 32))
    assert torch.equal(model.weight, before)


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_derivatives_by_another_formula_round_otherwise(dtype: torch.dtype) -> None:
    """Of products, in checks of real and of complex steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        made = model(x).prod(1, dtype=dtype)
        loss = made.abs().sum() if dtype.is_complex else made.sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer}, backend="tape", verify=1)
    for _ in range(20):
        step(torch.rand(5, 4, dtype=dtype))
    assert step.plan.traced.in_mode and step.stats.traced == 1
    assert step.stats.verified == step.stats.replayed == 15
