"""What the report says of changes, how many captures they may cost, and the two ways to debug a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from graphplan import OptionError, RecaptureError, SkipReason, graph_step
from tests.failure_modes.naive import WHEN, changing_rig, stay
from tests.models import attributes, float_batches
from tests.twins import assert_equals_eager, assert_same_as_eager, assert_same_runs, build, drive, managed


def _add_group(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def _freeze(model: Any, optimizer: Any) -> None:
    model[0].weight.requires_grad_(False)


def _drop_bias(model: Any, optimizer: Any) -> None:
    model[0].bias = None


def _drop_layer(model: Any, optimizer: Any) -> None:
    del model[1]


def _other_decay(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.3


EVENTS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "add_param_group": (_add_group, "another program: optimizer.param_groups[1].params[0] is new; optimizer"),
    "freezing": (_freeze, "another program: model.0.weight.requires_grad: True then False"),
    "no bias": (_drop_bias, "eager for one step: model.0.bias held a tensor at capture, and does not now"),
    "no bias, new key": (
        _drop_bias,
        "another program: model.0.bias is gone; optimizer.param_groups[0].params[1] is new",
    ),
    "no layer": (_drop_layer, "another program: model.1.bias is gone; model.1.weight is gone"),
    "weight decay": (_other_decay, "another program: AdamW optimizer.param_groups[0].weight_decay: 0.01 then 0.3"),
}


@pytest.mark.parametrize("what", EVENTS)
def test_the_report_names_the_event(what: str) -> None:
    """Not only that something moved, but what was done."""
    change, text = EVENTS[what]
    rig = build(partial(changing_rig, change))
    step = managed(rig)
    drive(rig, step)
    assert any(text in event for event in step.stats.events), step.stats.events
    assert text in step.report()


def _flag_rig(every: int, ahead: int = 0) -> Any:
    """A flag that the step reads takes another value after each ``every`` calls, ``ahead`` calls earlier."""

    def loss(model: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model(x), y) * complex(model.sharpness).real

    each = lambda model, optimizer, index: setattr(model, "sharpness", 1.0 + (index + ahead) // every)  # noqa: E731
    return changing_rig(stay, loss, prepare=attributes(sharpness=1.0), each=each)


def test_captures_that_do_not_pay_come_to_an_end() -> None:
    """Three captures in a row for fewer than 16 replays each: eager from then on, and the reasons are listed."""
    make = partial(_flag_rig, 6)
    rig = build(make)
    expected = drive(rig, rig.step)
    rig = build(make)
    step = managed(rig, max_recaptures=2)
    with pytest.warns(UserWarning, match=r"captured again 2 times in a row.*model\.sharpness was 1\.0 and is 2\.0"):
        assert_same_runs(expected, drive(rig, step))
    assert step.stats.skipped[SkipReason.RECAPTURE] > 0
    assert step.stats.captured == 3


@pytest.mark.twice
def test_captures_that_do_not_pay_raise_before_the_first_replay() -> None:
    """Where nothing was ever replayed, nobody would lose a run."""
    rig = build(partial(_flag_rig, 4, 1))
    step = managed(rig, max_recaptures=1, warmup_steps=1)
    with pytest.raises(RecaptureError, match=r"each time for fewer than 16 replays: .*max_recaptures \(now 1\)"):
        drive(rig, step)
    assert step.stats.replayed == 0


def _named(model: Any, x: Any, y: Any) -> Any:
    loss = nn.functional.cross_entropy(model(x), y) * len(model.mode)
    return loss * 2 if model.turn % 2 else loss.exp()


def _named_rig(every: int, ways: int, calls: int = 24) -> Any:
    """A name that the step reads is another one after each ``every`` calls; calls take one of ``ways`` in turn."""

    def each(model: Any, optimizer: Any, index: int) -> None:
        model.turn = index % ways
        model.mode = f"m{index // every}"

    batches = list(float_batches(calls))
    return changing_rig(stay, _named, prepare=attributes(mode="m0", turn=0), each=each, calls=batches)


@pytest.mark.twice
def test_plans_that_are_out_of_date_at_their_captures_come_to_an_end() -> None:
    """The name is another one after each two traces, so that nothing is ever captured."""
    make = partial(_named_rig, 2, 1)
    text = r"2 plans in a row were out of date at their capture: model\.mode was 'm\d' when the step was traced and is "
    rig = build(make)
    step = managed(rig, max_recaptures=2)
    with pytest.raises(RecaptureError, match=text + r"'m\d'\. Expected .* or raise max_recaptures \(now 2\)"):
        drive(rig, step)
    with pytest.warns(UserWarning, match=text):
        step = assert_same_as_eager(make, max_recaptures=2, on_failure="eager")
    assert (step.stats.captured, step.stats.traced) == (0, 4)
    assert step.report().count("traced anew") == 1


def test_programs_that_take_turns_are_left_out_once_each() -> None:
    """The name that both ways of the step read is another one for good: an eager step each, then they are captured."""
    step = assert_same_as_eager(partial(_named_rig, 24, 2, 48))
    assert step.stats.recaptured == 1, step.report()
    assert step.stats.skipped == {SkipReason.GUARD: 2}
    assert step.stats.replayed >= 24


def test_a_sentence_is_warned_of_once_whatever_its_numbers() -> None:
    """Each shape is refused by itself, with the values that it had then."""
    model = nn.Linear(2, 2)
    attributes(number=1)(model)

    def body(x: torch.Tensor) -> torch.Tensor:
        model.number = hash((model.number, 1)) % 1009
        return model(x) * (model.number % 5)

    step = graph_step(body, owners=[model], on_failure="eager", warmup_steps=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(24):
            step(torch.ones(1 + number // 8, 2))
    assert len(said) == 1, [str(each.message) for each in said]
    assert len([text for text in step.stats.reasons if "the step" in text]) > 1, step.stats.reasons


def test_state_that_was_replaced_while_something_keeps_the_old() -> None:
    """As a metric's ``reset()`` leaves its total, of which a logger has the last one."""
    kept: list[torch.Tensor] = []

    def reset(model: Any, optimizer: Any) -> None:
        kept.append(model.total.view(1))
        model.total = torch.zeros(())

    def loss(model: Any, x: Any, y: Any) -> Any:
        found = nn.functional.cross_entropy(model(x), y)
        model.total += found.detach()
        return found

    make = partial(changing_rig, reset, loss, prepare=lambda model: setattr(model, "total", torch.zeros(())))
    step = assert_same_as_eager(make)
    text = "model.total was replaced by a new tensor (a metric's reset() does that), but something else still uses its"
    assert text in step.report()
    assert step.stats.replayed > 12


def test_a_bad_bound() -> None:
    """Fewer than no captures make no sense."""
    with pytest.raises(OptionError, match=r"max_recaptures is -1; expected an int >= 0"):
        graph_step(lambda: None, max_recaptures=-1)


def test_debug_changes_nothing() -> None:
    """``debug=True`` only waits."""
    assert WHEN < 24
    assert_equals_eager(partial(changing_rig, stay), debug=True)


def test_a_step_that_is_refused_for_every_shape_stands_down_early() -> None:
    """A second shape that is refused for the same line is the last one that is traced."""
    step = graph_step(lambda x: x * int(torch.rand_like(x).max()), on_failure="eager", verify="off")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(160):
            step(torch.ones(1 + number % 20))
    assert ["runs this step eagerly" in str(warning.message) for warning in said] == [True]
    assert step.is_down
    assert step.stats.traced == 2


def test_batches_that_never_read_alike_stand_down_early() -> None:
    """Ways through the step that no batch has taken again are looked for a few times, whatever their shapes."""
    step = graph_step(lambda x: x * complex(x.sum()).real, on_failure="eager", verify="off")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(200):
            step(torch.rand(1 + number % 20))
    assert ["runs this step eagerly" in str(warning.message) for warning in said] == [True] * len(said)
    assert step.is_down
    assert step.stats.traced < 16


def test_programs_of_several_ways_are_no_recaptures() -> None:
    """Four ways in turn are captured one after the other, before any of them has come to 16 replays."""

    def loss(model: Any, x: Any, y: Any) -> Any:
        out = nn.functional.cross_entropy(model(x), y)
        out = out * 2 if model.turn % 2 else out.exp()
        return out * 3 if model.turn > 1 else out.sqrt()

    each = lambda model, optimizer, index: setattr(model, "turn", index % 4)  # noqa: E731
    batches = list(float_batches(48))
    make = partial(changing_rig, stay, loss, prepare=attributes(turn=0), each=each, calls=batches)
    step = assert_same_as_eager(make, max_recaptures=1)
    assert (step.stats.captured, step.stats.recaptured) == (4, 0)
    assert step.stats.replayed >= 24
