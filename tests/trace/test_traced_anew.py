"""What the host changes between the two traces of a plan: they say nothing of each other, and others are made."""

from __future__ import annotations

import gc
import re
import weakref
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from graphplan import HostEffectError, HostScalarError, SkipReason, graph_step
from tests.models import CALLS, attributes, updating_rig
from tests.twins import (
    BEFORE_REPLAY,
    LAST_TRACE,
    SECOND_TRACE,
    WARMUP,
    Rig,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    assert_same_as_eager,
    line_of,
)

BETWEEN = WARMUP
"""The call after which the host acts: the first trace."""
SETTINGS = SimpleNamespace(factor=1.0)


def events_of(step: Any) -> list[str]:
    """What the report says of new traces."""
    return [text for text in step.stats.events if text.startswith("traced anew")]


def scaled(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss * complex(model.scale).real  # culprit


def chosen(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss.exp() if model.scale > 1 else loss.sin()


def shown(model: Any, x: Tensor, loss: Tensor) -> Any:
    return model.scale


def with_default(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss * getattr(model, "late", 1.0)


def by_setting(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss * SETTINGS.factor


def set_once(when: int, model: Any, index: int) -> None:
    """The host's one change, of all that the steps here read."""
    if index == when:
        model.scale = model.late = SETTINGS.factor = 2.0


READERS = [scaled, chosen, shown, with_default, by_setting]
NAMES = {with_default: r"model\.late was not set", by_setting: r".*SETTINGS\.factor was 1\.0"}


def reading_rig(update: Callable[..., Any], after: Callable[..., Any]) -> Rig:
    SETTINGS.factor = 1.0
    return updating_rig(update, attributes(scale=1.0), after)


@pytest.mark.twice
def test_a_comparison_that_comes_out_otherwise_between_the_traces() -> None:
    """The second trace is the first of another pair."""
    step = assert_equals_eager(
        partial(reading_rig, chosen, partial(set_once, BETWEEN)), replayed=CALLS - BEFORE_REPLAY - 1
    )
    assert events_of(step) == ["traced anew: model.scale was 1.0 one step before and is 2.0"]


@pytest.mark.parametrize("update", [scaled, shown, with_default, by_setting], ids=lambda update: update.__name__)
@pytest.mark.twice
def test_a_value_that_is_set_between_the_traces(update: Callable[..., Any]) -> None:
    """The second trace is the first of another pair: one more step comes before the capture."""
    make = partial(reading_rig, update, partial(set_once, BETWEEN))
    step = assert_equals_eager(make, replayed=CALLS - BEFORE_REPLAY - 1)
    (event,) = events_of(step)
    name = NAMES.get(update, r"model\.scale was 1\.0")
    assert re.fullmatch(rf"traced anew: {name} one step before and is 2\.0", event)
    assert event in step.report()


@pytest.mark.parametrize("phase", range(8))
@pytest.mark.crossed(2)
def test_a_value_that_is_set_now_and_then(phase: int) -> None:
    """As often as an epoch ends, wherever in it the traces are."""

    def grow(model: Any, index: int) -> None:
        model.scale += (index + phase) % 8 == 0

    make = partial(reading_rig, scaled, grow)
    step = assert_same_as_eager(make)
    assert step.stats.captured > 1
    assert step.stats.replayed > 0
    assert not step.stats.skipped.keys() - {SkipReason.SHAPE, SkipReason.GUARD}


@pytest.mark.twice
def test_a_layers_setting_that_is_set_between_the_traces() -> None:
    """A probability that only torch's own code reads."""

    def quieter(model: Any, index: int) -> None:
        if index == BETWEEN:
            model.drop.p = 0.5

    prepare = attributes(drop=partial(nn.Dropout, 0.25))
    make = partial(updating_rig, lambda model, x, loss: model.drop(x), prepare, quieter)
    step = assert_equals_eager(make, replayed=CALLS - BEFORE_REPLAY - 1)
    assert events_of(step) == ["traced anew: model.drop.p was 0.25 one step before and is 0.5"]


def test_a_value_that_is_set_after_every_call() -> None:
    """It is refused as before, after two more traces."""

    def halve(model: Any, index: int) -> None:
        model.scale /= 2

    make = partial(reading_rig, scaled, halve)
    text = r"uses model\.scale at .*, which is 0\.015625 before one step and 0\.0078125 before the next; a replay would"
    halved = partial(updating_rig, scaled, attributes(scale=0.5), halve)
    assert_refused(halved, HostScalarError, line_of(scaled), text, done=LAST_TRACE)
    assert_falls_back(make, SkipReason.HOST_SCALAR, r"which is 0\.\d+ before one step and 0\.\d+ before the next")


@pytest.mark.twice
def test_values_that_are_set_one_after_the_other() -> None:
    """Two changes in a row are still by chance."""

    def set_both(model: Any, index: int) -> None:
        set_once(BETWEEN, model, index)
        if index == BETWEEN + 1:
            model.scale = 3.0

    step = assert_equals_eager(partial(reading_rig, scaled, set_both), replayed=CALLS - BEFORE_REPLAY - 2)
    assert len(events_of(step)) == 2


def counted(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.scale += 1
    return loss * complex(model.scale).real  # culprit


def test_what_the_step_itself_changes_is_refused_at_once() -> None:
    make = partial(reading_rig, counted, lambda model, index: None)
    assert_refused(make, HostScalarError, line_of(counted), r"uses model\.scale at", done=SECOND_TRACE)


def counted_for(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.scale += 1
    return loss * model.scale


def decaying(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.scale = model.scale * 0.5 + 0.25
    return loss * model.scale


@pytest.mark.parametrize("update", [counted_for, decaying])
@pytest.mark.parametrize("verify", ["geometric", "off"])
def test_what_the_step_itself_changes_and_an_operator_gets(update: Callable[..., Any], verify: str) -> None:
    """Each replay computes it from what the one before has left."""
    make = partial(reading_rig, update, lambda model, index: None)
    step = assert_equals_eager(make, replayed=CALLS - BEFORE_REPLAY, verify=verify)
    assert type(step.plan.handles.owners()["model"].scale) is float


def latched(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.scale = model.scale * 2 if model.scale < 4 else 0.5
    return loss * model.scale


def test_what_only_some_calls_set_to_a_constant() -> None:
    """Both ways through the branch have programs; that of the other one sets the constant."""
    step = assert_same_as_eager(partial(reading_rig, latched, lambda model, index: None))
    assert step.stats.captured == 2
    assert step.stats.replayed > 4


def test_what_the_step_appends_is_refused_at_once() -> None:
    """What it finds in a list that it made longer is its own doing."""

    def append(model: Any, x: Tensor, loss: Tensor) -> Tensor:
        model.seen.append(7 * len(model.seen))
        return loss * model.seen[-1]

    make = partial(updating_rig, append, attributes(seen=list))
    assert_refused(make, HostScalarError, r"gets other=21 on one step and other=28", done=SECOND_TRACE)


class Cached:
    """Drops what somebody worked out from its total when that changes, as metrics do."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.computed: Tensor | None = None

    def add(self, value: Tensor) -> None:
        """Add to the total."""
        self.computed = None
        self.total += value


def adding(model: Any, x: Tensor, loss: Tensor) -> None:
    model.metric.add(loss.detach())


def test_a_tensor_that_the_host_leaves_where_the_step_puts_nothing() -> None:
    """The first trace finds it and the second does not, though both do the same."""

    def work_out(when: int, model: Any, index: int) -> None:
        if index == when:
            model.metric.computed = model.metric.total * 2

    make = partial(updating_rig, adding, attributes(metric=Cached), partial(work_out, BETWEEN - 1))
    step = assert_equals_eager(make, replayed=CALLS - BEFORE_REPLAY - 1)
    assert events_of(step) == ["traced anew: model.metric.computed was a Tensor one step before and is None"]
    make = partial(updating_rig, adding, attributes(metric=Cached), lambda model, index: work_out(index, model, index))
    assert_refused(make, HostEffectError, r"changes model\.metric\.computed in Python", done=SECOND_TRACE)


def recurrent(model: Any, x: Tensor, loss: Tensor) -> None:
    h, c = model.h, model.c
    model.h, model.c = h * 0.5 + loss.detach(), c * 0.25 + h + loss.detach()


def reset(every: int, phase: int, model: Any, index: int) -> None:
    """Both states in one tensor, which the next step binds anew."""
    if index % every == phase:
        model.h = model.c = torch.zeros(2)


def recurrent_rig(every: int, phase: int) -> Rig:
    states = attributes(h=partial(torch.zeros, 2), c=partial(torch.zeros, 2))
    return updating_rig(recurrent, states, partial(reset, every, phase))


@pytest.mark.parametrize("phase", range(2 * BEFORE_REPLAY))
@pytest.mark.crossed(2)
def test_two_states_that_are_reset_to_one_tensor_once(phase: int) -> None:
    """Before the traces, between them, before the capture, or between replays: only two traces tell."""
    make = partial(recurrent_rig, 100, phase)
    step = assert_equals_eager(make)
    assert (step.stats.traced, events_of(step)) == (1, [])
    # Traces with and without say nothing of each other.
    more = {2: 1, 3: 2}.get(phase, 0)
    step = assert_equals_eager(make, replayed=CALLS - BEFORE_REPLAY - more, verify="off")
    texts = events_of(step)
    assert bool(texts) == bool(more)
    assert all("model.c and model.h" in text for text in texts)


@pytest.mark.parametrize("phase", range(7))
@pytest.mark.crossed(2, 1)
def test_two_states_that_are_reset_to_one_tensor_now_and_then(phase: int) -> None:
    make = partial(recurrent_rig, 7, phase)
    step = assert_same_as_eager(make)
    assert step.stats.replayed >= 6


def test_two_states_that_are_always_reset_to_one_tensor() -> None:
    assert_equals_eager(partial(recurrent_rig, 1, 0))


def a_namedtuple(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    output = namedtuple("Output", ["loss"])
    return output(loss=loss * 2).loss


def a_typed_tuple(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    class Output(NamedTuple):
        loss: Tensor

    return Output(loss * 2).loss


def executed(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    space: dict[str, Any] = {}
    exec("two = 2\ndef double(x):\n    return x * two", space)
    return space["double"](loss)  # type: ignore[no-any-return]


def evaluated(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return eval("loss * two", {"loss": loss, "two": 2})  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [a_namedtuple, a_typed_tuple, executed, evaluated], ids=lambda make: make.__name__)
def test_namespaces_that_each_step_makes(make: Callable[..., Tensor]) -> None:
    """Their names are no names that the step depends on: it makes them itself."""
    assert_equals_eager(partial(updating_rig, make, attributes()))


def test_names_that_are_others_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few traces are made, no more."""
    for index in range(CALLS):
        monkeypatch.setitem(globals(), f"factor_{index}", 2.0)

    def named(model: Any, x: Tensor, loss: Tensor) -> Tensor:
        return loss * eval(f"factor_{model.turn()}", globals())  # type: ignore[no-any-return]

    make = partial(updating_rig, named, attributes(turn=lambda: iter(range(CALLS)).__next__))
    text = r"in 8 steps in a row.* used new names or objects \(the latest name is factor_\d+\)"
    assert_falls_back(make, SkipReason.CONTROL_FLOW, text)


@pytest.mark.filterwarnings("ignore:graphplan runs")
def test_a_refused_way_holds_no_batch() -> None:
    """Where operators came from is known until a capture, which may never come; the trace's tensors are let go."""
    fed: list[weakref.ref[Tensor]] = []
    state, weight = SimpleNamespace(calls=0, last=0), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1, fused=True)

    def step(x: Tensor) -> Tensor:
        state.calls += 1
        optimizer.zero_grad()
        loss = (x * weight).sum()
        loss.backward()
        optimizer.step()
        if state.calls % 10 == 0:
            state.last = int(loss)
        return loss.detach()

    graphed = graph_step(step, on_failure="eager", verify="off", backend="tape")
    for _ in range(60):
        x = torch.rand(4)
        fed.append(weakref.ref(x))
        graphed(x)
        del x
    gc.collect()
    assert graphed.stats.replayed
    assert not any(x() is not None for x in fed)
