"""Numbers that a step only compares: programs stay good while the comparisons come out as they did."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import HostScalarError, graph_step
from graphplan.observe.comparisons import Comparison, Reference, come_out_alike, comparisons_in


class Forms:
    """Ways to use ``self.n``, each with the comparisons that are all there is to it."""

    n: Any
    other: Any
    flag: Any

    def unused(self) -> Any:
        number = self.n  # noqa: F841

    def compared(self) -> Any:
        return 1 if self.n > 3 else 2

    def in_variable(self) -> Any:
        number = self.other.n
        if number == 0 or number > 7:
            return 1
        return number == 3

    def with_remainder(self) -> Any:
        return self.n % 10 == 0

    def by_remainder(self) -> Any:
        return 1 if not self.n % 5 else 2

    def added(self) -> Any:
        return 1 if (self.n + 1) % 4 == 0 else (self.n - 3) // 2 > 5

    def with_attribute(self) -> Any:
        return self.n < self.other

    def with_what_it_leads_to(self) -> Any:
        return (self.n + self.other) % self.other.every["batches"] == self.flag.first

    def among(self) -> Any:
        return self.n in (1, 2)

    def truth(self) -> Any:
        return 1 if self.n else 2

    def negated(self) -> Any:
        return not self.n

    def called(self) -> Any:
        return self.other.n()

    def shown_now_and_then(self) -> Any:
        if self.flag and self.n % 10 == 0:
            self.other(self.n, self.other.n if self.other.n > 3 else 0)
        return self.other

    def rising(self) -> Any:
        number = self.n
        return number / 10 if number < 10 else 1.0

    def looped(self) -> Any:
        if not self.n > 3:
            return [each + self.n for each in (1, 2)] if self.flag else self.n
        return 0


FORMS: dict[str, set[Comparison]] = {
    "unused": set(),
    "compared": {Comparison(">", 3)},
    "in_variable": {Comparison("==", 0), Comparison(">", 7), Comparison("==", 3)},
    "with_remainder": {Comparison("==", 0, (("%", 10),))},
    "by_remainder": {Comparison(steps=(("%", 5),))},
    "added": {Comparison("==", 0, (("+", 1), ("%", 4))), Comparison(">", 5, (("-", 3), ("//", 2)))},
    "with_attribute": {Comparison("<", Reference(("other",)))},
    "with_what_it_leads_to": {
        Comparison(
            "==",
            Reference(("flag", "first")),
            (("+", Reference(("other",))), ("%", Reference(("other", "every", "batches")))),
        )
    },
    "among": {Comparison("in", (1, 2))},
    "truth": {Comparison()},
    "negated": {Comparison()},
    "called": set(),
    "shown_now_and_then": {Comparison("==", 0, (("%", 10),), computes=True), Comparison(">", 3, computes=True)},
    "rising": {Comparison("<", 10, computes=True)},
}


@pytest.mark.parametrize("form", FORMS)
def test_code_that_only_compares(form: str) -> None:
    assert comparisons_in(getattr(Forms, form).__code__, "n") == FORMS[form]


COMPUTING: dict[str, Callable[..., Any]] = {
    "returned": lambda self: self.n,
    "exchanged": lambda self: 3 < self.n,  # noqa: SIM300
    "added to what is computed": lambda self: self.n + abs(self.other) > 3,
    "added to an item": lambda self: self.n + self.other[0] > 3,
    "formatted": lambda self: f"{self.n}",
    "index": lambda self: [1, 2][self.n],
    "handed on": lambda self: abs(self.n),
    "either": lambda self: self.n or 3,
    "between": lambda self: 1 < self.n < 4,
    "a bound that varies": lambda self: self.n > (3 if self.flag else 4),
    "by name": lambda self: getattr(self, "n") > 3,  # noqa: B009
    "identity": lambda self: self.n is self.other,
    "all variables": lambda self: locals() and self.n > 3,
    "divided by zero": lambda self: self.n % 0 == 1,
    "otherwise": lambda self: 1 if self.n > 3 else self.n,
    "in either case": lambda self: self.n if self.n > 3 or self.flag else 1,
    "where another's comes out so": lambda self: self.n if self.other.n > 3 else 1,
    "where what a call gives comes out so": lambda self: self.flag().n if self.flag().n > 3 else 1,
}


def _changed(self: Any) -> None:
    self.n += 1


def _two_values(self: Any) -> bool:
    number = self.n
    if self.flag:
        number = 3
    return number > 3


def _another_object(self: Any, found: Any) -> Any:
    if found.n > 3:
        found = self
        return found.n
    return 0


def _handled(self: Any) -> Any:
    try:
        if self.n > 3:
            self.flag()
    except ValueError:
        return self.n
    return 0


@pytest.mark.parametrize("form", [*COMPUTING, "changed", "two values", "another object", "handled"])
def test_code_that_computes_with_it(form: str) -> None:
    others = {
        "changed": _changed,
        "two values": _two_values,
        "another object": _another_object,
        "handled": _handled,
    }
    function = {**COMPUTING, **others}[form]
    assert comparisons_in(function.__code__, "n") is None


def test_attributes_of_the_first_argument_alone() -> None:
    code = COMPUTING["returned"].__code__
    assert comparisons_in(code, "n", of_self=True) is None
    assert comparisons_in(Forms.in_variable.__code__, "n", of_self=True) == set()


@pytest.mark.parametrize(
    ("comparison", "yes", "no"),
    [
        (Comparison(">", 3), 4, 3),
        (Comparison("in", (1, 2)), 2, 3),
        (Comparison(), 1, 0),
        (Comparison("==", 1, (("%", 2),)), 5, 6),
        (Comparison(steps=(("%", 5),)), 4, 5),
        (Comparison("!=", None), 4, None),
    ],
)
def test_outcomes(comparison: Comparison, yes: Any, no: Any) -> None:
    assert comparison.outcome(yes)
    assert not comparison.outcome(no)
    assert not come_out_alike([comparison], yes, no)
    assert come_out_alike([comparison], yes, yes)
    assert not come_out_alike(None, yes, yes)


def test_numbers_that_code_computes_with_are_outcomes_of_their_own() -> None:
    comparison = Comparison("==", 0, (("%", 10),), computes=True)
    assert come_out_alike([comparison], 3, 4)
    assert come_out_alike([comparison], 10, 10)
    assert not come_out_alike([comparison], 0, 3)
    assert not come_out_alike([comparison], 10, 20)


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
    assert "comparisons with 1 of them (model.step)" in str(step.plan)


def test_a_number_that_differs_in_each_step_and_is_computed_with() -> None:
    """Other code of the step decides what is done with it."""

    def act(model: Model, index: int) -> None:
        model.step, model.warm_up, model.scale = index, 0, float(index)

    with pytest.raises(HostScalarError, match=r"gets other=\d\.0 on one step and other=\d\.0 on the next"):
        run(8, act, graphed=True)


def test_a_comparison_that_alternates() -> None:
    """The two traces go different ways: each has a program."""

    def act(model: Model, index: int) -> None:
        model.step, model.warm_up = index % 2, 1

    expected, _, twin = run(20, act, graphed=False)
    found, step, model = run(20, act, graphed=True)
    assert all(map(torch.equal, expected, found))
    assert torch.equal(twin.net.weight, model.net.weight)
    assert (step.stats.captured, step.stats.recaptured, step.stats.replayed) == (2, 0, 10)


@pytest.mark.parametrize(("calls_each", "max_graphs", "captured", "kept"), [(8, 16, 6, 6), (8, 5, 7, 5), (1, 16, 6, 6)])
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
        if model.step % 12 == 11 and float(y) > 0:
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


class Showing(Model):
    """Keeps its loss now and then, with the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        if self.step % 10 == 0:
            self.rows.append((self.step, y.detach().sum().item()))
        if self.step < self.warm_up:
            y = y * (self.step / self.warm_up)
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


def test_calls_whose_comparison_has_code_compute_with_the_number_are_eager() -> None:
    """Others are replayed, and what is appended to meanwhile needs no capture anew."""
    _, twin = _run_showing(48, graphed=False, warm_up=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step, model = _run_showing(48, graphed=True, warm_up=0)
    assert torch.equal(twin.net.weight.grad, model.net.weight.grad)  # type: ignore[arg-type]
    assert [row[0] for row in model.rows] == [0, 10, 20, 30, 40]
    assert model.rows == twin.rows
    assert (step.stats.captured, step.stats.traced, step.stats.replayed) == (1, 2, 48 - 3 - 3 - 4)
    assert step.stats.reasons == {
        "the step's code computes with model.step, as its comparisons with it come out in these calls": 4
    }


def test_a_number_that_code_computes_with_and_that_stays_for_a_while() -> None:
    """It has a program from its second call on."""

    def act(model: Model, index: int) -> None:
        model.step = index // 12

    def body(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model.net(x)
        return y * (model.step / 4) if model.step < 4 else y

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
    with pytest.warns(UserWarning, match="runs calls eagerly: the step's code computes with model.step, as its comp"):
        step, model = _run_showing(48, graphed=True, warm_up=16)
    assert torch.equal(twin.net.weight.grad, model.net.weight.grad)  # type: ignore[arg-type]
    assert model.rows == twin.rows
    assert (step.stats.captured, step.stats.replayed) == (1, 48 - 16 - 3 - 3)


def test_a_number_that_code_computes_with_for_long() -> None:
    """However long that takes, the calls after it are replayed."""
    _, twin = _run_showing(132, graphed=False, warm_up=100)
    with pytest.warns(UserWarning, match="runs calls eagerly: the step's code computes with model.step, as its comp"):
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
