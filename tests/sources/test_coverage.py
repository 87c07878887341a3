"""What code names in a branch that no step takes is not read; a debugger's trace function is left alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest
from torch import Tensor

from graphplan.errors import HostScalarError
from graphplan.observe.comparisons import comparisons_in
from graphplan.observe.coverage import Coverage, MonitoredCoverage, new_coverage
from graphplan.observe.names import names_of
from tests.models import CALLS, attributes, updating_rig
from tests.twins import BEFORE_REPLAY, LAST_TRACE, TRACED, Rig, assert_refused, assert_same_as_eager, line_of

monitored = pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="since Python 3.12")
by_trace_function = pytest.mark.skipif(hasattr(sys, "monitoring"), reason="before Python 3.12")


class Thing:
    """Names its attributes in ways of which a run takes one."""

    number, other, last = 3, 0, 1

    def branch(self) -> Any:
        return self.number if self.other else self.last

    def conditions(self) -> Any:
        if self.other and self.number and self.last:
            return self.last
        return None

    def loop(self) -> Any:
        found = 0
        for each in range(self.other):
            found += self.number * each
        else:
            found += self.last
        return found

    def handled(self) -> Any:
        try:
            raise ValueError(self.last)
        except KeyError:
            return self.number
        except ValueError:
            return self.other

    def generator(self) -> Any:
        return list(self._each())

    def _each(self) -> Any:
        yield self.last
        if self.other:
            yield self.number
        yield self.other


def names_after(run: Callable[[], Any], code: CodeType) -> frozenset[str]:
    """The attributes that ``code`` names as far as it ran."""
    with new_coverage() as coverage:
        run()
    return frozenset(name for name in names_of(coverage.of(code)).attributes if not name.endswith("[:]"))


@pytest.mark.parametrize("name", ["branch", "conditions", "loop", "handled", "generator"])
def test_only_what_ran_is_named(name: str) -> None:
    thing = Thing()
    code = (Thing._each if name == "generator" else getattr(Thing, name)).__code__
    assert "number" in names_of(code).attributes
    expected = {"other"} if name == "conditions" else {"other", "last"}
    assert names_after(getattr(thing, name), code) == expected
    thing.other = 1
    assert "number" in names_after(getattr(thing, name), code) or name == "handled"


def test_code_that_was_not_seen_is_as_it_was() -> None:
    code = Thing.branch.__code__
    assert Coverage().of(code) is code


def test_a_comparison_is_found_in_what_ran() -> None:
    def now_and_then(thing: Any) -> Any:
        return thing.number if thing.other > 3 else 0

    thing = Thing()
    assert comparisons_in(now_and_then.__code__, "number") is None
    with new_coverage() as coverage:
        now_and_then(thing)
    assert comparisons_in(coverage.of(now_and_then.__code__), "number") == frozenset()


@by_trace_function
def test_a_trace_function_of_another_stays() -> None:
    def trace(frame: Any, event: str, arg: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with Coverage() as coverage:
            Thing().branch()
            assert sys.gettrace() is trace
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert coverage.of(Thing.branch.__code__) is Thing.branch.__code__


@by_trace_function
def test_a_trace_function_that_is_set_meanwhile_ends_it() -> None:
    """A debugger that is entered in the middle of a step."""
    before = sys.gettrace()
    try:
        with Coverage() as coverage:
            Thing().branch()
            sys.settrace(None)
            Thing().branch()
    finally:
        sys.settrace(before)
    assert coverage.of(Thing.branch.__code__) is Thing.branch.__code__


@monitored
def test_without_a_number_for_a_tool_nothing_is_known() -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    taken = [number for number in range(6) if monitoring.get_tool(number) is None]
    for number in taken:
        monitoring.use_tool_id(number, "another")
    try:
        with MonitoredCoverage() as coverage:
            Thing().branch()
    finally:
        for number in taken:
            monitoring.free_tool_id(number)
    assert coverage.of(Thing.branch.__code__) is Thing.branch.__code__


@monitored
def test_each_one_hears_of_everything_again() -> None:
    thing, code = Thing(), Thing.branch.__code__
    for other, expected in ((0, {"other", "last"}), (1, {"other", "number"}), (0, {"other", "last"})):
        thing.other = other
        assert names_after(thing.branch, code) == expected


def shown(model: Any, x: Tensor, loss: Tensor) -> Any:
    return loss * model.count if model.shows else loss + 0  # culprit


def counting_rig(*, shows_at: int = 99, shows: bool = False) -> Rig:
    """The host counts between steps, and a step names the count where ``shows``."""

    def after(model: Any, index: int) -> None:
        model.count += 1
        model.shows = shows or index == shows_at

    return updating_rig(shown, attributes(count=0, shows=shows), after)


def test_a_count_that_only_another_branch_names() -> None:
    step = assert_same_as_eager(counting_rig)
    assert step.stats.traced == 4, "two traces named it, and two more followed what ran"
    assert step.stats.replayed == CALLS - BEFORE_REPLAY - TRACED


def test_the_other_branch_is_another_program() -> None:
    """What decides is guarded, so that the branch is not taken unseen."""
    step = assert_same_as_eager(lambda: counting_rig(shows_at=12))
    assert step.stats.replayed >= 8, step.report()


def test_a_count_that_steps_do_read() -> None:
    assert_refused(lambda: counting_rig(shows=True), HostScalarError, line_of(shown), done=LAST_TRACE)
