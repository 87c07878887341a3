"""Derivatives of ``prod`` and ``cumprod``, for which torch looks for zeros on the host in an eager step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan.trace.derivatives import own_derivatives
from tests.twins import BEFORE_REPLAY, Rig, assert_same_as_eager, build, drive, managed, same_as_eager

CALLS = 20
Product = Callable[[Tensor], Tensor]

PRODUCTS: dict[str, Product] = {
    "rows": lambda x: x.cumprod(1), "columns": lambda x: torch.cumprod(x, dim=0), "last": lambda x: x.cumprod(dim=-1),
    "whole": lambda x: x.prod(), "of rows": lambda x: torch.prod(x, 1), "kept": lambda x: x.prod(0, keepdim=True),
    "by position": lambda x: torch.prod(x, -1, True), "of a part": lambda x: x[:, 1:].cumprod(1),
    "turned": lambda x: x.T.cumprod(0),
}  # fmt: skip


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, zeros: int) -> Tensor:
    """Of every second row, so many elements are zero."""
    x = torch.randn(shape, dtype=dtype)
    for row in x[::2] if zeros else ():
        row.view(-1)[torch.randperm(row.numel())[:zeros]] = 0
    return x


def _derived(product: Product, x: Tensor, weights: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(product(x), x, weights)
    return found


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("shape", [(4, 7), (1, 9), (6, 2), (3, 33)])
@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_have_the_bits_of_torchs(product: Product, shape: tuple[int, ...], zeros: int, dtype: torch.dtype) -> None:
    """With and without zeros, the first element or the last among them."""
    x = _numbers(shape, dtype, zeros)
    weights = torch.randn_like(product(x))
    with own_derivatives():
        found = _derived(product, x, weights)
    assert torch.equal(found, _derived(product, x, weights))


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_of_complex_numbers(product: Product, zeros: int) -> None:
    """To the last bits."""
    x = _numbers((4, 6), torch.complex128, zeros)
    weights = torch.randn_like(product(x))
    with own_derivatives():
        found = _derived(product, x, weights)
    torch.testing.assert_close(found, _derived(product, x, weights), rtol=1e-13, atol=1e-13)


def test_values_that_are_not_finite() -> None:
    """An infinite factor, and a product that overflows."""
    for row in ([1.0, float("inf"), 2.0], [1e30, 1e30, 2.0], [float("nan"), 1.0, 3.0], [0.0, 2.0, float("inf")]):
        for product in (PRODUCTS["rows"], PRODUCTS["of rows"]):
            x = torch.tensor([row])
            weights = torch.ones_like(product(x))
            with own_derivatives():
                found = _derived(product, x, weights)
            assert torch.equal(found.isnan(), _derived(product, x, weights).isnan())


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("name", ["rows", "of rows", "whole"])
def test_under_autocast(name: str, zeros: int) -> None:
    """Which computes products in single precision."""
    product = PRODUCTS[name]
    x = _numbers((4, 7), torch.bfloat16, zeros)
    with torch.autocast("cpu", torch.bfloat16):
        weights = torch.randn_like(product(x))
        with own_derivatives():
            found = _derived(product, x, weights)
        expected = _derived(product, x, weights)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_second_derivatives_are_torchs() -> None:
    """Where a gradient is derived again."""

    def second(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(x.cumprod(0).sum() + x.prod(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    x = torch.rand(5, dtype=torch.float64) + 0.5
    with own_derivatives():
        found = second(x)
    torch.testing.assert_close(found, second(x))


def test_other_forms_stay_torchs() -> None:
    """In place, with another dtype, under transforms, without gradients, of integers and of scalars."""
    x = torch.rand(4, 3, requires_grad=True)
    with own_derivatives():
        for product in (
            lambda x: x.cumprod(1, dtype=torch.float64), lambda x: x.prod(1, dtype=torch.float64),
            lambda x: x.clone().cumprod_(1), lambda x: x.sum().prod(), lambda x: x.prod(1, False, dtype=torch.float32),
        ):  # fmt: skip
            assert "_Derived" not in type(product(x).grad_fn).__name__
        assert "_Derived" in type(x.cumprod(1).grad_fn).__name__ and "_Derived" in type(x.prod(1).grad_fn).__name__
        rows = torch.vmap(torch.func.grad(lambda row: row.prod()))(x.detach())
        torch.testing.assert_close(rows, x.detach().prod(1, keepdim=True) / x.detach())
        assert torch.arange(1, 5).prod() == 24 and x.detach().prod().grad_fn is None
        with pytest.raises(IndexError):
            x.cumprod(2)
    assert "_Derived" not in type(x.cumprod(1).grad_fn).__name__
    assert "cumprod" not in vars(Tensor) and "prod" not in vars(Tensor)


def rig_of(body: Callable[[Tensor], Tensor]) -> Rig:
    """Renders colours along rays, some of which end in what nothing comes through."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)

    def renders(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = body(model(x))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Rig(renders, {"model": model, "optimizer": optimizer}, [(torch.randn(8, 6),) for _ in range(CALLS)])


def _through(density: Tensor) -> Tensor:
    clear = torch.exp(-density.relu())
    return (clear.cumprod(1) * torch.linspace(0, 1, 12, device=density.device)).sum(1).square().mean()


def _with_zeros(density: Tensor) -> Tensor:
    return (density.relu().clamp(max=1.5).cumprod(1).mean() + density.relu().prod(1).mean() + density.prod()) * 0.1


@pytest.mark.parametrize("body", [_through, _with_zeros])
def test_replays_have_the_bits_of_eager_steps(body: Any) -> None:
    """With one trace, in each check, and with as many operators as there are without zeros."""
    step = assert_same_as_eager(partial(rig_of, body), verify=1)
    assert (step.stats.traced, step.stats.captured) == (1, 1)
    assert step.stats.verified == step.stats.replayed == CALLS - BEFORE_REPLAY + 1
    assert not step.plan.traced.in_mode and step.plan.traced.derives
    assert sum(step.plan.operators.values()) < 100


def test_on_a_device(device: torch.device, backend: str) -> None:
    """They are replayed."""
    make = partial(rig_of, _through)
    step = same_as_eager(make, device, backend) if backend == "tape" else _near_eager(make, device, backend)
    assert step.stats.captured == 1 and step.stats.replayed >= CALLS - BEFORE_REPLAY


def _near_eager(make: Callable[[], Rig], device: torch.device, backend: str) -> Any:
    """Cumulative sums may add in any order on a device."""

    with device:
        expected, found = build(make), build(make)
    step = managed(found, backend=backend)
    drive(expected, expected.step)
    drive(found, step)
    for one, other in zip(*(rig.owners["model"].parameters() for rig in (expected, found)), strict=True):
        torch.testing.assert_close(one, other)
    return step
