"""Numbers among a step's arguments that are others in each call: followed, or in the key where code needs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from graphplan import NotCapturedError, graph_step, graphed
from tests.twins import Rig, build, managed, same_as_eager

Use = Callable[[Any, Tensor, Tensor, Any], Any]
CALLS = 60


class Net(nn.Module):
    """Learns, and keeps a number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.kept: Any = 0.0


def rig_of(use: Use, values: Callable[[int], Any], keyword: bool = False) -> Rig:
    """A step that does with its last argument what ``use`` does, and returns what that returns."""
    model = Net()
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)

    def train_step(x: Tensor, y: Tensor, number: Any) -> Any:
        out = model.body(x)
        result = use(model, F.cross_entropy(out, y), out, number)
        loss = result[0] if isinstance(result, tuple) else result
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return result

    step = (lambda x, y, number: train_step(x, y, number=number)) if keyword else train_step
    calls = [(torch.randn(5, 6), torch.randint(4, (5,)), values(index)) for index in range(CALLS)]
    return Rig(step, {"model": model, "optimizer": optimizer}, calls)


def keep(model: Any, loss: Tensor, out: Tensor, number: Any) -> Tensor:
    model.kept = number
    return loss * model.kept


FOLLOWED: dict[str, Use] = {
    "computed with": lambda model, loss, out, number: loss * number + number / 2,
    "a power": lambda model, loss, out, number: loss * 0.99**number,
    "returned": lambda model, loss, out, number: (loss * number, number),
    "kept": keep,
    "a bound": lambda model, loss, out, number: loss * min(1.0, number / 10),
    "made": lambda model, loss, out, number: loss * torch.tensor(number, device=loss.device),
}
"""With as many programs as there are ways through the code."""
NEEDED: dict[str, Use] = {
    "an index": lambda model, loss, out, number: loss + out[:, int(number) % 4].mean(),
    "a loop": lambda model, loss, out, number: loss + sum(out.square().mean() for _ in range(int(number) % 3)),
    "a text": lambda model, loss, out, number: loss * len(f"{number:g}"),
    "a method": lambda model, loss, out, number: loss * np.float64(number).item(),
}


@pytest.mark.parametrize("values", [float, int, lambda index: index // 10, lambda index: 1 / (index + 1), np.float64])
@pytest.mark.parametrize("use", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_a_number_that_is_followed(use: Use, values: Callable[[int], Any], device: torch.device, backend: str) -> None:
    step = same_as_eager(lambda: rig_of(use, values), device, backend)
    assert step.stats.replayed >= 25
    assert step.stats.captured <= 4


@pytest.mark.parametrize("use", NEEDED.values(), ids=NEEDED.keys())
def test_a_number_that_code_needs_stays_a_part_of_the_key(use: Use, device: torch.device, backend: str) -> None:
    """Each of a few values has a program."""
    values = lambda index: index % 4  # noqa: E731
    step = same_as_eager(lambda: rig_of(use, values), device, backend)
    assert step.stats.captured >= 2
    assert step.stats.replayed >= 20


class Reversed(torch.autograd.Function):
    """Its backward pass, which another thread runs on a GPU, needs a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return slopes[0].neg() * ctx.share, None


NEVER_AGAIN: dict[str, Use] = {
    "an index": lambda model, loss, out, number: loss + out[:, hash(number) % 4].mean(),
    "a text": lambda model, loss, out, number: loss * len(f"{number:g}"),
    "a backward pass": lambda model, loss, out, number: loss + Reversed.apply(out, number).mean(),
}


@pytest.mark.parametrize("use", NEVER_AGAIN.values(), ids=NEVER_AGAIN.keys())
def test_needed_values_that_never_come_again_are_told_soon(use: Use, device: torch.device, backend: str) -> None:
    """As early as other values are, and no more than one trace is made."""
    with device:
        rig = build(lambda: rig_of(use, lambda index: 1 / (index + 1)))
    step = managed(rig, backend=backend)
    text = r"no step was captured in 29 steps.*the code needs the value of arguments\.number"
    with pytest.raises(NotCapturedError, match=text):
        for args in rig.calls:
            step(*args)
    assert step.stats.traced <= 1


@pytest.mark.parametrize(("times", "captured"), [(60, 60), (400, 0)])
@pytest.mark.twice
def test_times_that_are_indices(times: int, captured: int) -> None:
    """A sampler's come again, each with a program; those of which there are more than programs never do."""
    model, table = nn.Linear(4, 4), torch.linspace(0.1, 0.9, 400)
    step = graphed(lambda x, time: model(x) * table[time], backend="tape", on_failure="eager")
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(400):
            x, time = torch.randn(2, 4), times - 1 - call % times
            assert torch.equal(step(x, time), model(x) * table[time])
    assert step.stats.captured == captured
    assert step.stats.traced == 1 + 2 * captured
    assert (step.stats.replayed > 120) == bool(captured)
    told = [str(warning.message) for warning in caught if "no step was captured in 67 steps" in str(warning.message)]
    assert len(told) == (not captured)


def test_a_keyword(device: torch.device, backend: str) -> None:
    model = nn.Linear(3, 2, device=device)

    def predict(x: Tensor, *, temperature: float) -> Tensor:
        return (model(x) / temperature).softmax(-1)

    fast = graphed(predict, backend=backend)
    with torch.no_grad():
        for index in range(1, 41):
            x = torch.randn(4, 3, device=device)
            assert torch.equal(fast(x, temperature=index / 7), predict(x, temperature=index / 7))
    assert fast.stats.replayed >= 30


def test_integers_and_floats_take_turns() -> None:
    """Code may tell them apart, so each class has a program of its own."""
    x = torch.arange(6.0)
    step = graph_step(lambda x, number: x * number + isinstance(number, int), backend="tape", mode="inference")
    for index in range(60):
        number = index if index % 2 else float(index)
        assert torch.equal(step(x, number), x * number + isinstance(number, int))
    assert step.stats.replayed >= 30


def test_eager_if_sees_the_numbers() -> None:
    seen: list[Any] = []

    def wants(x: Tensor, number: Any) -> bool:
        seen.append(number)
        return bool(number == 20.0)

    step = graph_step(lambda x, number: x * number, backend="tape", mode="inference", eager_if=wants)
    for index in range(30):
        assert torch.equal(step(torch.ones(2), float(index)), torch.full((2,), float(index)))
    assert seen == list(map(float, range(30)))
    assert step.stats.replayed >= 15


def test_a_callable_without_names_for_its_arguments() -> None:
    step = graph_step(torch.mul, backend="tape", mode="inference")
    for index in range(30):
        assert torch.equal(step(torch.ones(2), float(index)), torch.full((2,), float(index)))
    assert step.stats.replayed >= 15


def test_arguments_of_one_name() -> None:
    """One that is passed by position alone, a keyword of the same name, and what a decorator takes for itself."""
    seen: list[Any] = []

    def one(w: float, /, x: Tensor, **others: Any) -> Tensor:
        seen.append((w, others["w"], others["__class__"]))
        return x * w

    step = graph_step(one, backend="tape", mode="inference", on_failure="eager")
    for index in range(20):
        step(index / 8, x=torch.ones(2), w=index * 4.0, __class__=index / 2)
    assert seen[:6] == [(index / 8, index * 4.0, index / 2) for index in range(6)]
    assert all(type(value) is not float or value == value for value in seen[-1])

    def scaled(inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def outer(scale: float, *, x: Tensor, w: float) -> tuple[Any, Tensor]:
            return scale, inner(w, x) * scale

        return outer

    step = graph_step(scaled(lambda w, x: x * w), backend="tape", mode="inference")
    for index in range(20):
        scale, result = step(index / 8, x=torch.ones(2), w=index * 4.0)
        assert scale == index / 8
        assert torch.equal(result, torch.ones(2) * (index * 4.0) * (index / 8))
    assert step.stats.replayed >= 8
