"""What checks make of the noise that earlier ones have measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphplan import graph_step
from graphplan.verify.compare import Run, distances
from graphplan.verify.noise import Noise
from tests.models import Box, descent

Tensors = dict[str, Tensor]
OLD = {"a": torch.zeros(4), "b": torch.ones(3)}
ONE = {"a": torch.full((4,), 10.0), "b": torch.ones(3) * 2, "result": torch.tensor(5.0)}


def apart(by: float) -> Tensors:
    """What another run leaves, ``by`` of its length away."""
    return {path: tensor * (1 + by) for path, tensor in ONE.items()}


def learn(noise: Noise, old: Tensors, one: Tensors, again: list[Tensors], eager: Tensors, **nudged: Tensors) -> None:
    """Have ``noise`` learn of what runs from ``old`` have left, the first of them ``one``."""
    off = {name: Run.of(one, left) for name, left in nudged.items()}
    noise.learn(distances(one, one, old), [Run.of(one, left) for left in again], Run.of(one, eager), **off)


def beyond(noise: Noise, old: Tensors, one: Tensors, eager: Tensors) -> list[str]:
    return noise.beyond(distances(one, one, old), one, eager)


def measured(times: int = 2, by: float = 1e-3) -> Noise:
    noise = Noise()
    for _ in range(times):
        learn(noise, OLD, ONE, [apart(by), apart(by / 2)], apart(by / 3))
    return noise


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize("by", [1e-3, 0.2])
def test_one_check_has_to_measure_first_or_two(times: int, by: float) -> None:
    """Two where the noise is large beside what the step changes: the step may just not have changed much."""
    assert measured(times, by=by).is_known is (times >= (1 if by == 1e-3 else 2))


def test_what_is_as_far_as_replays_were_is_noise() -> None:
    """Eight times as far at most, as where a check measures; in parts of what the step changes."""
    assert beyond(measured(), OLD, ONE, ONE) == []
    assert beyond(measured(), OLD, ONE, apart(7e-3)) == []
    assert beyond(measured(), OLD, ONE, {**apart(7e-3), "b": ONE["b"] * 1.02}) == ["b"]
    assert beyond(measured(), OLD, ONE, apart(1e-2)) == ["a", "b", "result"]


def test_smaller_changes_have_less_noise() -> None:
    """Where the step moves a tensor by a hundredth of what it did, a hundredth of the noise is let pass."""
    old = {"a": ONE["a"] - 0.1}
    assert beyond(measured(), old, ONE, {**ONE, "a": ONE["a"] * (1 + 5e-5)}) == []
    assert beyond(measured(), old, ONE, {**ONE, "a": ONE["a"] * (1 + 1e-3)}) == ["a"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_number_is_no_noise(value: float) -> None:
    broken = {**apart(1e-4), "a": torch.tensor([10.0, 10.0, 10.0, value])}
    assert beyond(measured(), OLD, ONE, broken) == ["a"]
    noise = measured()
    learn(noise, OLD, ONE, [broken], broken)
    assert beyond(noise, OLD, ONE, broken) == ["a"]
    assert beyond(noise, OLD, broken, broken) == []


def test_what_was_as_good_once_is_as_good_again() -> None:
    """A check may find eager right that is further away than replays are from each other, by what rounding does."""
    noise = Noise()
    for _ in range(2):
        learn(noise, OLD, ONE, [apart(1e-5)], apart(1e-3))
    assert beyond(noise, OLD, ONE, apart(9e-4)) == []
    assert beyond(noise, OLD, ONE, apart(1.1e-3)) == ["a", "b", "result"]


def test_what_rounding_does_may_come_of_noise_that_is_rare() -> None:
    """One and a half times as far, as where a check asks for it."""
    noise = Noise()
    for _ in range(2):
        learn(noise, OLD, ONE, [apart(1e-6)], apart(1e-6), nudged=apart(1e-2))
    assert beyond(noise, OLD, ONE, apart(1.4e-2)) == []
    assert beyond(noise, OLD, ONE, apart(1.6e-2)) == ["a", "b", "result"]


def test_tensors_without_noise_and_of_other_kinds() -> None:
    noise = Noise()
    for _ in range(2):
        learn(noise, OLD, ONE, [{**apart(1e-3), "b": ONE["b"].clone()}], ONE)
    assert beyond(noise, OLD, ONE, apart(1e-6)) == ["b"]
    assert beyond(noise, OLD, ONE, {**ONE, "a": torch.ones(5)}) == ["a"]
    assert beyond(noise, OLD, ONE, {**ONE, "new": torch.ones(1)}) == ["new"]
    assert beyond(noise, OLD, ONE, {"a": ONE["a"], "b": ONE["b"]}) == ["result"]


def test_numbers_in_two_parts_and_whole_ones() -> None:
    """Complex ones are nearly the same or not; integers are, or they are not."""
    old, one = {"z": torch.zeros(2) * 1j}, {"z": torch.ones(2) * 2j, "count": torch.tensor([3, 4])}
    noise = Noise()
    for _ in range(2):
        learn(noise, old, one, [{**one, "z": one["z"] * 1.001}], one)
    assert beyond(noise, old, one, {**one, "z": one["z"] * 1.005}) == []
    assert beyond(noise, old, one, {"z": one["z"] * 1.01, "count": torch.tensor([3, 5])}) == ["z", "count"]


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


def test_a_check_replays_once_when_the_noise_is_known() -> None:
    """Four runs of the step in the first check, two in each later one; and a fault is still found."""
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
    assert runs[6] == 4
    assert runs[7:] == [2] * 9
    hidden.item = 1.001
    text = r"replay 11 of .* is not what the eager step does: .*result: .*since the check before it may have gone wrong"
    with pytest.warns(UserWarning, match=text):
        graphed(torch.randn(8, 32))


@pytest.mark.parametrize(
    ("noise", "coarse"),
    [(True, False), (False, False), (True, True)],
    ids=["noise", "no noise", "noise, and updates that are smaller than rounding"],
)
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
        loss = model(x).prod(1).abs().sum() if dtype.is_complex else model(x).prod(1).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer}, backend="tape", verify=1)
    for _ in range(20):
        step(torch.rand(5, 4, dtype=dtype))
    assert step.plan.traced.in_mode
    assert step.stats.verified == step.stats.replayed == 14
