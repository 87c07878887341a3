"""Which replays are checked, what the statistics say about it, and what is no schedule."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from graphplan import GraphPlanError, OptionError, SkipReason, graph_step
from graphplan.step.peers import Peers
from graphplan.verify import schedule
from graphplan.verify.schedule import Timetable
from tests.models import Box, training_rig
from tests.twins import BEFORE_REPLAY, BEFORE_TWO, build, drive, managed

PERIOD, FREE, STEPS = 1000, schedule.FREE, schedule.STEPS


def checked_replays(replays: int, **options: Any) -> list[int]:
    """The replays, counted from 1, in which the step's Python ran too: it counts where graphplan cannot look."""
    ran = Box(0)

    def step(x: Tensor) -> Tensor:
        ran.item += 1
        return x * 2

    graphed = graph_step(step, backend="tape", **options)
    x, found = torch.ones(2), []
    for number in range(1 - BEFORE_REPLAY, replays + 1):
        before = ran.item
        graphed(x)
        if number > 0 and ran.item > before:
            found.append(number)
    assert graphed.stats.replayed == replays
    assert graphed.stats.verified == len(found) == graphed.stats.phase_counts["verify"]
    return found


@pytest.mark.parametrize("options", [{}, {"verify": "geometric"}], ids=str)
@pytest.mark.twice
def test_the_geometric_schedule(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two, and from a thousand on every thousandth, as long as checks may take any share of the time."""
    monkeypatch.setattr(schedule, "SHARE", math.inf)
    powers = [2**exponent for exponent in range(10)]
    assert checked_replays(2 * PERIOD + 10, **options) == [*powers, PERIOD, 2 * PERIOD]


@pytest.mark.twice
def test_checks_whose_time_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replay and the 64th are checked as ever; between them and after that no time is short enough."""
    monkeypatch.setattr(schedule, "FREE", 0.0)
    monkeypatch.setattr(schedule, "SHARE", 1e-12)
    assert checked_replays(PERIOD) == [1, 64]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = self.checked = 0.0

    def __call__(self) -> float:
        return self.now

    def checks(
        self, table: Timetable, step: float, check: float, until: int, eager: float = 1e-4, started: float = 0.0
    ) -> list[int]:
        """The replays that are checked, where a step, a check and an ``eager`` step take so many seconds, and traces
        and captures took ``started`` beyond their steps.
        """
        found, last, number = [], 0, 1
        while 0 < number <= until:
            self.now += step * (number - last - 1)
            table.begin(number)
            self.now += check
            self.checked += check
            found.append(number)
            spent = started + self.checked - len(found) * eager
            last, number = number, table.end(number, eager, self.checked, spent)
        return found


CPU = torch.device("cpu")
POWERS = [2**exponent for exponent in range(7)]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of other things leave checks all the time that they take."""
    monkeypatch.setattr(schedule, "FREE", FREE)
    monkeypatch.setattr(schedule, "STEPS", STEPS)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("check", "found"),
    [
        (0.02, POWERS),
        (0.039, [1, 2, 4, 8, 32, 64]),
        (0.06, [1, 4, 16, 64]),
        (0.09, [1, 8, 64]),
        (0.11, [1, 64]),
        (1000.0, [1, 64]),
    ],
)
def test_checks_of_the_first_replays_take_a_fifth_of_a_second(check: float, found: list[int]) -> None:
    """As many as fit in, spread over them; the first replay and the 64th are checked whatever that takes."""
    clock = Clock()
    assert clock.checks(Timetable(None, CPU, clock=clock), 1e-3, check, 64) == found


@pytest.mark.usefixtures("hurried")
def test_programs_of_one_step_share_that_time() -> None:
    """What those of the first have taken, those of the second do not have; its first replay is checked."""
    clock = Clock()
    for found in ([1, 4, 16, 64], [1, 64]):
        assert clock.checks(Timetable(None, CPU, clock=clock), 1e-3, 0.06, 64) == found


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("device", "started", "found"),
    [
        ("meta", 0.0, [1, 4, 16, 64]),
        ("meta", 3.0, [1, 4, 16, 64]),
        ("meta", 6.9, [1, 4, 16, 64]),
        ("meta", 9.0, [1, 8, 64]),
        ("meta", 12.0, [1, 64]),
        ("meta", 160.0, [1, 64]),
        ("cpu", 16.0, [1, 4, 16, 64]),
    ],
)
def test_on_a_device_the_start_takes_few_steps(device: str, started: float, found: list[int]) -> None:
    """Checks get what traces and captures have left of that, beyond the steps that they are themselves: here three."""
    clock, step = Clock(), 0.015
    table = Timetable(None, torch.device(device), clock=clock)
    assert clock.checks(table, 1e-3, 4 * step, 64, step, started * step) == found


@pytest.mark.usefixtures("hurried")
def test_where_no_step_was_timed_checks_have_a_fifth_of_a_second() -> None:
    """A step of inference has no eager ones before."""
    clock = Clock()
    assert clock.checks(Timetable(None, torch.device("meta"), clock=clock), 1e-3, 0.06, 64, math.inf) == [1, 4, 16, 64]


@pytest.mark.usefixtures("hurried")
def test_the_first_check_may_take_longer_than_others() -> None:
    """What it has taken beyond them is taken from what is left."""
    clock = Clock()
    table = Timetable(None, CPU, clock=clock)
    numbers, number = [1], 1
    for check in (0.09, 0.04, 0.04):
        table.begin(number)
        clock.now += check
        clock.checked += check
        number = table.end(number, taken=clock.checked)
        numbers.append(number)
    assert numbers == [1, 8, 32, 64]


@pytest.mark.parametrize(
    ("step", "check", "following"),
    [
        (1.0, 0.5, [128, 256, 512, 1000, 2000, 3000]),
        (1.0, 10.0, [1064, 2064, 3064]),
        (1.0, 10.25, [1089, 2114, 3139]),
        (1.0, 5.0, [564, 1064, 2000, 3000]),
        (0.0, 5.0, [128, 256, 512, 1000, 2000, 3000]),
    ],
)
def test_checks_take_one_part_in_a_hundred(step: float, check: float, following: list[int]) -> None:
    """The distance is never less than a hundred checks take in steps, and never less than the schedule's own."""
    clock = Clock()
    table = Timetable(None, CPU, clock=clock)
    assert clock.checks(table, step, check, 3200) == [*POWERS, *following]


def test_the_latest_check_counts() -> None:
    """One that took long is followed by a long distance, and one that did not by a short one."""
    clock = Clock()
    table = Timetable(None, CPU, clock=clock)
    assert clock.checks(table, 1.0, 0.1, 127)[-1] == 64
    for number, check, due in ((128, 40.0, 4128), (4128, 0.1, 5000)):
        clock.now += 63.0
        table.begin(number)
        clock.now += check
        assert table.end(number) == due if number == 128 else table.end(number) >= due


@pytest.mark.parametrize(("every", "found"), [(7, [7, 14, 21, 28]), (0, [])])
def test_other_schedules_ask_no_clock(every: int, found: list[int]) -> None:
    """What a check takes changes nothing for every n-th replay."""
    table = Timetable(every, CPU, clock=lambda: pytest.fail("the clock was read"))
    numbers, number = [], schedule.next_check(every, 0)
    while 0 < number <= 30:
        numbers.append(number)
        table.begin(number)
        number = table.end(number)
    assert numbers == found


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("first", "expected"),
    [((30.0, 0.01), [1, 64, 3064, 6064]), ((0.01, 30.0), [*POWERS, 128, 256, 512, 1000, 2000, 3000])],
)
def test_ranks_check_the_same_replays(first: tuple[float, float], expected: list[int]) -> None:
    """The first one to end a check says when the next one is, whatever the others' clocks say."""
    store, clocks = HashStore(), [Clock(), Clock()]
    asked: list[list[int]] = [[], []]

    def agree(rank: int, following: int) -> int:
        asked[rank].append(following)
        return peers[rank].settle(f"after check {len(asked[rank])}", following)

    peers = [Peers(store, rank, 2) for rank in range(2)]
    for one in peers[1:]:
        one._prefix = peers[0]._prefix
    tables = [Timetable(None, CPU, partial(agree, rank), clock=clocks[rank]) for rank in range(2)]
    found = [clocks[rank].checks(tables[rank], 1.0, first[rank], expected[-1]) for rank in range(2)]
    assert found[0] == found[1] == expected
    assert asked[1] != asked[0]


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.twice
def test_every_nth_replay(every: int) -> None:
    """A number counts replays, not calls."""
    assert checked_replays(30, verify=every) == list(range(every, 31, every))


@pytest.mark.parametrize("verify", ["off", 0, None, False])
def test_no_checks(verify: Any) -> None:
    """Four ways to say that nothing is checked."""
    assert checked_replays(30, verify=verify) == []


@pytest.mark.parametrize("verify", ["often", "", -1, 0.5, True, (), ["off"]])
def test_what_is_no_schedule(verify: Any) -> None:
    """Said when the step is made, with the value and what would do."""
    with pytest.raises(OptionError, match=r"verify is .*; expected 'geometric', 'off', or n >= 1") as caught:
        graph_step(lambda x: x, verify=verify)
    assert isinstance(caught.value, GraphPlanError)
    assert repr(verify) in str(caught.value)


@pytest.mark.twice
def test_programs_of_several_shapes_share_a_schedule() -> None:
    """Two batch sizes: replays 1, 2, 4, 8 and 16 of both together; programs that are captured anew start again."""
    rig = build(partial(training_rig, "mlp", "adamw", sizes=[5 if index % 2 else 8 for index in range(40)]))
    step = managed(rig)
    drive(rig, step)
    replayed = len(rig.calls) - BEFORE_TWO
    assert (step.stats.captured, step.stats.replayed, step.stats.verified) == (2, replayed, 5)
    step.invalidate("the test says so")
    drive(rig, step, 20)
    assert step.stats.verified > 5


def test_the_report_tells_of_checks() -> None:
    """How many, how much a check copies, how long they took; nothing where nothing is checked."""
    make = partial(training_rig, "mlp", "adamw", sizes=(8,) * 20)
    rig = build(make)
    step = managed(rig)
    drive(rig, step)
    stats = step.stats
    assert stats.verified == 4
    weights = sum(p.nbytes for p in rig.owners["model"].parameters())
    # Parameters, gradients and the optimizer's two moments at least.
    assert 4 * weights <= stats.bytes_verified < 5 * weights
    report = step.report()
    assert "4 replays checked against eager" in report
    assert "verify: 4 replays equal the eager step; each check copies 0.0 MiB of state" in report
    assert "verify" in report.split("phases:")[1]
    assert not stats.events and not stats.skipped[SkipReason.VERIFY]
    rig = build(make)
    silent = managed(rig, verify="off")
    drive(rig, silent)
    assert "verify" not in silent.report() and "checked" not in silent.report()


@pytest.mark.twice
def test_a_check_is_no_steady_replay() -> None:
    """The time of checked replays is counted apart, so that it does not hide what a replay costs."""
    rig = build(partial(training_rig, "mlp", "adamw", sizes=(8,) * 20))
    step = managed(rig)
    drive(rig, step)
    counts = step.stats.phase_counts
    assert (counts["verify"], counts["steady"], counts["first_replay"]) == (4, 10, 0)
    assert step.stats.replayed == 14
