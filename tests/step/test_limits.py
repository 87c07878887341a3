"""What a long run may not pile up: programs, keys, and texts in the statistics."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from graphplan import SkipReason, graph_step
from graphplan.report.stats import OTHERS, TEXTS, Stats
from graphplan.step.entries import Entry
from graphplan.step.programs import Programs
from graphplan.trace.records import Trace
from tests.models import MODELS, Mlp, batches
from tests.twins import BEFORE_REPLAY, FURTHER, Rig, assert_equals_eager, assert_same_runs, build, drive, managed


def rig_of(sizes: list[int], *rest: list[Any]) -> Rig:
    """A training step on batches of these sizes; the values in ``rest`` are fed beside them and scale the loss."""
    model = Mlp()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)

    def train_step(x: Tensor, y: Tensor, *factors: float) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * sum(factors, 1.0)
        loss.backward()
        optimizer.step()
        return loss

    calls = zip(batches(MODELS["mlp"][1], sizes), *rest, strict=True)
    owners = {"model": model, "optimizer": optimizer}
    return Rig(train_step, owners, [(*batch, *factors) for batch, *factors in calls])


def test_the_program_that_was_used_least_recently_goes() -> None:
    """The usual size keeps its program while rare ones take each other's place."""
    usual, rare = [8] * BEFORE_REPLAY, (5, 6, 7)
    sizes = [*usual, *(size for other in rare for _ in range(FURTHER + 1) for size in (other, 8))]
    step = assert_equals_eager(lambda: rig_of(sizes), captured=4, further=3, max_graphs=2)
    assert step.stats.recaptured == 0
    assert step.stats.events == {"evicted: more programs than max_graphs": 2}
    assert "event 2x: evicted" in step.report()


@pytest.mark.frugal
def test_ways_wait_for_what_they_cost() -> None:
    """A step that branches four times by chance has 16 ways for each shape. Each takes traces and a capture, which
    replays have to pay for.
    """

    def make() -> Rig:
        rig = rig_of([8, 6] * 100)
        model = rig.owners["model"]
        given = rig.step

        def chancy(x: Tensor, y: Tensor) -> Any:
            sign = 1
            for _ in range(4):
                sign = 2 * sign if random.random() < 0.5 else sign + 1
            return given(x * sign, y)

        return Rig(chancy, {"model": model, **rig.owners}, rig.calls)

    stats = drive_by_chance(make)
    assert 8 < stats.traced <= 32 + stats.replayed // 16 + 4
    assert stats.replayed >= 20


@pytest.mark.frugal
def test_rare_ways_are_not_traced() -> None:
    """Layers that are dropped now and then: calls are counted by the way that they take, known or not."""

    def make() -> Rig:
        rig = rig_of([8] * 300)
        given = rig.step

        def drops(x: Tensor, y: Tensor) -> Any:
            for factor in (2, 3, 5, 7, 11):
                x = x if random.random() < 0.06 else x * (1 + 1 / factor)
            return given(x, y)

        return Rig(drops, rig.owners, rig.calls)

    stats = drive_by_chance(make)
    assert stats.replayed >= 150
    assert 2 <= stats.captured <= stats.traced <= 6


def drive_by_chance(make: Callable[[], Rig]) -> Stats:
    """Run a step of many ways, which its draws choose, as eager does; some of the ways wait."""
    random.seed(1)
    rig = build(make)
    expected = drive(rig, rig.step)
    random.seed(1)
    rig = build(make)
    step = managed(rig, max_graphs=40)
    assert_same_runs(expected, drive(rig, step))
    assert "a new path through the step's code is traced once replays have saved the time" in step.report()
    return step.stats


def changing_rig(every: int) -> Rig:
    """A step whose code reads a text that is another one after ``every`` so many calls."""
    rig = rig_of([8] * 400)
    given, model = rig.step, rig.owners["model"]
    model.mode = "0"

    def reads(x: Tensor, y: Tensor) -> Any:
        return given(x if model.mode else -x, y)

    def after(index: int) -> None:
        model.mode = str((index + 1) // every)

    return Rig(reads, rig.owners, rig.calls, after=after)


@pytest.mark.filterwarnings("ignore:graphplan runs most calls eagerly:UserWarning")
@pytest.mark.parametrize(("spends", "most"), [(False, 20), (True, 4)])
def test_what_changes_again_and_again(monkeypatch: pytest.MonkeyPatch, spends: bool, most: int) -> None:
    """A step that has to be captured again waits until replays have saved what that takes, or each time four times as
    long. What tells whether they have takes the time, so it is put in its place.
    """
    monkeypatch.setattr(Programs, "has_spent", lambda *_: spends)
    rig = build(lambda: changing_rig(20))
    expected = drive(rig, rig.step)
    rig = build(lambda: changing_rig(20))
    step = managed(rig, on_failure="eager")
    assert_same_runs(expected, drive(rig, step))
    assert most // 2 < step.stats.captured <= most
    waits = "a step that was captured before is traced once replays have saved the time of earlier traces and captures"
    assert (waits in step.report()) is spends


@pytest.mark.filterwarnings("ignore:graphplan runs most calls eagerly:UserWarning")
def test_an_entry_is_expected_to_last_as_long_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its calls have come."""
    expected: list[tuple[float, float]] = []
    drop = Programs.drop

    def dropped(programs: Programs, entry: Entry, reason: str) -> None:
        drop(programs, entry, reason)
        expected.append((entry.lasted, programs._expected(entry, 10**6)))

    monkeypatch.setattr(Programs, "drop", dropped)
    rig = build(lambda: changing_rig(20))
    drive(rig, managed(rig, on_failure="eager"))
    # The first is captured in its fifth call.
    assert expected[0] == (15, 15)
    assert all(lasted <= 20 and found == lasted for lasted, found in expected)


def test_ways_of_which_none_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is traced after 64 calls, and another one after four times as many. The way that all calls take in the end is
    replayed. What tells whether ways pay takes the time, so it is put in its place.
    """
    monkeypatch.setattr(Programs, "has_spent", lambda *_: True)

    def make() -> Rig:
        rig = rig_of([8] * 520)
        given, model = rig.step, rig.owners["model"]
        model.is_calm = False

        def chancy(x: Tensor, y: Tensor) -> Any:
            sign = 1.0
            if not model.is_calm:
                for _ in range(24):
                    sign = sign + 0.5 if random.random() < 0.5 else sign - 0.25
            return given(x * sign, y)

        def after(index: int) -> None:
            model.is_calm = index >= 250

        return Rig(chancy, rig.owners, rig.calls, after=after)

    random.seed(1)
    rig = build(make)
    expected = drive(rig, rig.step)
    random.seed(1)
    rig = build(make)
    step = managed(rig, on_failure="eager")
    assert_same_runs(expected, drive(rig, step))
    assert (step.stats.traced, step.stats.captured) == (3, 1)
    assert step.stats.replayed > 150


def test_a_shape_that_does_not_come_again_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was traced once, and is nearer to a program than the other, which waits for it only for a while."""
    monkeypatch.setattr(Programs, "has_spent", lambda *_: True)
    rig = build(lambda: rig_of([8] * (BEFORE_REPLAY - 2) + [6] * 120))
    step = managed(rig)
    for args in rig.calls:
        step(*args)
    assert step.stats.captured == 1
    assert step.stats.replayed >= 30


def test_captures_that_do_not_pay_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that the step looks at grows now and then, as that of a player's rewards after each game: it is said."""
    monkeypatch.setattr(Programs, "has_spent", lambda *_: True)
    rig = build(lambda: rig_of([8] * 120))
    given, model = rig.step, rig.owners["model"]
    model.rewards = [1.0]
    step = graph_step(lambda x, y: given(x * len(model.rewards[-99:]), y), owners=rig.owners, backend="tape")
    text = (
        r"runs most calls eagerly from now on: the step was captured again 2 times .*rewards had the length \d and "
        r"has the length \d \(if the code needs only its last item, keep that in a separate attribute\)"
    )

    def play() -> None:
        for number, args in enumerate(rig.calls):
            if number % 8 == 7:
                model.rewards.append(1.0)
            step(*args)

    with pytest.warns(UserWarning, match=text) as caught:
        play()
    assert len(caught) == 1
    assert 4 <= step.stats.captured <= 8
    assert (
        "a step that was captured before is traced once replays have saved the time of earlier traces and"
    ) in step.report()


@pytest.mark.parametrize("turns", ["shape", "way"])
def test_what_comes_for_good_waits_for_a_while_alone(turns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program before is not replayed any more, and cannot save what it took."""
    monkeypatch.setattr(Programs, "has_spent", lambda *_: True)
    before, after = [8] * (BEFORE_REPLAY + 5), [6 if turns == "shape" else 8] * 120
    rig = build(lambda: rig_of([*before, *after]))
    given, model = rig.step, rig.owners["model"]
    model.late = False
    step = graph_step(lambda x, y: given(x * 2 if model.late else x, y), owners=rig.owners, backend="tape")
    for number, args in enumerate(rig.calls):
        model.late = turns == "way" and number >= len(before)
        step(*args)
    assert step.stats.captured == 2
    assert step.stats.replayed >= 40


def entries_of() -> int:
    """How many keys all steps remember."""
    return sum(type(thing) is Entry for thing in gc.get_objects())


def test_keys_that_never_come_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number in the feed that is another one each time makes a key for every call, and none of them a program."""
    # It is not followed.
    monkeypatch.setattr("graphplan.step.given_numbers._DIFFERENT", 100)
    rig = build(lambda: rig_of([8] * 12, [float(index) for index in range(12)]))
    gc.collect()
    known = entries_of()
    step = managed(rig, max_graphs=1)
    counts = []
    for args in rig.calls:
        step(*args)
        counts.append(entries_of() - known)
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]
    assert step.stats.calls == 12


def test_new_values_of_a_hyper_parameter_for_ever() -> None:
    """Each value has a program until others need the room, and the latest ones are found again."""
    rig = build(lambda: rig_of([8] * 60))
    group = rig.owners["optimizer"].param_groups[0]
    step = managed(rig, max_graphs=1, warmup_steps=1, verify="off")
    gc.collect()
    known = entries_of()
    for index, args in enumerate(rig.calls):
        group["weight_decay"] = index // 4 * 1e-3
        step(*args)
    assert step.stats.captured == 15
    gc.collect()
    assert entries_of() == known + 8
    texts = [text for text in step.stats.events if not text.startswith("another program: SGD")]
    assert texts == ["evicted: more programs than max_graphs"]


@pytest.mark.parametrize("table", ["events", "reasons"])
def test_texts_with_ever_new_numbers(table: str) -> None:
    """Statistics keep the first texts apart and count the rest together, also when two are merged."""
    first, second = Stats(), Stats()
    for stats in (first, second):
        for number in range(TEXTS + 9):
            stats.note(f"event {number}")
            stats.skip(SkipReason.SHAPE, f"reason {number}")
    assert len(getattr(first, table)) == TEXTS + 1
    assert getattr(first, table)[OTHERS] == 9
    first.merge(second)
    assert len(getattr(first, table)) == TEXTS + 1
    assert sum(getattr(first, table).values()) == 2 * (TEXTS + 9)


def test_a_step_that_is_invalidated_keeps_no_trace() -> None:
    """A trace holds what the step has made and been fed."""
    rig = build(lambda: rig_of([8] * 4))
    step = managed(rig)
    gc.collect()
    before = {id(thing) for thing in gc.get_objects() if isinstance(thing, Trace)}
    for call in rig.calls:
        step(*call)
    assert step.stats.traced == 1
    step.invalidate("to see what is left")
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, Trace) and id(thing) not in before]
