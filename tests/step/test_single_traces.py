"""Steps of which one trace is enough, and what calls for a second one: before the capture, or at the first replay."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from graphplan import HostScalarError, check_step, graph_step, graphed
from graphplan.backends.tape import TapeBackend
from graphplan.errors import CaptureError, ControlFlowError, HostEffectError, HostSyncError, UncoveredRoleError
from graphplan.program.program import Program
from graphplan.step import replays
from tests.failure_modes.naive import changing_rig, loss_of, stay
from tests.models import CALLS, MODELS, OPTIMIZERS, Box, attributes, keeping_rig, training_rig, updating_rig
from tests.twins import (
    BEFORE_REPLAY,
    WARMUP,
    Rig,
    assert_refused,
    assert_same_as_eager,
    assert_same_runs,
    build,
    drive,
    line_of,
    managed,
)

ONCE = WARMUP + 1  # The call of the capture, if one trace is enough.
FIRST = ONCE + 1  # The call of the first replay.


def counts(step: Any) -> tuple[int, ...]:
    """What became of the calls."""
    return step.stats.eager, step.stats.traced, step.stats.captured, step.stats.replayed


@pytest.mark.parametrize(("model", "optimizer"), [*((m, "adamw") for m in MODELS), *(("mlp", o) for o in OPTIMIZERS)])
def test_one_trace_is_enough(model: str, optimizer: str) -> None:
    """A scheduler sets the learning rate between the calls, and the state of dropout goes on."""
    step = assert_same_as_eager(partial(training_rig, model, optimizer, sizes=[8] * CALLS))
    assert counts(step) == (WARMUP, 1, 1, CALLS - WARMUP - 2), step.report()
    assert step.stats.verified > 1


def test_each_further_shape_is_traced_once() -> None:
    step = assert_same_as_eager(partial(training_rig, "mlp", "adamw", sizes=[8, 4] * 12))
    assert (step.stats.traced, step.stats.captured) == (2, 2), step.report()


def test_an_integer_that_the_step_raises() -> None:
    """The first replay raises it as the eager step does, which is what the check compares."""

    def counts_up(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
        model.seen += 2
        return loss

    step = assert_same_as_eager(partial(keeping_rig, counts_up, CALLS, seen=0))
    assert (step.stats.traced, dict(step.plan.counters)) == (1, {"model.seen": 2})


def test_tensors_that_follow_each_other() -> None:
    """As the sums of a metric do, which also counts its updates, and the last loss."""

    def sums_up(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
        model.updates += 1
        model.total = model.total + loss.detach()
        model.kept = model.total / 2
        return loss

    def make() -> Rig:
        return keeping_rig(sums_up, CALLS, total=torch.zeros(()), kept=torch.zeros(()), updates=0)

    step = assert_same_as_eager(make)
    assert counts(step) == (WARMUP, 1, 1, CALLS - BEFORE_REPLAY + 1), step.report()
    assert step.plan.rebindings.carries == ("model.total",)
    assert "model.kept" in step.plan.rebindings.fresh
    assert dict(step.plan.counters) == {"model.updates": 1}


def following_rig(number_of_calls: int) -> Rig:
    """A tensor follows another one in the first calls, by a number that no guard sees."""
    number = Box(0)

    def keeps(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
        if number.item < number_of_calls:
            model.kept = model.kept / 2 + loss.detach()  # culprit
        return loss

    def count(model: Any, index: int) -> None:
        number.item += 1

    return keeping_rig(keeps, CALLS, count, kept=torch.zeros(()))


def test_a_tensor_that_follows_another_one_for_the_last_time_in_the_trace() -> None:
    """The check finds that what the capture has recorded is not what was traced."""
    step = assert_same_as_eager(partial(following_rig, ONCE))
    assert (step.stats.traced, step.stats.captured) == (3, 2), step.report()


def test_a_tensor_that_follows_another_one_for_the_last_time_in_the_capture() -> None:
    text = r"one step runs 21 operators and the next 18; the first extra one is operator 18, aten\.div\.Tensor at "
    assert_refused(partial(following_rig, FIRST), ControlFlowError, text, line_of(following_rig), done=FIRST + 2)


@pytest.mark.parametrize("is_same", [False, True])
def test_what_the_trace_was_fed_is_let_go(is_same: bool) -> None:
    """Unless the capture is fed the same memory: the step may know it by another name."""
    rig = build(partial(keeping_rig, lambda model, loss, scores, y: loss, CALLS))
    step, fed = managed(rig), list[weakref.ref[Tensor]]()
    for x, y in rig.calls:
        rows = rig.calls[0][0] if is_same else x.clone()
        fed.append(weakref.ref(rows))
        step(rows, y)
        del rows
    gc.collect()
    assert (step.stats.traced, step.plan.single) == (1, True)
    assert [each() is not None for each in fed] == [is_same] * CALLS
    assert len(step.plan.kept) == is_same


def _gives_other_memory(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    model.kept.data = loss.detach() * 1
    return loss


def _appends(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    model.losses.append((loss.detach(), scores.detach().max()))
    return loss


def _appends_more(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    model.losses.append((loss.detach(), loss.item()))
    return loss


def _sums_up(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> float:
    model.part += loss.item()
    return model.part / 2


def _averages(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    model.part = model.part / 2 + 0.5
    return loss


def _reads(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    return loss * 2 if (scores.detach().abs() > -1).all() else loss


def _draws(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    return loss * random.random()


def _mixes(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    return loss * share + scores.square().mean().sub(1 - share).add_(share)


def _counts(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    model.counted += 1
    return loss * (0.5 + model.counted)


def _turns_by_chance(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    return loss * 2 if random.random() < 2 else loss


def _divides_by_a_draw(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    return loss / random.random()


def _multiplies_in_half_precision(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    return (loss.bfloat16() * random.random()).float()


def _returns_number(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> float:
    return loss.item()


def _draws_from_its_own(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    return loss * torch.rand((), generator=model.source)


def _works_with_unowned(held: Box, model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    return loss * held.item


@pytest.mark.parametrize(
    ("body", "kept"),
    [(_appends, {"losses": []}), (_averages, {"part": 3.0}), (_sums_up, {"part": 0.5}), (_returns_number, {})],
)
def test_numbers_that_nothing_else_is_made_of(body: Callable[..., Any], kept: dict[str, Any]) -> None:
    """They are returned, appended or kept: the check compares them, as it does tensors in lists."""

    def make() -> Rig:
        return keeping_rig(body, CALLS, **{name: list(v) if isinstance(v, list) else v for name, v in kept.items()})

    step = assert_same_as_eager(make)
    assert counts(step) == (WARMUP, 1, 1, CALLS - BEFORE_REPLAY + 1), step.report()


@pytest.mark.parametrize(
    ("body", "kept"), [(_draws, {}), (_mixes, {}), (_counts, {"counted": 0}), (_turns_by_chance, {})]
)
def test_numbers_of_operators_and_branches(body: Callable[..., Any], kept: dict[str, Any]) -> None:
    """An eager step gives the same operators the number, and programs are kept by the way that is taken."""

    def make() -> Rig:
        random.seed(5)
        np.random.seed(5)
        return keeping_rig(body, CALLS, **kept)

    step = assert_same_as_eager(make)
    assert counts(step) == (WARMUP, 1, 1, CALLS - BEFORE_REPLAY + 1), step.report()


@pytest.mark.parametrize(("comings", "captured"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_one_of_several_ways_is_captured_when_it_comes_for_the_third_time(comings: int, captured: int) -> None:
    """It is traced, an eager step follows, then the capture; the way of all other calls needs none in between."""
    last = BEFORE_REPLAY + 2 * comings
    rare = range(BEFORE_REPLAY, last, 2)

    def make() -> Rig:
        rig = build(partial(training_rig, "mlp", "adamw", sizes=[8] * (last + 4)))
        given = rig.step

        def step(x: Tensor, y: Tensor, number: int) -> Any:
            return given(x, y) * 2 if number > 100 else given(x, y)

        calls = [(*args, 100 + index if index in rare else index) for index, args in enumerate(rig.calls)]
        return Rig(step, rig.owners, calls)

    step = assert_same_as_eager(make)
    assert (step.stats.traced, step.stats.captured) == (2, captured), step.report()


def bounded_rig(last: int) -> Rig:
    """A step that compares a draw with a bound that no guard sees, which is raised after the first ``last`` calls."""
    hidden = Box(2)

    def body(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
        return loss if random.random() < hidden.item else loss * 2

    def after(model: Any, index: int) -> None:
        hidden.item += index < last

    random.seed(5)
    return keeping_rig(body, CALLS, after)


def test_a_bound_that_is_another_one_in_the_capture() -> None:
    """The question is another one, though its answer is the same: the step is traced anew."""
    step = assert_same_as_eager(partial(bounded_rig, ONCE))
    assert (step.stats.traced, step.stats.captured) == (3, 1), step.report()
    assert any("the captured step branches on" in event for event in step.stats.events), step.stats.events


def catching_rig(compares: bool) -> Rig:
    """A step that catches what a draw or a comparison raises; in the call of the capture, it makes another one."""
    is_other = Box(False)

    def body(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
        try:
            if compares:
                factor = 2.0 if random.random() < 2 + is_other.item else 1.0
            else:
                factor = random.uniform(0, 2) if is_other.item else random.random()
        except Exception:  # noqa: BLE001 - as people write it
            factor = 5.0
        return loss * factor

    def after(model: Any, index: int) -> None:
        is_other.item = index == ONCE - 1

    random.seed(5)
    return keeping_rig(body, CALLS, after)


@pytest.mark.parametrize(("compares", "text"), [(True, "branches on"), (False, "draws draw 1, uniform")])
def test_code_of_the_step_may_catch_what_ends_a_capture(compares: bool, text: str) -> None:
    """It is raised again when the step is over, and the call is made eagerly."""
    step = assert_same_as_eager(partial(catching_rig, compares))
    assert any(f"the captured step {text}" in event for event in step.stats.events), step.stats.events
    assert (step.stats.traced, step.stats.captured) == (3, 1), step.report()


@pytest.mark.parametrize("last", [WARMUP, ONCE, FIRST])
def test_state_that_is_gone_where_other_gradients_are_there(last: int) -> None:
    """The plan was made with gradients, and serves calls without them: it is given up all the same."""

    def make() -> Rig:
        rig = training_rig("mlp", "adamw", sizes=[8] * CALLS)

        def after(index: int) -> None:
            if index == last:
                rig.owners["optimizer"].state.clear()
                rig.owners["optimizer"].zero_grad()

        return replace(rig, after=after)

    step = assert_same_as_eager(make)
    assert step.stats.replayed >= CALLS - BEFORE_REPLAY - 4, step.report()


def hidden_rig(last: int) -> Rig:
    """A step that computes a number with one that no guard sees, which is raised after the first ``last`` calls."""
    hidden = Box(2)

    def body(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
        return loss + 0 * scores.mean().mul(random.random() + hidden.item)

    def after(model: Any, index: int) -> None:
        hidden.item += index < last

    random.seed(5)
    return keeping_rig(body, CALLS, after)


@pytest.mark.parametrize("last", [ONCE, FIRST])
def test_a_number_that_is_computed_of_another_one_in_the_capture_or_the_first_check(last: int) -> None:
    """Also where the same comes of it: the step is traced anew."""
    step = assert_same_as_eager(partial(hidden_rig, last))
    assert step.stats.replayed > 0
    assert "traced anew: " in step.report()


def test_a_number_that_is_computed_of_what_changes_in_each_call() -> None:
    assert_refused(partial(hidden_rig, CALLS), CaptureError, "uses a number as a tensor at", done=FIRST + 2)


def test_a_step_that_only_reads() -> None:
    step = graph_step(lambda x: x.item(), backend="tape")
    assert [step(torch.tensor(float(number))) for number in range(12)] == list(range(12))
    assert counts(step) == (WARMUP, 1, 1, 12 - BEFORE_REPLAY + 1), step.report()


def turning_rig(what: str, first: int) -> Rig:
    """A step that does something else with its numbers from the call ``first`` on, by a value that no guard sees."""
    hidden = Box(0)

    def body(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Any:
        is_other = hidden.item >= first
        if what == "appends":
            model.losses.extend([loss.detach()] * (1 + is_other))
        elif what == "keeps":
            model.part = loss.item() if is_other else 2 * loss.item()
        elif what == "keeps more" and is_other:
            model.other = loss.item()
        return loss.item() / (1 + is_other) if what == "returns" else loss.item()

    def count(model: Any, index: int) -> None:
        hidden.item += 1

    return keeping_rig(body, CALLS, count, losses=[], part=0.5, other=0.5)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("appends", r"appends another number of items in its capture than in its traces (model.losses)"),
        ("keeps", r"keeps a number that is computed in another way in its capture than in its traces (model.part)"),
        (
            "keeps more",
            "the step keeps a number that it reads from the device in a place where it kept none in its traces",
        ),
        ("returns", "result, which the step returns, is a number that is read from the device in its traces and"),
    ],
)
def test_numbers_that_are_others_in_the_capture(what: str, text: str) -> None:
    """By a value that no guard sees, for good: the step is traced anew, and that call leaves no stand-ins."""
    step = assert_same_as_eager(partial(turning_rig, what, ONCE))
    assert any(text in event for event in step.stats.events), step.stats.events
    assert (step.stats.traced, step.stats.captured) == (3, 1), step.report()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("appends", r"appends another number of items in its capture"),
        ("keeps", r"keeps a number that is computed in another way"),
    ],
)
def test_numbers_that_are_others_in_the_capture_after_two_traces(what: str, text: str) -> None:
    """Nothing is left of the call, and the step is refused."""
    make = partial(turning_rig, what, FIRST)
    assert_refused(make, HostEffectError, text, "Pass the deciding value as an argument", done=FIRST, verify="off")


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (_gives_other_memory, {"kept": torch.zeros(())}),
        (_appends_more, {"losses": []}),
        (_reads, {}),
        (_divides_by_a_draw, {}),
        (_multiplies_in_half_precision, {}),
        (_draws_from_its_own, {"source": torch.Generator().manual_seed(3)}),
        (partial(_works_with_unowned, Box(torch.tensor(2.0))), {}),
    ],
)
def test_what_only_two_traces_tell(body: Callable[..., Any], kept: dict[str, Any]) -> None:
    """The step leaves more changed than integers, works with more than is owned, or reads or draws on the host."""

    def make() -> Rig:
        random.seed(5)
        fresh = {name: value.clone() if isinstance(value, Tensor) else value for name, value in kept.items()}
        fresh = {name: list(value) if isinstance(value, list) else value for name, value in fresh.items()}
        if "source" in fresh:
            fresh["source"] = torch.Generator().manual_seed(3)
        return keeping_rig(body, CALLS, **fresh)

    step = assert_same_as_eager(make)
    assert counts(step) == (WARMUP, 2, 1, CALLS - BEFORE_REPLAY), step.report()


def _unseen(make: Callable[[Tensor, int], Any]) -> Callable[[], Rig]:
    """Steps that return what ``make`` makes of the loss and of a number that no guard sees, raised after each call."""

    def rig() -> Rig:
        number = Box(5)

        def after(model: Any, index: int) -> None:
            number.item += 1

        return keeping_rig(lambda model, loss, scores, y: make(loss, number.item), CALLS, after)

    return rig


def _marked(loss: Tensor, number: int) -> Tensor:
    vars(loss)["tag"] = number
    return loss


@pytest.mark.parametrize(
    "make",
    [
        lambda loss, number: (loss, number),
        lambda loss, number: {f"loss{number}": loss},
        lambda loss, number: loss if number % 2 else (loss, loss),
        lambda loss, number: loss if number % 2 else None,
        _marked,
    ],
)
def test_a_result_that_is_another_one_in_the_capture(make: Callable[[Tensor, int], Any]) -> None:
    """The recorded call returns its own, and the step is traced twice: the check does not see attributes of tensors."""

    def told(call: Callable[..., Any], rig: Rig) -> list[str]:
        found = []
        for index, args in enumerate(rig.calls):
            result = call(*args)
            marks = vars(result) if isinstance(result, Tensor) else {}
            plain = tree_map(lambda leaf: leaf.item() if isinstance(leaf, Tensor) else leaf, result)
            found.append(f"{plain} {marks}")
            rig.after(index)
        return found

    rig = build(_unseen(make))
    expected = told(rig.step, rig)
    rig = build(_unseen(make))
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match="the step returns"):
        found = told(step, rig)
    assert found == expected
    assert step.stats.replayed == 0


def test_a_diagnosis_is_made_of_two_traces() -> None:
    """A bound that is another one in each call, and that nothing comes to: no check would find it."""
    rig, bound = build(partial(training_rig, "mlp", "adamw", sizes=[8] * CALLS)), Box(itertools.count(1000))

    def step(*args: Any) -> Tensor:
        return rig.step(*args).clamp(max=next(bound.item))

    (blocker,) = check_step(step, rig.calls, owners=rig.owners).blockers
    assert "gets max=10" in blocker


def test_other_weights_wait_for_the_check() -> None:
    """``replay`` checks nothing itself: what was traced once is called first, and refused as after two traces."""
    model, count = nn.Linear(4, 4).eval(), Box(itertools.count(1))
    options: dict[str, Any] = {"owners": {"model": model}, "copy_roles": ("input", "param"), "backend": "tape"}
    plain = graphed(lambda x: model(x) * 2, **options)
    fast = graphed(lambda x: model(x) * next(count.item), **options)
    x = torch.randn(2, 4)
    with torch.inference_mode():
        assert torch.equal(plain.replay((x,)), model(x) * 2)
        assert (plain.stats.traced, plain.stats.verified, plain.stats.replayed) == (1, 1, 2)
        with pytest.raises(HostScalarError, match=r"gets other=\d on one step and other=\d on the next"):
            fast.replay((x,))
    for each in (plain, fast):
        each.close()


@pytest.mark.parametrize("verify", ["off", 2])
def test_a_first_replay_that_is_not_checked(verify: Any) -> None:
    """Then two traces are made in any case."""
    step = assert_same_as_eager(partial(training_rig, "mlp", "adamw", sizes=[8] * CALLS), verify=verify)
    assert counts(step) == (WARMUP, 2, 1, CALLS - BEFORE_REPLAY)


@pytest.mark.parametrize("changes_at", [WARMUP + 1, WARMUP + 2])
def test_a_number_that_changes_before_the_capture_or_the_replay(changes_at: int) -> None:
    """The first trace becomes the first of two where the capture finds another number; later that is a recapture."""

    def put(model: Any, index: int) -> None:
        if index + 1 == changes_at:
            model.scale = 3.0

    def scaled(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
        return loss * model.scale

    step = assert_same_as_eager(partial(keeping_rig, scaled, CALLS, put, scale=2.0))
    assert step.stats.replayed > CALLS - 12, step.report()
    assert (step.stats.captured == 1) is (changes_at == WARMUP + 1)
    assert step.stats.traced > 1


def decaying(begin: int) -> Rig:
    """A loss weight on a schedule that no guard sees; it decays from call ``begin`` on."""
    weight = Box(1.0)

    def each(model: Any, optimizer: Any, index: int) -> None:
        weight.item = 0.5 ** max(0, index + 2 - begin)

    return changing_rig(stay, lambda model, x, y: loss_of(model, x, y) * weight.item, each=each)


def test_two_traces_tell_what_the_first_replay_has_shown() -> None:
    """A number that changes all the time: the refusal is the one that two traces lead to, and nothing is lost."""
    rig = build(partial(decaying, FIRST))
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match=r"aten\.mul\.Tensor at .* gets other=0\.\d+ on one step"):
        found = drive(rig, step)
    rig = build(partial(decaying, FIRST))
    assert_same_runs(drive(rig, rig.step), found)
    assert (step.stats.traced, step.stats.captured, step.stats.replayed) == (3, 1, 0)
    assert "traced anew: aten.mul.Tensor at" in step.report()


def test_two_traces_refuse_what_the_first_replay_has_shown() -> None:
    rig = build(partial(decaying, FIRST))
    step = managed(rig)
    with pytest.raises(HostScalarError, match=r"gets other=0\.\d+ on one step and other=0\.\d+ on the next"):
        drive(rig, step)


def turning(begin: int) -> Rig:
    """A branch on the number of the step, which an iterator keeps."""
    count = Box(itertools.count())

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        value = loss_of(model, x, y)
        return value * 3 if next(count.item) >= begin else value  # culprit

    return changing_rig(stay, loss)


def test_a_branch_that_turns_before_the_first_replay() -> None:
    """Two traces are alike again. As nothing tells what turned it, it may turn once more: the step is refused."""
    make = partial(turning, FIRST)
    rig = build(make)
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match=rf"aten\.mul\.Tensor at {line_of(turning)}.* on the next: the step's control"):
        found = drive(rig, step)
    rig = build(make)
    assert_same_runs(drive(rig, rig.step), found)
    assert (step.stats.traced, step.stats.captured, step.stats.replayed) == (3, 1, 0), step.report()


def limited(begin: int) -> Rig:
    """A bound that nothing reaches until late, in a place that no guard sees."""
    limit = Box(100.0)

    def each(model: Any, optimizer: Any, index: int) -> None:
        limit.item = 100.0 - index if index < begin + 6 else 1e-3

    return changing_rig(stay, lambda model, x, y: loss_of(model, x, y).clamp(max=limit.item), each=each)


def test_a_number_that_makes_no_difference_yet() -> None:
    """What a replay leaves is the eager step's, but the operator gets another number there."""
    rig = build(partial(limited, FIRST))
    step = managed(rig)
    with pytest.raises(HostScalarError, match=r"aten\.clamp\.default at .* gets max=\d+\.0 on one step"):
        drive(rig, step)


def _sums_up(counts: Any, model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    return loss + loss * 0.0 if next(counts.item) >= FIRST else loss


def test_an_operator_more_that_makes_no_difference() -> None:
    """Two traces with as many each are believed: nothing has gone wrong."""
    step = assert_same_as_eager(lambda: keeping_rig(partial(_sums_up, Box(itertools.count())), CALLS))
    assert (step.stats.traced, step.stats.captured) == (3, 2), step.report()
    assert "traced anew: one step runs" in step.report()


def test_a_later_replay_that_is_wrong_is_no_matter_of_traces() -> None:
    """Replays before it have not been compared: what they did cannot be made good."""
    rig = build(partial(decaying, FIRST + 2))
    step = managed(rig)
    with pytest.warns(UserWarning, match="replay 4 of .* replays since the previous check may also have differed"):
        drive(rig, step)
    assert (step.stats.traced, step.stats.captured, step.stats.replayed) == (1, 1, 3)


def test_a_first_replay_that_nothing_can_be_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for the copies: an eager step, and from then on as with two traces and no check."""
    monkeypatch.setattr(replays, "find_room", lambda *_, **__: (None, "no room"))
    step = assert_same_as_eager(partial(training_rig, "mlp", "adamw", sizes=[8] * CALLS))
    assert counts(step) == (WARMUP + 1, 1 + 2, 2, CALLS - WARMUP - 6), step.report()
    assert "traced anew: the first replay after a single trace could not be checked (no room)" in step.report()
    assert "not checked against eager: no room" in step.report()


def test_memory_that_runs_out_in_the_first_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager step that was run stands, though nothing was found out."""
    failed = []
    plain = replays.Check.compare

    def compare(check: Any, *args: Any) -> Any:
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("planted")
        return plain(check, *args)

    monkeypatch.setattr(replays.Check, "compare", compare)
    step = assert_same_as_eager(partial(training_rig, "mlp", "adamw", sizes=[8] * CALLS))
    assert (step.stats.traced, step.stats.captured) == (3, 2), step.report()
    assert "could not be checked (planted)" in step.report()


def test_a_capture_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the capture alone sees may be what a second trace tells."""
    plain, refused = TapeBackend.record, []

    def record(backend: Any, *args: Any, **options: Any) -> Any:
        if not refused:
            refused.append(1)
            raise HostSyncError("planted")
        return plain(backend, *args, **options)

    monkeypatch.setattr(TapeBackend, "record", record)
    step = assert_same_as_eager(partial(training_rig, "mlp", "adamw", sizes=[8] * CALLS))
    assert counts(step) == (WARMUP + 1, 3, 1, CALLS - WARMUP - 5), step.report()
    assert "traced anew: planted" in step.report()


def test_a_capture_that_is_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*_: Any, **__: Any) -> Any:
        raise HostSyncError("planted")

    monkeypatch.setattr(TapeBackend, "record", record)
    with pytest.raises(HostSyncError, match="planted"):
        assert_same_as_eager(partial(training_rig, "mlp", "adamw", sizes=[8] * CALLS))


def test_inference_is_traced_once() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.BatchNorm1d(3)).eval()
    fast = graphed(model, backend="tape")
    with torch.no_grad():
        for x in torch.randn(6, 2, 4):
            assert torch.equal(fast(x), model(x))
    assert (fast.stats.traced, fast.stats.captured) == (1, 1)
    fast.close()


def test_only_an_unproven_program_is_taken_back() -> None:
    """Once a replay was compared, a program of one trace is one like others."""
    rig = build(partial(updating_rig, lambda model, x, loss: loss * model.scale, attributes(scale=2.0)))
    step = managed(rig)
    unproven = []
    for args in rig.calls[: FIRST + 1]:
        step(*args)
        found = step.machine.find_program(args)
        assert found is None or isinstance(found[0], Program)
        unproven.append(found is not None and found[0].needs_first_check)
    assert unproven == [False] * (WARMUP + 1) + [True, False]


def raising_rig(turned: Any) -> Rig:
    """Inverts what the calls bring, until ``turned`` says otherwise."""
    model = nn.Linear(2, 2)

    @torch.no_grad()
    def step(x: Tensor) -> Tensor:
        return model(x) if turned.item else model(torch.linalg.inv(x))

    bad = torch.zeros(2, 2)
    return Rig(step, {"model": model}, [(torch.eye(2) + index,) for index in range(12)] + [(bad,)])


@pytest.mark.parametrize("verify", [1, "off"])
def test_a_replay_that_raises_where_the_eager_step_does_not(verify: Any) -> None:
    """A check names it, and has what the eager step returns."""
    turned = Box(False)
    rig = build(partial(raising_rig, turned))
    step = managed(rig, verify=verify, on_failure="eager")
    for args in rig.calls[:-1]:
        step(*args)
    turned.item = True
    (bad,) = rig.calls[-1]
    if verify == "off":
        with pytest.raises(torch.linalg.LinAlgError):
            step(bad)
    else:
        with pytest.warns(UserWarning, match="result: a replay raises _?LinAlgError .*, and the eager step does not"):
            found = step(bad)
        assert torch.equal(found, rig.step(bad))


def _doubles(model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    model.seen["calls"] *= 2
    return loss


def test_two_traces_tell_of_an_integer_that_is_raised_by_more_each_time() -> None:
    """Its operators are the same ones, and the replay is wrong: the refusal names what the step does in Python."""
    rig = build(partial(keeping_rig, _doubles, CALLS, seen={"calls": 1}))
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match=r"the step changes model\.seen\.calls in Python .*pass allow="):
        found = drive(rig, step)
    rig = build(partial(keeping_rig, _doubles, CALLS, seen={"calls": 1}))
    assert_same_runs(drive(rig, rig.step), found)
    assert (step.stats.traced, step.stats.captured, step.stats.replayed) == (3, 1, 0), step.report()


def _phased(count: Any, model: Any, loss: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    return loss * (2.0 if next(count.item) % 2 else 1.0)


def test_two_traces_tell_of_a_number_that_is_the_same_in_the_trace_and_in_the_check() -> None:
    """It was another one in the capture between them."""
    rig = build(lambda: keeping_rig(partial(_phased, Box(itertools.count())), CALLS))
    step = managed(rig)
    with pytest.raises(HostScalarError, match=r"gets other=[12]\.0 on one step and other=[12]\.0 on the next"):
        drive(rig, step)


def _stepping(turned: Box) -> Callable[[], Rig]:
    """Calls of two shapes, and a factor that no guard sees."""

    def make() -> Rig:
        turned.item = 1.0
        model = nn.Linear(2, 2)
        step = torch.no_grad()(lambda x: model(x) * turned.item)
        calls = [(torch.full((size, 2), float(index)),) for size in (4, 8) for index in range(CALLS)]
        return Rig(step, {"model": model}, calls)

    return make


def test_a_doubt_is_told_once_and_of_its_own_calls() -> None:
    """The factor turns once before the first replay: a caller that goes on has replays, and so have further shapes."""
    turned = Box(1.0)
    rig = build(_stepping(turned))
    step = managed(rig)
    raised = []
    for index, args in enumerate(rig.calls):
        turned.item = 1.0 if index < FIRST else 3.0
        try:
            found = step(*args)
        except HostScalarError as error:
            raised.append(error)
            found = step(*args)
        assert torch.equal(found, rig.step(*args))
    assert len(raised) == 1
    assert step.stats.captured == 3, step.report()
    assert step.stats.replayed > 2 * (CALLS - 12)


def test_a_capture_that_the_policy_refuses() -> None:
    """Another trace would not change that: it is refused at once."""

    def make() -> Rig:
        return training_rig("mlp", "adamw", sizes=[8] * CALLS)

    rig = build(make)
    step = managed(rig, mode="inference")
    with pytest.raises(UncoveredRoleError, match="the inference policy has static_roles"):
        drive(rig, step)
    assert counts(step)[:3] == (WARMUP, 1, 0)
