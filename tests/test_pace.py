"""Steps that wait with their program, since the device is busy all the time. The device's clock is made up here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from graphplan import SkipReason
from graphplan.step import GraphedStep, Options, Peers, pace, peers
from tests.twins import BEFORE_REPLAY, Rig, assert_same_runs, build, drive
from tests.zoo import Mlp, float_batches

CALLS = 24
LONG = 1e6


class Clock:
    """Seconds of the host, of which each look takes one, and of the device, which takes ``busy`` for each step, and has
    nothing to do for ``gap`` before it.
    """

    def __init__(self, busy: float) -> None:
        self.now = 0.0
        self.busy = busy
        self.gap = 0.0
        self.is_done = True
        self.events = 0
        self._device = 0.0

    def look(self) -> float:
        self.now += 1.0
        return self.now

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(query=lambda: self.is_done)
        is_end = self.events % 2
        self.events += 1

        def record(stream: Any) -> None:
            self._device += self.busy if is_end else self.gap
            event.seconds = self._device

        event.record = record
        event.elapsed_time = lambda later: 1e3 * (later.seconds - event.seconds)
        return event


@pytest.fixture
def make_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Clock]:
    def make(busy: float) -> Clock:
        clock = Clock(busy)
        cuda = SimpleNamespace(Event=clock.event, current_stream=lambda device: None)
        monkeypatch.setattr(pace, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(pace, "perf_counter", clock.look)
        is_paced = Options.is_paced
        monkeypatch.setattr(Options, "is_paced", lambda options, device: is_paced(options, torch.device("cuda")))
        return clock

    return make


def rig_of(fused: bool = True) -> Rig:
    """With ``fused`` there is nothing to prepare the optimizer for."""
    model = Mlp()
    optimizer: Optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)))


def paced(rig: Rig, peers: Peers | None = None, **options: Any) -> GraphedStep:
    chosen = Options(**{"backend": "tape", "paced": True, "min_speedup": 1.0} | options)
    return GraphedStep(rig.step, rig.owners, chosen, peers=peers)


def test_a_step_waits_while_the_device_is_behind(make_clock: Callable[[float], Clock]) -> None:
    """It is the user's own meanwhile; when the way to a program is a small part of the run, it is taken."""
    clock = make_clock(LONG)
    twin = build(rig_of)
    expected = drive(twin, twin.step)
    rig = build(rig_of)
    step = paced(rig)

    def after(index: int) -> None:
        if index == 9:
            clock.now += LONG

    rig.after = after
    found = drive(rig, step)
    assert_same_runs(expected, found)
    # Three calls warm up, and the other stages come after one that does so again. Whether to go on waiting is asked
    # after four more, and then after eight.
    assert step.stats.skipped == {SkipReason.BUSY: 8}
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - 11 - 4)
    assert clock.events == 2 * (1 + 8)
    assert step.stats.reasons == {SkipReason.BUSY.value: 8}


def test_the_optimizer_is_the_users_own_while_a_step_waits(make_clock: Callable[[float], Clock]) -> None:
    """It is left as it was, and prepared once more afterwards. The report says what it is at the time."""
    clock = make_clock(LONG)
    rig = build(lambda: rig_of(fused=False))
    prepared: list[int] = []
    step = paced(rig)
    for index, call in enumerate(rig.calls):
        clock.now += LONG if index == 6 else 0
        step(*call)
        prepared.append(len(step._managed.rates._preparations))
        assert step.prepared == ["SGD.param_groups[0]['fused']: False -> True"] * prepared[-1]
    assert prepared == [1] * 3 + [0] * 4 + [1] * (CALLS - 7)
    assert step.stats.captured == 1


def test_a_device_that_is_not_even_done_is_behind(make_clock: Callable[[float], Clock]) -> None:
    clock = make_clock(0.0)
    clock.is_done = False
    rig = build(rig_of)
    step = paced(rig)
    drive(rig, step)
    assert step.stats.skipped == {SkipReason.BUSY: CALLS - 3}


@pytest.mark.parametrize(("busy", "gap"), [(0.5, 0.0), (LONG, 0.1)], ids=["within steps", "between steps"])
def test_a_device_that_turns_out_to_wait_for_the_host(
    make_clock: Callable[[float], Clock], busy: float, gap: float
) -> None:
    """Three times in a row: then there is something to gain, and the way to a program is taken."""
    clock = make_clock(LONG)
    rig = build(rig_of)
    step = paced(rig)

    def after(index: int) -> None:
        # Once does not count. The gap that lasts is one twentieth of what the host takes for a step.
        waits = index in (4, 7, 8, 9)
        clock.busy, clock.gap = (busy, gap) if waits else (LONG, 0.01)

    rig.after = after
    drive(rig, step)
    assert step.stats.skipped == {SkipReason.BUSY: 8}
    assert step.stats.captured == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"min_speedup": 0}, {"paced": False}, {"fuse_optimizer": True}, {"prefetch": True}, {"compile": True}],
    ids=str,
)
def test_no_step_waits_where_there_is_something_to_gain(
    make_clock: Callable[[float], Clock], options: dict[str, Any]
) -> None:
    """The host is what takes long; or whoever asks for programs wants them in any case."""
    clock = make_clock(LONG if options else 0.5)
    rig = build(rig_of)
    step = paced(rig, **options)
    drive(rig, step)
    assert step.stats.skipped == {}
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY)
    assert clock.events == (0 if options else 2)


@pytest.mark.parametrize("least", [None, 1e-6])
def test_the_cpu_is_its_own_host(least: float | None) -> None:
    """Nothing there could be busy meanwhile."""
    rig = build(rig_of)
    step = paced(rig, min_speedup=least)
    drive(rig, step)
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - BEFORE_REPLAY)


class Rank1:
    """Of two ranks the other one, whose answers are known beforehand; ``store`` is where the ranks meet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: bool) -> None:
        monkeypatch.setattr(peers, "_numbers", repeat(0))
        self.store = HashStore()
        for question, answer in answers.items():
            self.store.set(f"graphplan/0/1/{question.replace('_', ' ')}", str(int(answer)))

    @property
    def peers(self) -> Peers:
        """What rank 0 knows of it."""
        return Peers(self.store, 0, 2)


STAGES = {"trace_0": True, "trace_1": True, "ready": True}


@pytest.mark.parametrize(
    ("answers", "waits"),
    [
        ({"busy": True, "still_busy_4": True, "still_busy_8": False}, 8),
        ({"busy": True, "still_busy_4": False}, 4),
        ({"busy": False}, 0),
    ],
)
def test_ranks_wait_together(
    make_clock: Callable[[float], Clock], monkeypatch: pytest.MonkeyPatch, answers: dict[str, bool], waits: int
) -> None:
    """This one's device is behind all the time, and it waits no longer than the other one."""
    make_clock(LONG)
    rig = build(rig_of)
    step = paced(rig, peers=Rank1(monkeypatch, **answers, **STAGES).peers)
    drive(rig, step)
    assert step.stats.skipped == ({SkipReason.BUSY: waits} if waits else {})
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - (3 + waits + 4 if waits else BEFORE_REPLAY))


def test_a_rank_that_waits_for_nothing_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says no has decided it; who says yes takes it for a no if the others have refused, or say nothing."""
    rank = Rank1(monkeypatch)
    assert not rank.peers.all_say("busy", False)
    assert rank.store.get("graphplan/0/0/busy") == b"0"
    monkeypatch.setattr(peers, "_PATIENCE", 0.02)
    assert not rank.peers.all_say("busy", True)
    rank.store.set("graphplan/0/1", "its loss is read")
    assert not rank.peers.all_say("still busy 4", True)
