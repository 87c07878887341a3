"""Numbers among the owners: programs stay good while a step branches on them as it did, and get what it computes."""

from __future__ import annotations

import ctypes
import math
import operator
import re
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from graphplan import CaptureError, HostEffectError, HostScalarError, HostSyncError, graph_step
from graphplan.program.program import Program
from graphplan.step.lookup import Lookup
from tests.trace.test_refused_host import HANDED_OVER


class Model(nn.Module):
    """A model with a number that the host moves on, and one that is compared with it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.step, self.warm_up, self.scale = 0, 12, 2.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y * self.scale if self.step >= self.warm_up else y


def run(calls: int, act: Callable[[Model, int], None], *, graphed: bool) -> tuple[list[Tensor], Any, Model]:
    """Train a model; ``act`` is the host's between two steps."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step: Any = graph_step(train, owners={"model": model, "optimizer": optimizer}) if graphed else train
    losses = []
    for index in range(calls):
        act(model, index)
        losses.append(step(torch.randn(8, 4)))
    return losses, step, model


def _count(model: Model, index: int) -> None:
    model.step = index


def _count_and_move_the_bound(model: Model, index: int) -> None:
    model.step = index
    if index == 16:
        model.warm_up = 20


@pytest.mark.parametrize(
    ("act", "captured", "eager"),
    [(_count, 2, 3), (_count_and_move_the_bound, 4, 4)],
    ids=["a bound", "a bound that moves"],
)
def test_a_number_that_differs_in_each_step_and_is_only_compared(
    act: Callable[[Model, int], None], captured: int, eager: int
) -> None:
    """It is captured for each outcome of a comparison, and anew where what it is compared with changes."""
    expected, _, twin = run(36, act, graphed=False)
    found, step, model = run(36, act, graphed=True)
    assert all(map(torch.equal, expected, found))
    assert torch.equal(twin.net.weight, model.net.weight)
    assert (step.stats.captured, step.stats.traced, step.stats.eager) == (captured, 2 * captured, eager)
    assert step.stats.replayed == 36 - eager - 3 * captured
    assert re.search(r"guarded: how the step branches on \d numbers \(.*model\.step\)", str(step.plan))


def _scale(model: Model, index: int) -> None:
    model.step, model.warm_up, model.scale = index, 0, float(index)


def test_a_number_that_differs_in_each_step_and_is_computed_with() -> None:
    """An operator gets that of each step, out of memory that is filled before."""
    expected, _, twin = run(30, _scale, graphed=False)
    found, step, model = run(30, _scale, graphed=True)
    assert all(map(torch.equal, expected, found))
    assert torch.equal(twin.net.weight, model.net.weight)
    assert (step.stats.captured, step.stats.replayed) == (1, 30 - 6)
    assert re.search(r"model\.scale +param +f32\[\]", str(step.plan))


NEEDS: dict[str, tuple[Callable[[Model], Any], str]] = {
    "a class": (lambda model: complex(model.step).real, "complex"),
    "an index": (lambda model: [float(index) for index in range(20)][model.step], "index"),
    "bits": (lambda model: ~model.step, "invert"),
    "a text": (lambda model: len(f"{model.step}"), "format"),
}


@pytest.mark.parametrize("kind", NEEDS)
def test_a_number_that_differs_in_each_step_and_whose_value_is_needed(kind: str) -> None:
    """The refusal says for what; it spoke of arguments like alpha= each time."""
    factor, needs = NEEDS[kind]

    def body(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model.net(x) * factor(model)
        return y.detach()

    model = Model()
    step = graph_step(partial(body, model), owners={"model": model})
    text = r"uses model\.step at test_symbolic_numbers\.py:\d+ in <lambda>: .*, which is \d+ before one step"
    with pytest.raises(HostScalarError, match=rf"{text}.* \(x \* n\), but `{needs}` needs the value itself\. Keep it"):
        for index in range(8):
            _scale(model, index + 1)
            step(torch.randn(8, 4))


FEW: dict[str, Callable[[Model], Any]] = {
    "an index": lambda model: [1.0, 2.0, 3.0][model.step % 3],
    "a size": lambda model: sum(0.5 for _ in range(model.step // 20)),
    "a rounded number": lambda model: (2.0, 3.0, 4.0)[int(model.step / 20)],
    "bits": lambda model: (0.5, 0.25)[(model.step >> 1) & 1],
    "with a constant": lambda model: "abc".index("abc"[1 - (model.step + 1) % 2]),
}


@pytest.mark.parametrize("kind", FEW)
def test_values_that_come_again_each_have_a_program(kind: str) -> None:
    """A number is another one in each step, what code makes of it is one of a few."""
    runs = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = Model()

        def body(model: Any, x: Tensor) -> Tensor:
            y: Tensor = model.net(x) * FEW[kind](model)
            return y.detach()

        step: Any = graph_step(partial(body, model), owners={"model": model}) if graphed else partial(body, model)
        out = []
        for index in range(60):
            _scale(model, index)
            out.append(step(torch.randn(8, 4)))
        runs.append(out)
    assert all(map(torch.equal, *runs))
    assert step.stats.captured in (2, 3)
    assert step.stats.replayed >= 60 - 30


def test_values_that_never_come_again_are_told() -> None:
    """A single trace is made, and a warning says which number it is."""
    model, rows = Model(), [[float(index)] for index in range(64)]
    step = graph_step(lambda x: model.net(x).detach() * rows[int(model.step / 2)][0], owners={"model": model})
    text = (
        r"runs some calls eagerly: the step's code needs the value of model\.step at "
        r"test_symbolic_numbers\.py:\d+ in <lambda>: "
    )

    def drive() -> None:
        for index in range(60):
            _scale(model, 2 * index)
            step(torch.randn(8, 4))

    with pytest.warns(UserWarning, match=text):
        drive()
    assert (step.stats.traced, step.stats.captured) == (1, 0)


@pytest.mark.parametrize("value", [lambda model: model.step % 17, lambda model: model.step // 2])
def test_values_that_are_many_end_in_a_refusal(value: Callable[[Model], int]) -> None:
    """Each would take a program: the step runs as without graphplan, and no programs follow each other."""
    runs = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model, table = Model(), [1 + index / 256 for index in range(256)]

        def body(x: Tensor, model: Any = model, table: list[float] = table) -> Any:
            return model.net(x).detach() * table[value(model)]

        step: Any = graph_step(body, owners={"model": model}, on_failure="eager") if graphed else body
        out = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for index in range(400):
                model.step = index
                out.append(step(torch.ones(2, 4)))
        runs.append(out)
    assert all(map(torch.equal, *runs))
    assert step.stats.captured <= 2
    text = (
        r"this step eagerly: the step's code needs the value of model\.step at .*: no program "
        r"exists for the values of \d+ calls"
    )
    assert any(re.search(text, str(warning.message)) for warning in caught)


def test_a_comparison_that_alternates() -> None:
    """The two traces go different ways: each has a program."""

    def act(model: Model, index: int) -> None:
        model.step, model.warm_up = index % 2, 1

    expected, _, twin = run(20, act, graphed=False)
    found, step, model = run(20, act, graphed=True)
    assert all(map(torch.equal, expected, found))
    assert torch.equal(twin.net.weight, model.net.weight)
    assert (step.stats.captured, step.stats.recaptured, step.stats.replayed) == (2, 0, 11)


@pytest.mark.parametrize(("calls_each", "max_graphs", "captured", "kept"), [(8, 16, 7, 6), (8, 5, 7, 5), (1, 16, 6, 6)])
def test_programs_for_many_outcomes_are_bounded(calls_each: int, max_graphs: int, captured: int, kept: int) -> None:
    """The oldest of more than ``max_graphs`` is closed, and captured again when its turn comes."""
    model, found = Model(), []

    def act(model: Any, index: int) -> None:
        model.step = index // calls_each % (6 if calls_each == 1 else 7)

    def body(x: Tensor) -> Tensor:
        if model.step == 1:
            x = x + 1
        if model.step == 2:
            x = x + 2
        if model.step == 3:
            x = x + 3
        if model.step == 4:
            x = x + 4
        if model.step == 5:
            x = x + 5
        return x * 2

    step = graph_step(body, owners={"model": model}, max_graphs=max_graphs)
    for index in range(7 * 8):
        act(model, index)
        found.append(step(torch.ones(2)))
        assert torch.equal(found[-1], torch.full((2,), 2.0 * (1 + model.step % 6)))
    assert step.stats.captured == captured
    assert len(step.programs) == kept


def test_an_outcome_that_is_refused() -> None:
    """The programs for others stay."""

    def body(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model.net(x).sum().detach()
        if model.step % 12 == 11 and divmod(y.item(), 1)[0] >= 0:
            y = y * 2
        return y

    torch.manual_seed(0)
    model = Model()
    step = graph_step(partial(body, model), owners={"model": model})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for index in range(48):
            model.step, x = index, torch.randn(2, 4)
            assert torch.equal(step(x), body(model, x))
    (warning,) = warned
    assert re.search(r"graphplan runs such calls eagerly: .*if model\.step % 12 == 11", str(warning.message))
    assert (step.stats.captured, step.stats.replayed) == (1, 48 - 6 - 4)


@pytest.mark.parametrize("often", [3, 4, 5, 6])
@pytest.mark.filterwarnings("ignore:graphplan runs such calls eagerly")
def test_a_way_that_is_refused_in_the_first_traces(often: int) -> None:
    """One that reads the host in some calls: those without are replayed, whichever of both is traced first."""

    def body(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model.net(x).sum().detach()
        if (model.step + 1) % often == 0:
            model.text = f"{y.item():.3f}"
        return y

    torch.manual_seed(0)
    model = Model()
    step = graph_step(partial(body, model), owners={"model": model}, on_failure="eager")
    for index in range(60):
        model.step, x = index, torch.randn(2, 4)
        y = step(x)
        text = getattr(model, "text", "")
        assert torch.equal(y, body(model, x))
        assert getattr(model, "text", "") == text
    assert step.stats.captured == 1
    assert step.stats.replayed >= 60 - 60 // often - 8


class Showing(Model):
    """Keeps its loss now and then, with the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        if self.step % 10 == 0:
            self.rows.append((operator.index(self.step), y.detach().sum().item()))
        if self.step < self.warm_up:
            y = y * complex(self.step).real
        return y


def _run_showing(calls: int, *, graphed: bool, warm_up: int) -> tuple[Any, Showing]:
    torch.manual_seed(0)
    model = Showing()
    model.warm_up = warm_up

    def body(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    step: Any = graph_step(body, owners={"model": model}) if graphed else body
    for index in range(calls):
        model.step = index
        step(torch.randn(8, 4))
    return step, model


_ADVICE = re.escape(
    "Use a tensor instead (your own counter, increased in place), keep the value constant, or pass it as an argument"
)


def test_calls_whose_comparison_has_code_compute_with_the_number_are_eager() -> None:
    """Others are replayed, and what is appended to meanwhile needs no capture anew."""
    _, twin = _run_showing(48, graphed=False, warm_up=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step, model = _run_showing(48, graphed=True, warm_up=0)
    assert torch.equal(twin.net.weight.grad, model.net.weight.grad)  # type: ignore[arg-type]
    assert [row[0] for row in model.rows] == [0, 10, 20, 30, 40]
    assert model.rows == twin.rows
    assert (step.stats.captured, step.stats.traced, step.stats.replayed) == (1, 3, 48 - 3 - 3 - 4)
    ((reason, times),) = step.stats.reasons.items()
    where = r"test_symbolic_numbers\.py:\d+ in forward: `.*`"
    assert re.fullmatch(
        rf"the step's code needs the value of model\.step at {where} on the path that these calls take\. {_ADVICE}",
        reason,
    )
    assert times == 3


@pytest.mark.twice
def test_a_number_that_code_computes_with_and_that_stays_for_a_while() -> None:
    """It has a program from its second call on."""

    def act(model: Model, index: int) -> None:
        model.step = index // 12

    def body(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model.net(x)
        return y * complex(model.step).real if model.step < 4 else y

    torch.manual_seed(0)
    model = Model()
    step = graph_step(partial(body, model), owners={"model": model})
    for index in range(60):
        act(model, index)
        with torch.no_grad():
            x = torch.randn(2, 4)
            assert torch.equal(step(x), body(model, x))
    assert (step.stats.captured, step.stats.replayed) == (5, 60 - 3 - 3 - 3 * 4 - 3)


def test_a_number_that_code_computes_with_at_first() -> None:
    """A warning says that there are no replays yet."""
    _, twin = _run_showing(48, graphed=False, warm_up=16)
    with pytest.warns(
        UserWarning,
        match=rf"some calls eagerly: the step.s code needs the value of model\.step at .*may be replayed\. {_ADVICE}",
    ):
        step, model = _run_showing(48, graphed=True, warm_up=16)
    assert torch.equal(twin.net.weight.grad, model.net.weight.grad)  # type: ignore[arg-type]
    assert model.rows == twin.rows
    assert (step.stats.captured, step.stats.replayed) == (1, 48 - 16 - 3 - 3)


def test_a_number_that_code_computes_with_for_long() -> None:
    """However long that takes, the calls after it are replayed."""
    _, twin = _run_showing(132, graphed=False, warm_up=100)
    with pytest.warns(
        UserWarning, match=r"some calls eagerly: the step.s code needs the value of model\.step at .* on the path that"
    ):
        step, model = _run_showing(132, graphed=True, warm_up=100)
    assert torch.equal(twin.net.weight.grad, model.net.weight.grad)  # type: ignore[arg-type]
    assert model.rows == twin.rows
    assert (step.stats.captured, step.stats.replayed) == (1, 132 - 100 - 4 - 3)


def test_a_comparison_that_can_no_longer_be_made() -> None:
    """The number is another kind of thing: the step raises what it raises without graphplan."""

    def act(model: Model, index: int) -> None:
        model.step = None if index == 12 else index  # type: ignore[assignment]

    with pytest.raises(TypeError, match="'>=' not supported between instances of 'NoneType' and 'int'"):
        run(16, act, graphed=True)


class Annealed(nn.Module):
    """A vector, and numbers that change in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 3, 1000))
        self.step, self.share, self.calls = 0, 1.0, 0


def _in_place(model: Any, x: Tensor) -> Tensor:
    y = x.detach() * 1
    y.mul_(model.share).add_(model.step).sub_(model.calls).div_(model.step + 1)
    y *= model.share
    y /= model.share
    return x * y


def _put(model: Any, x: Tensor) -> Tensor:
    made = torch.full((1000,), model.share, dtype=x.dtype, device=x.device) + torch.full_like(x, model.step)
    made = made + x.new_full((1000,), model.share)
    made[3:5], made[-1] = model.share, model.step
    chosen = torch.where(x > 0, x, model.share) * torch.where(x > 1, model.share, x)
    return x.masked_fill(x < 0, model.share) * made * chosen * x.detach().clone().fill_(model.step)


def _bounded(model: Any, x: Tensor) -> Tensor:
    y = torch.clamp(x, 1 - model.share, 1 + model.share) * x.clamp(max=model.share) + x.clip(-0.5, model.share)
    return y + torch.clamp_min(x, min=model.share) + x.clone().clamp_(model.share - 1).clamp_max_(model.step)


def _by_counter(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x * (2.0 if model.calls % 3 == 0 else 1.0) * (model.calls / 7)


OPERATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "compared": lambda m, x: (
        x * (x < m.share).float() + (m.step >= x).float() + x.gt(m.calls).float() + (x != m.share) * 1.0
    ),
    "product": lambda model, x: model.share * x + x * model.step,
    "sum": lambda model, x: x * x + model.share + (model.step + x),
    "difference": lambda model, x: (x - model.share) * (model.step - x),
    "quotient": lambda model, x: x / model.share + x / (1 + model.step) + (x / (model.share * 3 - 7)).tanh(),
    "numerator": lambda model, x: model.share / (x + 3) + model.step / (x * x + 1),
    "put": _put,
    "bounds": _bounded,
    "made": lambda model, x: x * torch.tensor(model.share, dtype=x.dtype, device=x.device),
    "made of a list": lambda model, x: (
        x * torch.tensor([model.share, 0.5, model.step], dtype=x.dtype, device=x.device).sum()
    ),
    "computed": lambda model, x: x * min(1.0, model.step / 20) + x * (-abs(2 * model.share - 1) // 3),
    "in place": _in_place,
    "by counter": _by_counter,
}


KINDS = (float, np.float64)
"""NumPy's is a number of Python's to torch."""
COMPUTED: dict[str, tuple[Callable[[Any], Any], int]] = {
    "cosine": (lambda model: 1 + math.cos(math.pi * model.step / 40), 1),
    "logistic": (lambda model: 1 / (1 + math.exp(-0.1 * (model.step - 20))), 1),
    "decay": (lambda model: 0.99**model.step, 1),
    "power": (lambda model: (1 - model.share) ** 2.5, 1),
    "inverse root": (lambda model: (model.step + 1) ** -0.5, 1),
    "warm-up": (lambda model: min((model.step + 1) ** -0.5, (model.step + 1) * 8**-1.5), 2),
    "stairs": (lambda model: 0.5 ** (model.step // 10), 1),
    "floor": (lambda model: 0.5 ** math.floor((1 + model.step) / 10), 1),
    "rounded": (lambda model: round(model.share, 1) + round(model.share), 1),
    "NumPy's": (lambda model: np.cos(np.pi * model.step / 40) * 2 - np.minimum(model.share, 0.5), 1),
    "beside one of NumPy's": (
        lambda model: min(model.share, np.log(1.5)) * (2 if np.float64(0.2) > model.share else 1),
        3,
    ),
    "powers of NumPy's": (lambda model: np.float64(0.991) ** model.step + np.power(np.float64(0.971), model.step), 1),
    "asked": (lambda model: 2.0 if math.isnan(model.share) or np.isinf(model.share) else model.share, 1),
    "clipped by NumPy": (lambda model: np.clip(model.share, 0.1, 0.8) + np.round(model.share, 2), 1),
    "converted": (lambda model: float(model.step) / 40 + int(10 * model.share) + int(model.step), 1),
    "of another class": (lambda model: 2 ** (model.step - 20), 2),
    "undefined at first": (lambda model: math.log(model.step - 3) if model.step > 3 else 0.0, 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COMPUTED)
def test_functions_of_numbers(name: str, kind: type) -> None:
    """Python's and NumPy's give the same number of the same class, which operators and lists get."""
    function, captured = COMPUTED[name]
    runs = []
    for graphed in (False, True):
        model, kept = Annealed(), list[Any]()
        history = SimpleNamespace(kept=kept)

        def body(x: Tensor, model: Any = model, history: Any = history) -> Tensor:
            history.kept.append(function(model))
            return x * function(model)

        step: Any = body
        if graphed:
            step = graph_step(body, owners={"model": model, "history": history}, verify="off")
        for index in range(40):
            model.step, model.share = index, kind(0.93**index)
            kept.append(step(torch.linspace(0, 1, 8)).tolist())
        runs.append(kept)
    assert runs[0] == runs[1]
    assert list(map(type, runs[0])) == list(map(type, runs[1]))
    assert step.stats.captured == captured, step.report()
    assert step.stats.replayed >= 28


def _divided(model: Any) -> float:
    try:
        return float(12 / model.step)
    except ZeroDivisionError:
        return 7.0


def _rooted(model: Any) -> float:
    try:
        return 1.0 + math.sqrt(model.step - 20)
    except ValueError:
        return 0.5


def _signed(model: Any) -> float:
    first = 2 if math.atan2(abs(model.step - 12), -0.0) > 1 else 0
    return 1 + first + (1 if math.atan2(abs(model.step - 12), 0.0) > 1 else 0)


@pytest.mark.parametrize("kind", [int, np.float64])
@pytest.mark.parametrize("function", [_divided, _rooted, _signed, lambda model: 10.0**model.step])
def test_what_functions_do_with_other_numbers(function: Any, kind: type) -> None:
    """Exceptions that the step catches, signs of zeros, and numbers that single precision has no room for. What has no
    value in Python is an infinity in NumPy.
    """
    runs = []
    for graphed in (False, True):
        model = Annealed()

        def body(x: Tensor, model: Any = model) -> Tensor:
            return x * function(model)

        step: Any = graph_step(body, owners={"model": model}, verify="off", on_failure="eager") if graphed else body
        out = []
        for index in range(60):
            model.step = kind(0 if index < 10 else index % 45)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out.append(step(torch.ones(2)).tolist())
        runs.append(out)
    assert runs[0] == runs[1]
    assert "could not record" not in step.report()


def test_a_function_that_raises_does_so_in_an_eager_step() -> None:
    """A number for which it cannot be computed is no replay's."""
    model = Annealed()
    step = graph_step(lambda x: x * math.sqrt(model.step), owners={"model": model}, verify="off")
    for index in range(12):
        model.step = index
        step(torch.ones(2))
    model.step = -1
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        step(torch.ones(2))
    model.step = 4
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]
    assert step.stats.replayed == 7


def marked(operation: str) -> Any:
    """A parameter for tests: some releases of torch hand nothing over but operands."""
    return pytest.param(operation, marks=HANDED_OVER) if operation in ("put", "bounds") else operation


SUMS = ("sum", "difference")
"""In narrow types these round the number first on the host; on a GPU they do not."""


@pytest.mark.parametrize("operation", list(map(marked, OPERATIONS)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_operators_get_the_number_of_each_step(
    operation: str, dtype: torch.dtype, kind: type, device: torch.device
) -> None:
    """With the bits that the number itself gives, forward and backward, without checks that would hide others."""

    def run(*, graphed: bool) -> tuple[Any, Any, list[Tensor]]:
        model = Annealed().to(device)

        def train(x: Tensor) -> Tensor:
            loss = (OPERATIONS[operation](model, model.weight.to(dtype)) * x).mean()
            (slope,) = torch.autograd.grad(loss, [model.weight])
            with torch.no_grad():
                # Fused kernels of optimizers read learning rates in single precision.
                model.weight.sub_(slope, alpha=0.05)
            return loss.detach()

        options: Any = {"owners": {"model": model}, "verify": "off", "min_speedup": 0}
        step: Any = graph_step(train, **options) if graphed else train
        losses = []
        for index in range(40):
            model.step, model.share = index, kind(0.93**index)
            losses.append(step(torch.linspace(0, 1 + index, 1000, dtype=dtype, device=device)))
        return step, model, losses

    is_narrow = dtype in (torch.float16, torch.bfloat16)
    if is_narrow and (operation in ("in place", "compared", "bounds") or (device.type == "cpu" and operation in SUMS)):
        with pytest.raises(HostScalarError, match=r"uses model\.\w+ at test_symbolic_numbers\.py:\d+ in "):
            run(graphed=True)
        return
    _, twin, expected = run(graphed=False)
    step, model, found = run(graphed=True)
    assert all(map(torch.equal, expected, found))
    assert torch.equal(twin.weight, model.weight)
    assert (type(model.calls), model.calls) == (int, twin.calls)
    assert step.stats.replayed >= 25, step.report()


def test_gradients_are_clipped_at_the_norm_of_each_step(device: torch.device) -> None:
    """torch makes a ``float`` of the norm that it is given."""

    def run(*, graphed: bool) -> tuple[Any, Tensor]:
        model = Annealed().to(device)

        def train(x: Tensor) -> Tensor:
            model.weight.grad = None
            loss = (model.weight * x).square().sum()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1 - model.share)
            with torch.no_grad():
                model.weight.sub_(model.weight.grad, alpha=0.05)
            return norm

        step: Any = graph_step(train, owners={"model": model}, verify="off", min_speedup=0) if graphed else train
        for index in range(40):
            model.share = 0.93**index
            step(torch.linspace(0, 1 + index, 1000, device=device))
        return step, model.weight.detach()

    (_, expected), (step, found) = run(graphed=False), run(graphed=True)
    assert torch.equal(found, expected)
    assert step.stats.replayed >= 25, step.report()


@pytest.mark.parametrize("kind", KINDS)
def test_comparisons_with_numbers_of_numpys(kind: type) -> None:
    """They give a truth value of NumPy's, whose ``~`` is another one than that of Python's."""
    model = Annealed()

    def step(x: Tensor) -> Tensor:
        return x * 2 if ~(model.share > np.float64(0.5)) or (model.share > 0.8) is True else x

    fast = graph_step(step, owners={"model": model})
    for index in range(40):
        model.share = kind((0.1, 0.7, 0.3, 0.9)[index % 4])
        assert torch.equal(fast(torch.ones(3)), step(torch.ones(3)))
    assert (fast.stats.captured, fast.stats.replayed) == (3, 28)


READ = ("product", "sum", "difference", "quotient", "numerator", "put", "bounds", "made", "in place")
"""Of the operations, those that do not branch."""


@pytest.mark.parametrize("operation", list(map(marked, READ)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_operators_get_the_number_that_is_read(operation: str, dtype: torch.dtype, device: torch.device) -> None:
    """``x / count.item()`` reads nothing: the operator gets a scalar tensor, which gives the same bits."""

    def body(x: Tensor, share: Tensor, count: Tensor) -> Tensor:
        w = x.detach().requires_grad_()
        numbers = SimpleNamespace(share=share.mean().item() * 2, step=count.sum().item(), calls=count[0].item())
        y = OPERATIONS[operation](numbers, w)
        return torch.stack([y.detach(), *torch.autograd.grad(y.sum(), [w])])

    step = graph_step(body, verify="off", min_speedup=0)
    feeds = []
    for index in range(24):
        counts = torch.tensor([index, 3, 5], device=device)
        feeds.append((torch.linspace(0, 1 + index, 1000, dtype=dtype, device=device), torch.rand(3).to(device), counts))
    is_narrow = dtype is torch.bfloat16
    if is_narrow and (operation in ("in place", "bounds") or (device.type == "cpu" and operation in SUMS)):
        with pytest.raises(HostSyncError, match=r"reads a tensor's value on the host .*at test_symbolic_numbers\.py"):
            for feed in feeds:
                step(*feed)
        return
    assert all(torch.equal(step(*feed), body(*feed)) for feed in feeds)
    assert (step.stats.captured, step.stats.replayed) == (1, 18), step.report()


def test_ways_that_alternate_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that take a known way are not looked up by their keys, whichever way the call before took."""
    model = Annealed()

    def body(x: Tensor) -> Tensor:
        model.calls += 1
        return x * 2 if model.calls % 2 else x + model.calls

    step = graph_step(body, owners={"model": model}, verify="off")
    x = torch.ones(3)
    for index in range(24):
        assert torch.equal(step(x), x * 2 if index % 2 == 0 else x + (index + 1))
    looked_up: list[Any] = []
    find = Lookup.find
    monkeypatch.setattr(Lookup, "find", lambda self, *args: (looked_up.append(args), find(self, *args))[1])
    for index in range(24, 64):
        assert torch.equal(step(x), x * 2 if index % 2 == 0 else x + (index + 1))
    assert not looked_up
    assert (step.stats.captured, step.stats.recaptured) == (2, 0)


def test_ways_that_never_come_again() -> None:
    """After a bound, further calls are eager without a trace."""
    model = Annealed()

    def body(x: Tensor) -> Tensor:
        turns = 0
        while turns < model.step:
            turns += 1
        return x * turns

    step = graph_step(body, owners={"model": model}, on_failure="eager")

    def run() -> None:
        for model.step in range(60):
            assert torch.equal(step(torch.ones(2)), torch.full((2,), float(model.step)))

    with pytest.warns(
        UserWarning, match=r"takes another path through its code in each call, depending on the values of model\.step"
    ):
        run()
    assert (step.stats.traced, step.stats.captured) == (17, 0)


def test_ways_that_differ_by_which_numbers_there_are() -> None:
    """A list with other rewards in each call, and fewer of them: nothing is asked."""
    model = Annealed()

    def body(x: Tensor) -> Tensor:
        for reward in model.rewards:
            x = x * reward
        return x

    step = graph_step(body, owners={"model": model})
    text = (
        r"another path .*, depending on whether model\.rewards\[\d+\] exists, and on its class: 16 "
        r"paths in a row were taken only once"
    )
    with pytest.raises(HostScalarError, match=text):
        for index in range(24):
            model.rewards = [1 / (index + place) for place in range(1, 40 - index)]
            step(torch.ones(2))


def test_numbers_of_a_list_that_the_step_empties() -> None:
    """They are where they were before the step: all calls take one way, and the list is what is refused."""
    model = Annealed()
    model.rewards = []

    def body(x: Tensor) -> Tensor:
        for reward in model.rewards:
            x = x * reward
        del model.rewards[:]
        return x

    step = graph_step(body, owners={"model": model})
    with pytest.raises(HostEffectError, match=r"the step shortens model\.rewards, from 3 to 0 items"):
        for index in range(6):
            model.rewards += [1 / (index + place) for place in range(1, 4)]
            step(torch.ones(2))
    assert step.stats.calls == 4


UNSEEN = ctypes.c_int(0)
"""A number where no guard looks."""


def test_a_number_that_only_the_capture_gives_to_an_operator() -> None:
    """No memory was filled with it."""
    model, UNSEEN.value = Annealed(), 0

    def body(x: Tensor) -> Tensor:
        UNSEEN.value += 1
        return x * (model.step + 1) if UNSEEN.value == 6 else x * 2

    step = graph_step(body, owners={"model": model}, allow=("UNSEEN[:]",))
    with pytest.raises(CaptureError, match=r"captured step uses a number as a tensor at test_symbolic_numbers\.py:\d+"):
        for model.step in range(8):
            step(torch.ones(2))
    assert type(model.step) is int


class Held:
    """An object of the user's, with a number."""

    def __init__(self, count: int) -> None:
        self.count = count


class Holding(nn.Module):
    """A model with numbers in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.count: Any = 0
        self.other: Any = 0
        self.average = 0.0
        self.counts, self.rows, self.held, self.spare = {"calls": 0, "rest": 3}, list[Any](), Held(1), Held(7)


def _becomes(value: Callable[[int], Any], since: int = 15) -> Callable[[Any, int], None]:
    """The host sets ``count`` to the call's number, and later to something else."""
    return lambda model, index: setattr(model, "count", index if index < since else value(index))


def _gone(model: Any, index: int) -> None:
    if index < 15:
        model.count = index
    elif index == 15:
        del model.count


def _swap(model: Any, index: int) -> None:
    model.held, model.spare = model.spare, model.held
    model.held.count += 1


def _renew(model: Any, index: int) -> None:
    model.held = Held(index)
    model.counts = {"calls": index, "rest": 3}


def _flip(model: Any, index: int) -> None:
    model.count = index % 2 == 0 if index < 40 else index % 3


def _reflected(model: Any, y: Tensor) -> Tensor:
    model.count = 5 - model.count
    return y * model.count


def _doubled(model: Any, y: Tensor) -> Tensor:
    model.count = model.count + model.count if model.count < 64 else 1
    return y + model.count


def _by_tenths(model: Any, y: Tensor) -> Tensor:
    model.average += 0.1
    return y * 2 if model.average > 1.9000000000000001 else y


def _kept(model: Any, y: Tensor) -> Tensor:
    model.counts["calls"] += 1
    model.rows.append((model.counts["calls"], y.sum().item() / model.counts["calls"]))
    model.average = 0.9 * model.average + 0.1 * y.mean().item()
    model.other = model.average * model.counts["calls"]
    return y * (model.counts["calls"] / 10)


def _in_checkpoint(model: Any, y: Tensor) -> Tensor:
    model.count += 1
    result: Tensor = checkpoint(lambda z: (z * model.count).sin(), y, use_reentrant=False)
    return result


def _in_a_mode(model: Any, y: Tensor) -> Tensor:
    with Doubling():
        return y * model.count


class Doubling(TorchDispatchMode):
    """Doubles the numbers, not the tensors, that tensors are multiplied with."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor and not isinstance(args[1], Tensor):
            args = args[0], args[1] * 2
        return func(*args, **(kwargs or {}))


Case = tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, int], None], int]
CASES: dict[str, Case] = {
    "None": (lambda model, y: y if model.count is None else y * 2, _becomes(lambda index: None), 20),
    "None and a number": (
        lambda model, y: y if model.count is None else y * model.count,
        lambda model, index: setattr(model, "count", index if index // 5 % 2 else None), 20,
    ),
    "another class": (
        lambda model, y: y * (1 if isinstance(model.count, int) else 2), _becomes(lambda index: index + 0.5), 20
    ),
    "gone": (lambda model, y: y * 2 if hasattr(model, "count") else y, _gone, 20),
    "a truth value": (lambda model, y: y * (1 + model.count), _flip, 20),
    "swapped objects": (lambda model, y: y * model.held.count, _swap, 30),
    "a question of swapped objects": (lambda model, y: y * 2 if model.held.count % 3 else y, _swap, 30),
    "new objects": (lambda model, y: y * model.held.count + model.counts["calls"], _renew, 30),
    "reflected": (_reflected, lambda model, index: None, 30),
    "doubled": (_doubled, lambda model, index: None, 30),
    "tenths": (_by_tenths, lambda model, index: None, 30),
    "kept": (_kept, lambda model, index: None, 30),
    "in a checkpoint": (_in_checkpoint, lambda model, index: None, 0),
    "in a mode": (_in_a_mode, _becomes(lambda index: index), 0),
    "signed zeros": (
        lambda model, y: y + torch.copysign(torch.ones(()), (y.detach() * 0.0).sum() + (1 + model.count) * -0.0),
        _becomes(lambda index: index), 30,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:graphplan")
def test_numbers_in_odd_places(name: str) -> None:
    """Replays without checks, which would hide them, are eager's steps, and leave plain numbers behind."""
    act, between, replayed = CASES[name]

    def run(*, graphed: bool) -> tuple[Any, Any, list[Tensor]]:
        torch.manual_seed(0)
        model = Holding()
        optimizer = torch.optim.SGD(model.parameters(), 1e-7, fused=True)

        def train(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = act(model, model.net(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        owners = {"model": model, "optimizer": optimizer}
        step: Any = graph_step(train, owners=owners, verify="off", on_failure="eager") if graphed else train
        losses = []
        for index in range(60):
            between(model, index)
            losses.append(step(torch.randn(8, 4)))
        return step, model, losses

    _, twin, expected = run(graphed=False)
    step, model, found = run(graphed=True)
    assert all(map(torch.equal, expected, found))
    assert step.stats.replayed >= replayed, step.report()
    names = ("count", "other", "average", "counts", "rows")
    values = [[getattr(each, name, None) for name in names] for each in (model, twin)]
    assert values[0] == values[1]
    assert "SymbolicNumber" not in str(tree_map(type, values[0]))


@pytest.mark.parametrize("when", range(3, 8))
def test_a_step_that_fails_leaves_plain_numbers(when: int) -> None:
    """In attributes, lists and dictionaries, whichever call it is; what it has appended to keeps its identity."""
    model = Holding()
    row = {"count": 0}
    model.rows.append(row)

    def body(x: Tensor) -> Tensor:
        model.counts["calls"] += 1
        model.count = model.counts["calls"] * 2
        model.rows.append((model.counts["calls"], model.count))
        if model.counts["calls"] == when + 1:
            raise ValueError("on purpose")
        return x * model.count

    step = graph_step(body, owners={"model": model}, on_failure="eager")
    for index in range(12):
        if index == when:
            with pytest.raises(ValueError, match="on purpose"):
                step(torch.ones(2))
        else:
            assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0 * (index + 1)))
        assert "SymbolicNumber" not in str(tree_map(type, [model.count, model.counts, model.rows]))
    assert model.rows[0] is row and model.rows[1:] == [(n, 2 * n) for n in range(1, 13)]
    assert step.stats.replayed > 0


def test_a_list_that_a_scheduler_makes_anew_is_not_followed_by_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rates are what they were: once it was another one, they are compared wherever they lie."""
    model = Holding()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, fused=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1000])
    optimizer.step()

    def body(x: Tensor) -> Tensor:
        return x * scheduler.get_last_lr()[0]

    owners = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step = graph_step(body, owners=owners, verify="off")
    walks: list[int] = []
    resync = Program.resync
    monkeypatch.setattr(Program, "resync", lambda self, *args: (walks.append(1), resync(self, *args))[1])
    for _ in range(40):
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 0.05))
        scheduler.step()
    assert len(walks) <= 2 and step.stats.replayed >= 30
    scheduler._last_lr = [0.5]
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 0.5))


def test_memory_is_filled_where_the_number_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill is a launch."""
    model, fills = Annealed(), list[Any]()
    step = graph_step(lambda x: x * model.share, owners={"model": model}, verify="off")
    fill = Tensor.fill_
    for index in range(50):
        model.share = float(index) if index < 20 else float(index // 10)
        if index == 20:
            monkeypatch.setattr(Tensor, "fill_", lambda self, value: (fills.append(value), fill(self, value))[1])
        assert torch.equal(step(torch.ones(2)), torch.full((2,), model.share))
    assert step.stats.replayed >= 30
    assert fills == [2.0, 3.0, 4.0]
