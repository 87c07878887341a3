"""``float(x)`` and ``int(x)`` in a step's code, where ``x`` waits to be read, or is followed from step to step."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan import graph_step
from graphplan.observe import number_calls
from tests.lightning.parts import assert_fit_equals_eager, with_step
from tests.models import keeping_rig
from tests.twins import Rig, assert_same_runs, build, drive, managed

CALLS, BEFORE = 16, 6
Body = Callable[[Any, Tensor, Tensor], Any]

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="code does not say what it calls"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar"),
]


def rig_of(body: Body) -> Rig:
    """A training step that returns what ``body(model, loss, hits)`` does."""

    def hits(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Any:
        model.steps += 1
        return body(model, loss, (scores.argmax(1) == y).float())

    return keeping_rig(hits, CALLS, history=[], total=0.0, steps=0)


def returns(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return float(loss), float(hits.sum()), float(hits.long().sum()), float(hits[:1]), float(loss.double() / 3)


def converts_what_waits(model: Any, loss: Tensor, hits: Tensor) -> Any:
    return float(loss.item()) + 1, float(hits.long().sum().item()) / 7, float(float(loss)), round(float(loss), 2)


def keeps(model: Any, loss: Tensor, hits: Tensor) -> Any:
    model.total += float(loss) * 6
    model.history.append({"loss": float(loss), "hits": [float(each) for each in (hits[0], hits[1])]})


def is_asked(model: Any, loss: Tensor, hits: Tensor) -> Any:
    value = float(loss)
    return value if isinstance(value, (int, float)) and isinstance(model.steps, int) else None


def compares(model: Any, loss: Tensor, hits: Tensor) -> Any:
    if float(loss) > 1e9 or math.isnan(float(loss)) or math.isinf(loss.item()) or not math.isfinite(float(loss)):
        raise ValueError("it diverges")
    return float(loss)


def follows(model: Any, loss: Tensor, hits: Tensor) -> Any:
    share = min(1.0, float(model.steps) / 1000)
    return loss * share + int(model.steps / 2) / 8, torch.tensor(float(model.steps), device=loss.device), share


def calls_as_ever(model: Any, loss: Tensor, hits: Tensor) -> Any:
    number = float("-inf") + float("0") + int("12", base=8) + int(2.5) + float(3)
    return float(number if number > 0 else 0.5), int(True), list(map(str, (float(1), int(1e3))))


BODIES = [returns, converts_what_waits, keeps, is_asked, compares, follows, calls_as_ever]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.twice
def test_numbers_of_classes_that_are_called(body: Body, equals_eager: Any) -> None:
    """They are eager's, of eager's types, and the module has no names of its own for them afterwards."""
    step = equals_eager(partial(rig_of, body), exact=True)
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE), step.report()
    assert vars(sys.modules[__name__]).keys().isdisjoint({"float", "int"})


def test_a_fit_that_logs_them(tmp_path: Path) -> None:
    """What a Trainer is given to log has to be a number."""

    def step(module: Any, batch: Any) -> Tensor:
        loss = module.loss_of(batch)
        module.log("loss", float(loss), prog_bar=True)
        module.log("step", float(module.global_step))
        return loss

    assert_fit_equals_eager(with_step(step), tmp_path, replayed=4)


def only_called(x: Any) -> Any:
    return float(x) + float(len([float(x)])) if isinstance(x, (int, float)) else float("nan")


def as_a_type(x: Any) -> Any:
    return torch.zeros(2, dtype=float)  # type: ignore[arg-type]


def compared(x: Any) -> Any:
    return type(x) is float


def of_its_own(x: Any) -> Any:
    return float.fromhex("0x1p3") + float(x)


def handed_on(x: Any) -> Any:
    return list(map(float, x))


def after_isinstance(x: Any) -> Any:
    return isinstance(x, str), float


def asked_of_what_is_called(x: Any) -> Any:
    return isinstance(abs(x), float)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (only_called, True),
        *((f, False) for f in (as_a_type, compared, of_its_own, handed_on, after_isinstance)),
        # It might be handed to the other function.
        (asked_of_what_is_called, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_code_that_does_no_more_than_call_a_class(function: Callable[..., Any], expected: bool) -> None:
    assert number_calls._only_calls(function.__code__, "float") is expected


LATE = """
import torch

def late(x):
    return x + torch.zeros(2, dtype=float).sum().float()

class Step:
    calls = 0

    def __call__(self, x):
        self.calls += 1
        if FAILS and self.calls == 5:
            raise KeyError(float(x.sum()))
        x = x * 2
        return late(x) if self.calls > BEGIN else x, float(x.sum())
"""


def module_of(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **facts: Any) -> Any:
    """A module of the user's, with these globals."""
    (folder / f"{name}.py").write_text(LATE + "".join(f"{key} = {value!r}\n" for key, value in facts.items()))
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(name)


@pytest.mark.parametrize("begin", [3, 4, 5, 9])
def test_what_else_is_done_with_a_class_shows_before_it_is(
    begin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first trace, the second one, the capture, or later: torch would take no other class for a dtype."""
    module = module_of(tmp_path, monkeypatch, f"late_{begin}", BEGIN=begin, FAILS=False)
    runs = []
    for is_graphed in (False, True):
        step: Any = module.Step()
        call = graph_step(step, owners={"step": step}, backend="tape", on_failure="eager") if is_graphed else step
        with pytest.MonkeyPatch.context():
            runs.append([str(call(torch.arange(4.0) * index)) for index in range(16)])
        assert vars(module).keys().isdisjoint({"float", "int"})
    assert runs[0] == runs[1]


def test_a_step_that_fails_leaves_no_name_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(tmp_path, monkeypatch, "failing", BEGIN=99, FAILS=True)
    step = module.Step()
    graphed = graph_step(step, owners={"step": step}, backend="tape", on_failure="eager")
    with pytest.raises(KeyError, match=r"^6\.0$"):
        for _ in range(6):
            graphed(torch.arange(4.0))
    assert vars(module).keys().isdisjoint({"float", "int"})


def test_a_name_of_the_modules_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(tmp_path, monkeypatch, "own", BEGIN=99, FAILS=False)
    module.float = own = lambda x: float(x) + 1
    make = lambda: Rig(step := module.Step(), {"step": step}, [(torch.arange(4.0) + i,) for i in range(12)])  # noqa: E731
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    assert_same_runs(expected, drive(rig, managed(rig, on_failure="eager")))
    assert module.float is own
