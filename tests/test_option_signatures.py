"""Options by keyword: one list of fields gives signatures, types, documentation and errors to all that take them."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from graphplan import GraphPlanCallback, graph_step, graphed
from graphplan.callback.callback_options import CallbackOptions
from graphplan.inference.graphed_functions import ServeOptions
from graphplan.step.options import CommonOptions, StepOptions

TAKERS: dict[Any, Any] = {graph_step: StepOptions, graphed: ServeOptions, GraphPlanCallback: CallbackOptions}
each_taker = pytest.mark.parametrize("taker", TAKERS, ids=lambda taker: taker.__name__)


@each_taker
def test_signatures_are_those_of_the_options(taker: Any) -> None:
    """By keyword alone, with the same defaults and types."""
    parameters = dict(inspect.signature(taker).parameters)
    parameters.pop("fn", None)
    assert {name: each.default for name, each in parameters.items()} == {
        each.name: each.default for each in fields(TAKERS[taker]) if each.init
    }
    assert {each.kind for each in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert {each.name for each in fields(CommonOptions)} < set(parameters)


@each_taker
def test_misspelt_options(taker: Any) -> None:
    """They are named, with the one that was meant."""
    given = () if taker is GraphPlanCallback else (abs,)
    with pytest.raises(TypeError, match=rf"^{taker.__name__} has no option 'bakend': did you mean backend\?$"):
        taker(*given, bakend="tape")
    with pytest.raises(TypeError, match=rf"^{taker.__name__} has no option 'zzz': options are backend, on_failure, "):
        taker(*given, zzz=1)


@each_taker
def test_options_by_position(taker: Any) -> None:
    """What comes second would be another option tomorrow."""
    text = rf"^{taker.__name__}: too many positional arguments; options are passed by keyword$"
    with pytest.raises(TypeError, match=text):
        taker(abs, "tape", 3)


def test_a_step_that_is_missing() -> None:
    """Python's own words, with the function's name."""
    with pytest.raises(TypeError, match=r"^graph_step: missing a required argument: 'fn'"):
        graph_step()  # type: ignore[call-arg]


@each_taker
def test_the_documentation_has_each_option_once(taker: Any) -> None:
    """In one section of arguments, before what is returned or raised."""
    lines = (inspect.getdoc(taker) or "").splitlines()
    assert lines.count("Args:") == 1
    arguments = lines[lines.index("Args:") + 1 :]
    arguments = arguments[: arguments.index("")]
    named = [line.split(":")[0].strip() for line in arguments if not line.startswith("     ")]
    assert [name for name in named if name != "fn"] == [each.name for each in fields(TAKERS[taker]) if each.init]
