"""Tensors on owners that hold no values of their own, or odd ones: no step fails over them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphplan import graph_step
from graphplan.errors import CaptureError
from tests.crossing import each
from tests.facts import assert_same


def _escaped(transform: Callable[..., Callable[[Tensor], Tensor]]) -> Tensor:
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        return value.sum()

    transform(keep)(torch.ones(3, 2))
    return kept[0]


def _imagined() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def _freed() -> Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def _leaf() -> Tensor:
    tensor = torch.ones(3, requires_grad=True)
    tensor.grad = torch.ones(3)
    return tensor


ODD: dict[str, Callable[[], Tensor]] = {
    "on the meta device": lambda: torch.ones(3, device="meta"),
    "a parameter on the meta device": lambda: nn.Parameter(torch.ones(3, device="meta")),
    "left by vmap": lambda: _escaped(torch.vmap),
    "left by torch.func.grad": lambda: _escaped(torch.func.grad),
    "fake": _imagined,
    "without memory": _freed,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "in compressed rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a lazy parameter": nn.UninitializedParameter,
    "a lazy buffer": nn.UninitializedBuffer,
    "a leaf with a gradient": _leaf,
    "a result": lambda: torch.ones(3, requires_grad=True) * 2,
    "bits": lambda: torch.ones(3, dtype=torch.uint8).view(torch.bits8),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "expanded": lambda: torch.ones(1).expand(4),
}
PLACES: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "an attribute": lambda model, odd: setattr(model, "odd", odd),
    "a buffer": lambda model, odd: model.register_buffer("odd", odd),
    "a list": lambda model, odd: setattr(model, "odd", [odd]),
    "a tuple": lambda model, odd: setattr(model, "odd", (odd, 1)),
}


def _train(place: Callable[[nn.Module], object], *, graphed: bool) -> tuple[dict[str, Any], int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    trained = dict(model.named_parameters())
    place(model)
    optimizer = torch.optim.AdamW(trained.values(), fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.linear(x, model.weight, model.bias).square().mean() * (1 if model.odd is None else 2)
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    run: Any = graph_step(step, owners=owners, min_speedup=0) if graphed else step
    for _ in range(12):
        run(torch.randn(2, 4))
    return trained, run.stats.replayed if graphed else 0


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested tensors", "ignore:.*quantiz", "ignore:TypedStorage")
@each(place=PLACES, name=ODD)
@pytest.mark.crossed(2, 1)
def test_a_step_is_replayed_beside_an_odd_tensor(name: str, place: str) -> None:
    put = PLACES[place]
    expected, _ = _train(lambda model: put(model, ODD[name]()), graphed=False)
    found, replayed = _train(lambda model: put(model, ODD[name]()), graphed=True)
    assert replayed > 5
    assert_same(found, expected)


def test_a_step_that_makes_a_tensor_on_the_meta_device() -> None:
    """What it works with there has a shape and nothing else."""

    def train(*, graphed: bool) -> tuple[dict[str, Any], int]:
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model.template = torch.empty(3, device="meta")

        def step(x: Tensor) -> Tensor:
            model.template = torch.ones(3, device="meta") * 2
            optimizer.zero_grad()
            loss = model(x).square().mean() * len(model.template)
            loss.backward()
            optimizer.step()
            return loss

        run: Any = graph_step(step, owners={"model": model, "optimizer": optimizer}) if graphed else step
        for _ in range(12):
            run(torch.randn(2, 4))
        return dict(model.named_parameters()), run.stats.replayed if graphed else 0

    expected, _ = train(graphed=False)
    found, replayed = train(graphed=True)
    assert replayed > 5
    assert_same(found, expected)


class Sealed(Tensor):
    """A tensor around another one that knows one operator, as optimizers keep for quantised state."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        sealed: Any = Tensor._make_wrapper_subclass(cls, inner.shape)
        sealed.held = inner
        return sealed

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(f"Sealed does not know {func}")
        return Sealed(*pytree.tree_map_only(Sealed, lambda sealed: sealed.held, args))


def test_a_tensor_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"model.odd is of type Sealed, which cannot be copied .*aten\.clone"):
        _train(lambda model: setattr(model, "odd", Sealed(torch.ones(3))), graphed=True)


def test_gradients_by_a_function_of_that_name() -> None:
    """``torch.autograd.grad`` names what lies in no container: the gradients of another model."""

    def train(*, graphed: bool) -> tuple[dict[str, Any], int]:
        torch.manual_seed(0)
        model, frozen = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        frozen(torch.ones(1, 4)).sum().backward()

        def step(x: Tensor) -> Tensor:
            loss = frozen(model(x)).square().mean()
            parameters = list(model.parameters())
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = grad
            optimizer.step()
            return loss

        owners = {"model": model, "frozen": frozen, "optimizer": optimizer}
        run: Any = graph_step(step, owners=owners, min_speedup=0) if graphed else step
        for _ in range(12):
            run(torch.randn(2, 4))
        return dict(model.named_parameters()), run.stats.replayed if graphed else 0

    expected, _ = train(graphed=False)
    found, replayed = train(graphed=True)
    assert replayed > 5
    assert_same(found, expected)


WAYS: dict[str, Callable[[nn.Module, Callable[[], Tensor]], Callable[[Tensor], Any]]] = {
    "returned": lambda model, make: lambda x: make(),
    "returned again": lambda model, make: partial(_same, make()),
    "left on the model": lambda model, make: lambda x: setattr(model, "last", make()),
    "appended": lambda model, make: lambda x: model.all.append(make()),
}


def _same(value: Any, x: Tensor) -> Any:
    return value


def _train_with(way: str, make: Callable[[], Tensor], *, graphed: bool, feeds: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    trained: dict[str, Any] = dict(model.named_parameters())
    model.all = []
    optimizer = torch.optim.AdamW(trained.values(), fused=True)
    do = WAYS[way](model, make) if way in WAYS else lambda x: None

    def step(x: Tensor, *_: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss, do(x)

    owners = {"model": model, "optimizer": optimizer}
    run: Any = graph_step(step, owners=owners, on_failure="eager") if graphed else step
    for _ in range(12):
        run(torch.randn(2, 4), *([make()] if feeds else []))
    return trained


@pytest.mark.filterwarnings("ignore::UserWarning")
@each(times=2, way=[*WAYS, "fed"], name=ODD)
@pytest.mark.crossed(2)
def test_a_step_that_has_to_do_with_an_odd_tensor_is_done_once(name: str, way: str) -> None:
    """Replayed or refused: the model is the eager twin's."""
    expected = _train_with(way, ODD[name], graphed=False, feeds=way == "fed")
    assert_same(expected, _train_with(way, ODD[name], graphed=True, feeds=way == "fed"))
