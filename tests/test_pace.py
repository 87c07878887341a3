"""Steps that wait with their program, since the device is busy all the time. The device is made up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from graphplan import SkipReason, idleness
from graphplan.idleness import Idleness
from graphplan.report import outcome
from graphplan.step import GraphedStep, Options, Peers, pace
from tests.devices import Device, pretend
from tests.test_peers import Ranks
from tests.twins import BEFORE_REPLAY, Rig, assert_same_runs, build, drive, managed
from tests.zoo import training_rig

CALLS = 28
SIZES = (6,) * CALLS


MakeDevice = Callable[..., Device]


@pytest.fixture
def make_device(monkeypatch: pytest.MonkeyPatch) -> MakeDevice:
    return partial(pretend, monkeypatch)


def rig_of(
    optimizer: str = "nesterov", fused: bool | None = True, foreach: bool | None = None, sizes: Sequence[int] = SIZES
) -> Rig:
    """With ``fused`` there is nothing to prepare the optimizer for."""

    def prepare(made: Optimizer) -> None:
        made.param_groups[0]["foreach"] = foreach

    return training_rig("mlp", optimizer, fused=fused, prepare=prepare, sizes=sizes)


def with_work_after(rig: Rig, work: Callable[[int], object]) -> Rig:
    """The same, with ``work(index)`` after the schedule's step, after each call."""
    schedule = rig.after
    return replace(rig, after=lambda index: (schedule(index), work(index)))


def paced(rig: Rig, peers: Peers | None = None, **options: Any) -> GraphedStep:
    chosen = Options(**{"backend": "tape", "paced": True, "min_speedup": 1.0} | options)
    return GraphedStep(rig.step, rig.owners, chosen, peers=peers)


def test_a_step_waits_while_the_device_is_behind(make_device: MakeDevice) -> None:
    """It is the user's own meanwhile; when the device turns out to wait for the host, the way to a program is taken."""
    device = make_device(*[0.0] * 3, 1.0)
    twin = build(rig_of)
    expected = drive(twin, twin.step)
    rig = build(rig_of)
    step = paced(rig)
    found = drive(rig, step)
    assert_same_runs(expected, found)
    # Three calls warm up, and the other stages come after one that does so again. Whether to go on waiting is decided
    # after four calls that did, and after nine.
    assert step.stats.skipped == {SkipReason.BUSY: 9}
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - 12 - 4)
    assert (device.watched, device.watching) == (6, 0)
    assert step.stats.reasons == {SkipReason.BUSY.value: 9}


def test_it_is_decided_again_now_and_then() -> None:
    turns = list(filter(pace._is_turn, range(4000)))
    assert turns == [4, 9, 19, 39, 79, 159, 319, 639, 1279, 2559, 3839]


def test_the_optimizer_is_the_users_own_while_a_step_waits(make_device: MakeDevice) -> None:
    """Once it is known to be long: it is left as it was, and prepared once more afterwards. That is in the report."""
    make_device(*[0.0] * 3, 1.0)
    rig = build(lambda: rig_of(fused=False))
    prepared: list[int] = []
    step = paced(rig)
    for call in rig.calls:
        step(*call)
        prepared.append(len(step._managed.rates._preparations))
        assert step.prepared == ["SGD.param_groups[0]['fused']: False -> True"]
    assert prepared == [1] * 7 + [0] * 5 + [1] * (CALLS - 12)
    assert step.stats.captured == 1


@pytest.mark.parametrize("every", [2, 5])
def test_steps_that_are_asked_to_be_eager_are_the_users_own_too(make_device: MakeDevice, every: int) -> None:
    """Stock kernels take no device learning rate."""
    device = make_device()
    rig = build(lambda: rig_of("adamw", fused=None, foreach=True))
    step = paced(rig, eager_if=every)
    prepared: list[int] = []

    def after(index: int) -> None:
        prepared.append(len(step._managed.rates._preparations))

    drive(with_work_after(rig, after), step)
    waits = prepared.index(0)
    assert prepared == [1] * waits + [0] * (CALLS - waits)
    assert step.stats.skipped[SkipReason.EAGER_IF] == -(-CALLS // every)
    assert step.stats.skipped[SkipReason.BUSY] + step.stats.skipped[SkipReason.EAGER_IF] == CALLS - 3
    assert device.watching == 0
    step.close()


def test_whoever_ends_the_wait_need_not_be_a_step_that_waits(make_device: MakeDevice) -> None:
    """The call after nine that waited is asked to be eager, and is prepared all the same."""
    make_device(*[0.0] * 3, 1.0)
    rig = build(lambda: rig_of(fused=False))
    step = paced(rig, eager_if=lambda x, y: len(prepared) == 12)
    prepared: list[int] = []
    for call in rig.calls:
        step(*call)
        prepared.append(len(step._managed.rates._preparations))
    assert prepared == [1] * 7 + [0] * 5 + [1] * (CALLS - 12)
    assert step.stats.skipped == {SkipReason.BUSY: 9, SkipReason.EAGER_IF: 1}


@pytest.mark.parametrize(
    ("idle", "waits"),
    [
        # 62 steps in 1,000.
        ((0.062,), CALLS - 3),
        ((0.0621,), 4),
        # A validation after one of the three says nothing of the two others.
        ((1.0, 0.0), CALLS - 3),
        ((0.0, 1.0, 0.0), CALLS - 3),
        ((0.0, 0.0, 1.0, 0.0), CALLS - 3),
        ((1.0, 0.0, 1.0, 0.0), 4),
    ],
)
def test_what_the_device_has_to_do(make_device: MakeDevice, idle: tuple[float, ...], waits: int) -> None:
    """Where it has often nothing to do, there is something to gain, and the way to a program is taken."""
    device = make_device(*idle)
    rig = build(rig_of)
    step = paced(rig)
    drive(rig, step)
    assert step.stats.skipped == {SkipReason.BUSY: waits}
    assert (step.stats.captured, step.stats.replayed) == ((1, CALLS - 3 - 4 - 4) if waits == 4 else (0, 0))
    assert device.watching == 0


def test_a_step_waits_once(make_device: MakeDevice) -> None:
    """A program that is dropped, or another one of the same step, does not wait any more."""
    device = make_device(1.0)
    rig = build(lambda: rig_of(sizes=(*SIZES, *(5,) * 8)))
    step = paced(rig)
    drive(rig, step)
    assert step.stats.skipped[SkipReason.BUSY] == 4
    assert step.stats.captured == 2
    assert device.watched == 3


def test_nobody_watches_a_step_that_is_closed(make_device: MakeDevice) -> None:
    device = make_device()
    rig = build(rig_of)
    step = paced(rig)
    for call in rig.calls[:5]:
        step(*call)
    assert device.watching == 1
    step.close()
    assert device.watching == 0


@pytest.mark.parametrize(
    "options",
    [{"min_speedup": 0}, {"paced": False}, {"fuse_optimizer": True}, {"prefetch": True}, {"compile": True}],
    ids=str,
)
def test_no_step_waits_where_there_is_something_to_gain(make_device: MakeDevice, options: dict[str, Any]) -> None:
    """Whoever asks for programs wants them in any case."""
    device = make_device()
    rig = build(rig_of)
    step = paced(rig, **options)
    drive(rig, step)
    assert step.stats.skipped == {}
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY)
    assert device.watched == 0


@pytest.mark.parametrize("waits", [4, 9, CALLS - 3])
def test_deterministic_runs_are_the_same_however_long_they_wait(make_device: MakeDevice, waits: int) -> None:
    """When a device has nothing to do is a matter of time: their kernels are those of replays from the beginning."""
    make_device(*{4: [1.0], 9: [0.0] * 3 + [1.0]}.get(waits, [0.0]))
    make = lambda: rig_of("adamw", fused=None, foreach=True)  # noqa: E731
    twin = build(make)
    expected = drive(twin, managed(twin))
    rig = build(make)
    step = paced(rig)
    torch.use_deterministic_algorithms(True)
    try:
        found = drive(rig, step)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_runs(expected, found)
    assert step.stats.skipped == {SkipReason.BUSY: waits}


@pytest.mark.parametrize("least", [None, 1e-6])
def test_the_cpu_is_its_own_host(least: float | None) -> None:
    """Nothing there could be busy meanwhile."""
    rig = build(rig_of)
    step = paced(rig, min_speedup=least)
    drive(rig, step)
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY)


def test_a_fit_that_waited_to_its_end_says_so(make_device: MakeDevice) -> None:
    make_device()
    rig = build(rig_of)
    step = paced(rig)
    drive(rig, step)
    said = outcome(step.stats, plans=0, backend="auto", warmup_steps=3)
    assert said == f"graphplan: no step was captured in {CALLS} steps: {SkipReason.BUSY.value}"


@pytest.mark.parametrize(("calls", "is_long"), [(7, False), (8, True)])
def test_a_short_fit_is_not_called_busy(make_device: MakeDevice, calls: int, is_long: bool) -> None:
    """The calls that everybody waits for say nothing of the device."""
    make_device()
    rig = build(lambda: rig_of(sizes=(6,) * calls))
    step = paced(rig)
    drive(rig, step)
    said = outcome(step.stats, plans=0, backend="auto", warmup_steps=3)
    assert said.startswith(f"graphplan: no step was captured in {calls} steps")
    assert (SkipReason.BUSY.value in said) is is_long
    assert ("the first capture comes with step 6" in said) is not is_long


@pytest.mark.parametrize(
    ("answers", "waits"),
    [
        ({"wait from 4": True, "wait after 8": True, "wait after 13": False}, 9),
        ({"wait from 4": True, "wait after 8": False}, 4),
        # Its batches have had another shape: it would wait from another call on, and round otherwise until then.
        ({"wait from 5": True}, 0),
    ],
)
def test_ranks_wait_together(
    make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch, answers: dict[str, bool], waits: int
) -> None:
    """This one's device is behind all the time, and it waits no longer than the other one."""
    make_device()
    monkeypatch.setattr(pace, "_PATIENCE", 0.02)
    ranks = Ranks(monkeypatch)
    for question, answer in answers.items():
        ranks.say(question, answer)
    for stage in ("trace 0", "trace 1", "ready"):
        ranks.store.set(f"graphplan/0/1/{stage}", "1")
    rig = build(rig_of)
    step = paced(rig, peers=ranks.rank_0)
    drive(rig, step)
    assert step.stats.skipped == ({SkipReason.BUSY: waits} if waits else {})
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - (3 + waits + 4 if waits else BEFORE_REPLAY))


class Stream:
    """Has nothing to do at every other look, until it ``fails``."""

    def __init__(self, fails: int = 10**9) -> None:
        self.looks = 0
        self.seen = threading.Event()
        self._fails = fails

    def query(self) -> bool:
        self.looks += 1
        if self.looks > self._fails:
            raise RuntimeError("the device is gone")
        if self.looks == 21:
            self.seen.set()
        return bool(self.looks % 2)


def test_looks_at_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is told to end, and then a last time. A second goes by between two looks."""
    monkeypatch.setattr(idleness, "perf_counter", count().__next__)
    stream = Stream()
    watch = Idleness([stream])
    assert stream.seen.wait(60)
    assert watch.end() == (stream.looks + 1) // 2 / stream.looks
    assert not watch._thread.is_alive()


@pytest.mark.parametrize(("passed", "share"), [((9.0, 1.0), 0.9), ((1.0, 9.0), 0.1), ((0.0, 0.0), 0.0)])
def test_each_look_stands_for_the_time_since_the_last(
    monkeypatch: pytest.MonkeyPatch, passed: tuple[float, float], share: float
) -> None:
    monkeypatch.setattr(idleness, "perf_counter", accumulate((0.0, *passed)).__next__)
    monkeypatch.setattr(idleness, "_PAUSE", 60.0)
    watch = Idleness([Stream()])
    watch._look()
    assert watch.end() == share


def test_nobody_looks_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor at a device that fails, which is for others to tell."""
    monkeypatch.setattr(idleness, "perf_counter", count().__next__)
    stream = Stream(fails=3)
    failing = Idleness([stream])
    failing._thread.join(60)
    assert failing.end() == 2 / 3
    assert stream.looks == 4
    monkeypatch.setattr(idleness, "_MOST", 5)
    stream = Stream()
    watch = Idleness([stream])
    watch._thread.join(60)
    assert watch.end() == 3 / 5
    assert stream.looks == 5


@pytest.mark.parametrize("looks", [(True, True), (True, False), (False, True)])
def test_all_streams_have_to_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch, looks: tuple[bool, bool]) -> None:
    monkeypatch.setattr(idleness, "_PAUSE", 60.0)
    watch = Idleness([SimpleNamespace(query=lambda look=look: look) for look in looks])
    assert watch.end() == float(all(looks))


def test_nobody_looks_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen afterwards stands for that time, too; whoever ends the watch meanwhile is not kept waiting."""
    monkeypatch.setattr(idleness, "perf_counter", count().__next__)
    monkeypatch.setattr(idleness, "_PAUSE", 60.0)
    stream = Stream()
    watch = Idleness([stream])
    with idleness.UNDISTURBED:
        watch._look()
        assert watch.end() == 0.0
    assert stream.looks == 0
    watch._look()
    assert stream.looks == 1


def test_a_process_without_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can look, and nobody waits."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    stream = Stream()
    assert Idleness([stream]).end() == 1.0
    assert stream.looks == 0
