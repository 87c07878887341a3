"""The speed gate: eager steps are timed first, replays afterwards, and what does not pay stands down to stock."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import AdamW, optimizer

from graphplan import GraphedStep, SkipReason, graph_step, graphed
from graphplan.backends import idleness
from graphplan.backends.idleness import Idleness
from graphplan.step.gate import SKIPPED, STEPS, Gate
from tests.clocks import Clock, set_clock
from tests.facts import assert_same, flatten
from tests.models import descent
from tests.step.test_peers import Ranks

TIMED = SKIPPED + STEPS


def laps(clock: Clock, *steps: float, **options: Any) -> list[float | None]:
    """What is found at the ends of such eager steps, after the first two."""
    gate = gate_of(clock, **options)
    gate.end_eager()
    found = [gate.eager if gate.end_eager() else None]
    for seconds in steps:
        clock.time += seconds
        found.append(gate.eager if gate.end_eager() else None)
    return found


def test_steps_are_timed_from_end_to_end_and_the_device_is_waited_for_twice() -> None:
    clock = Clock()
    assert laps(clock, 1, 2, 3, 2, 2) == [None] * 5 + [2.0]
    assert clock.rests == 2


def test_a_window_with_a_validation_in_it_is_timed_again() -> None:
    """But not for ever: a loop may do that every few steps."""
    found = laps(Clock(), 1, 1, 9, 1, 1, 1, 1, 1, 1, 1, 1)
    assert found == [None] * 11 + [1.0]
    assert laps(Clock(), 1, 1, 9, 1, 1, peers=object())[-1] == 13 / 5
    assert laps(Clock(), *[1, 1, 9, 1, 1, 1] * 3)[-2] == 13 / 5


def test_calls_are_timed_one_by_one() -> None:
    """Whatever comes between them; one that took long does not count for much."""
    clock, found = Clock(), []
    gate = gate_of(clock, loops=False)
    for seconds in (9.0, 9.0, 1.0, 1.0, 30.0, 2.0, 1.0):
        start = gate.begin()
        clock.time += seconds
        found.append(gate.end_eager(start))
        clock.time += 100
    assert (found, gate.eager) == ([False] * 6 + [True], 1.0)


def gate_of(clock: Clock, eager: float = 1.0, least: float = 1.0, **options: Any) -> Gate:
    gate = Gate(least, clock, **options)  # type: ignore[arg-type]
    gate.eager = eager
    return gate


def verdicts(gate: Gate, clock: Clock, *seconds: float) -> list[bool]:
    """Its decisions in steps that take so long, window by window."""
    found = []
    for each in seconds:
        for number in range(STEPS + 1):
            clock.time += each if number else 50.0
            found.append(gate.end_replay())
    return [verdict for verdict in found if verdict is not None]


@pytest.mark.parametrize(
    ("windows", "least", "expected"),
    [
        ([0.5], 1.0, [True]),
        ([0.99], 1.0, [True]),
        ([2.5], 1.0, [False]),
        ([1.1, 1.05], 1.0, []),
        ([1.1, 1.05, 1.01], 1.0, [False]),
        ([1.1, 0.9], 1.0, [True]),
        ([0.5], 1.5, [True]),
        ([0.7, 0.7, 0.7], 1.5, [False]),
    ],
    ids=str,
)
def test_what_pays(windows: list[float], least: float, expected: list[bool]) -> None:
    """Clearly slower in one window, or slower in each of three."""
    clock = Clock()
    gate = gate_of(clock, least=least)
    assert verdicts(gate, clock, *windows) == expected
    assert gate.measured["replayed"] == pytest.approx(min(windows))


def test_the_first_steps_are_not_timed() -> None:
    clock = Clock()
    gate = gate_of(clock)
    gate.eager = None
    found = []
    for seconds in (70.0, 20.0, *[1.0] * STEPS):
        clock.time += seconds
        found.append(gate.end_eager())
    assert found == [False] * (TIMED - 1) + [True]
    assert (gate.eager, clock.rests, clock.watched, clock.watching) == (1.0, 2, 1, 0)


def test_a_loop_that_accumulates_is_timed_for_whole_periods() -> None:
    """Three of its steps are short and one is long."""
    clock = Clock()
    gate = gate_of(clock, period=4)
    gate.eager = None
    for number in range(2 + 8):
        clock.time += 4.0 if number % 4 == 3 else 1.0
        assert gate.end_eager() is (number == 9)
    assert gate.eager == 7 / 4


@pytest.mark.parametrize(("replay", "pays"), [(0.5, True), (2.5, False)])
def test_replays_between_other_steps_are_timed_one_by_one(replay: float, pays: bool) -> None:
    """Where shapes take turns, of which one has a program."""
    clock, found = Clock(), []
    gate = gate_of(clock)
    for _ in range(STEPS):
        clock.time += 1.0
        gate.end_other()
        clock.time += replay
        found.append(gate.end_replay())
    assert found == [None] * (STEPS - 1) + [pays]
    assert gate.measured["replayed"] == replay
    assert clock.rests == 2 * STEPS


def test_other_steps_are_not_waited_for_without_end() -> None:
    clock = Clock()
    gate = gate_of(clock)
    for _ in range(1000):
        gate.end_other()
    assert clock.rests == 64


@pytest.mark.parametrize(
    "options", [{"period": 2}, {"peers": object()}, {"loops": False}], ids=["period", "peers", "calls"]
)
def test_gates_that_time_no_single_replays(options: dict[str, Any]) -> None:
    """Of steps that differ by turns, and where all ranks have to measure the same steps."""
    clock = Clock()
    gate_of(clock, **options).end_other()
    assert clock.rests == 0


@pytest.mark.parametrize(("other", "keeps"), [(True, False), (False, True), (None, True)])
def test_ranks_decide_alike(monkeypatch: pytest.MonkeyPatch, other: bool | None, keeps: bool) -> None:
    """After as many windows on each; where another rank does not ask, programs are kept."""
    monkeypatch.setattr("graphplan.step.gate._PATIENCE", 0.02)
    ranks = Ranks(monkeypatch)
    if other is not None:
        ranks.say("slower 0", other)
    clock = Clock()
    assert verdicts(gate_of(clock, peers=ranks.rank_0), clock, 9.0, 9.0, 9.0) == [keeps]


@pytest.mark.parametrize(("idle", "other", "busy"), [(0.0, True, True), (0.0, False, False), (1.0, True, False)])
def test_all_ranks_have_to_be_busy(monkeypatch: pytest.MonkeyPatch, idle: float, other: bool, busy: bool) -> None:
    ranks = Ranks(monkeypatch)
    ranks.say("busy 0", other)
    gate = gate_of(Clock(), peers=ranks.rank_0)
    gate.idle = idle
    assert gate.is_busy is busy


class Rig:
    """A training step that takes a second, or ``replay`` seconds once it is captured, and what it works on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replay: float = 0.1, idle: float = 1.0, **options: Any) -> None:
        self.clock = set_clock(monkeypatch, Clock(idle))
        self._replay = replay
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.optimizer = AdamW(self.model.parameters(), lr=0.01, fused=options.pop("fused", True))
        self.eager = descent(self.model, self.optimizer, lambda x: self.model(x).square().mean())
        owners = {"model": self.model, "optimizer": self.optimizer}
        self.step: GraphedStep = graph_step(
            self.eager, owners=owners, **{"backend": "tape", "min_speedup": 1.0, **options}
        )

    def drive(self, call: Callable[[Tensor], Any], number: int = 60, rows: Callable[[int], int] = lambda _: 5) -> Any:
        losses = []
        for index in range(number):
            self.clock.time += self._replay if self.step.stats.captured else 1.0
            torch.manual_seed(index)
            losses.append(call(torch.randn(rows(index), 6)).detach().clone())
        return flatten(losses=losses, model=self.model, optimizer=self.optimizer)


def hooks_of(model: nn.Module, its: Any) -> Any:
    """Hooks, profilers and flags that there are."""
    everywhere = [
        value for name, value in vars(modules).items() if name.startswith("_global") and name.endswith("hooks")
    ]
    everywhere += [value for name, value in vars(optimizer).items() if name.startswith("_global")]
    own = {name: len(value) for name, value in vars(its).items() if name.endswith("hooks")}
    flags = [{key: value for key, value in group.items() if key != "params"} for group in its.param_groups]
    return [
        *map(len, everywhere), own, sorted(vars(its)), flags, sys.getprofile(), sys.gettrace(),
        [sorted(vars(part)) for part in model.modules()],
        [(key, value.device, value.dtype) for state in its.state.values() for key, value in state.items()],
    ]  # fmt: skip


@pytest.mark.twice
def test_a_step_that_does_not_pay_stands_down_to_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers of eager steps; what was measured is in the report; nothing is left of graphplan's."""
    twin = Rig(monkeypatch, fused=True)
    expected = twin.drive(twin.eager)
    twin.step.close()
    before = hooks_of(twin.model, twin.optimizer)
    rig = Rig(monkeypatch, replay=5.0)
    assert_same(expected, rig.drive(rig.step))
    step = rig.step
    assert step.is_down and step.stats.calls == 60
    assert step.stats.replayed < 30
    assert step.stats.skipped == {SkipReason.SLOWER: 60 - TIMED - 6 - step.stats.replayed}
    assert "took 1000000 µs per step eagerly and 5000000 µs with replays" in step.report()
    assert "step 1000000 -> 5000000 µs" in step.report()
    assert hooks_of(rig.model, rig.optimizer) == before
    assert step.programs == []
    rests = rig.clock.rests
    rig.drive(step, 20)
    assert rig.clock.rests == rests


def test_an_optimizer_is_stock_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in the steps that are timed; while the step is managed it has the kernels of replays."""
    rig = Rig(monkeypatch, replay=5.0, fused=False)
    flags: list[bool] = []
    rig.optimizer.register_step_pre_hook(lambda its, *_: flags.append(bool(its.param_groups[0]["fused"])))
    before = hooks_of(rig.model, rig.optimizer)[:5]
    rig.drive(rig.step)
    assert rig.step.is_down
    assert flags[:TIMED] == [False] * TIMED
    assert flags[TIMED : TIMED + 5] == [True] * 5
    assert flags[-20:] == [False] * 20
    assert hooks_of(rig.model, rig.optimizer)[:5] == before


def test_repeatable_runs_keep_the_kernels_of_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a step stands down is a matter of time: one that does and one that does not come to the same."""
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for replay in (0.1, 5.0):
            rig = Rig(monkeypatch, replay=replay, fused=False)
            losses = rig.drive(rig.step)
            assert rig.step.is_down is (replay > 1)
            assert bool(rig.optimizer.param_groups[0]["fused"]) is (replay > 1)
            rig.step.close()
            runs.append({path: value for path, value in losses.items() if not path.startswith("optimizer")})
            assert not rig.optimizer.param_groups[0]["fused"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(*runs)


@pytest.mark.twice
def test_a_step_that_pays_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not timed any more."""
    rig = Rig(monkeypatch)
    rig.drive(rig.step)
    assert not rig.step.is_down
    assert (rig.step.stats.captured, rig.step.stats.replayed) == (1, 60 - TIMED - 6)
    assert rig.step.stats.skipped == {}
    rests = rig.clock.rests
    rig.drive(rig.step, 20)
    assert rig.clock.rests == rests
    assert rig.step.stats.step_us("eager") == 1e6
    assert rig.step.stats.step_us("replayed") == pytest.approx(1e5)


def test_the_device_of_a_step_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands down before anything is prepared."""
    rig = Rig(monkeypatch, idle=0.01)
    before = hooks_of(rig.model, rig.optimizer)[:5]
    rig.drive(rig.step, TIMED + 10)
    assert rig.step.stats.skipped == {SkipReason.BUSY: 10}
    assert rig.step.stats.traced == 0
    assert hooks_of(rig.model, rig.optimizer)[:5] == before
    assert (rig.clock.watched, rig.clock.watching) == (1, 0)


@pytest.mark.parametrize("options", [{"compile": True}, {"fuse_optimizer": True}, {"prefetch": True}], ids=str)
def test_faster_kernels_pay_on_a_busy_device(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    rig = Rig(monkeypatch, idle=0.01, **options)
    rig.drive(rig.step)
    assert rig.step.stats.captured == 1


@pytest.mark.parametrize("options", [{"min_speedup": None}, {"min_speedup": 0}, {"backend": "eager"}], ids=str)
def test_steps_without_a_gate(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """The tape is there to be tested with, not to be fast."""
    rig = Rig(monkeypatch, replay=5.0, **options)
    rig.drive(rig.step, 20)
    assert (rig.clock.rests, rig.step.is_down) == (0, False)


def test_an_error_in_a_timed_step_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    for index in range(5):
        rig.step(torch.randn(5, 6))
        if index == 3:
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                rig.step(torch.randn(5, 7))
            assert rig.clock.watching == 0
    assert rig.step.stats.calls == 5
    rig.drive(rig.step, 40)
    assert rig.step.stats.captured == 1
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        rig.step(torch.randn(5, 7))


def test_a_closed_step_is_closed_while_it_is_timed_and_after_it_stood_down(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (4, 60):
        rig = Rig(monkeypatch, replay=5.0)
        rig.drive(rig.step, number)
        rig.step.close()
        assert rig.step.stats.calls == number
        assert rig.clock.watching == 0
        with pytest.raises(RuntimeError, match="this step was closed"):
            rig.step(torch.randn(5, 6))


def test_a_refusal_takes_everything_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few calls that came to nothing, those that follow are the function's."""
    rig = Rig(monkeypatch, fused=False)
    before = hooks_of(rig.model, rig.optimizer)[:5]

    def loss(x: Tensor) -> Tensor:
        found: Tensor = rig.model(x).square().mean()
        return found * (2.0 if complex(found.detach()).real > 1e9 else 1.0)

    step = graph_step(
        descent(rig.model, rig.optimizer, loss), owners=[rig.model, rig.optimizer], backend="tape", on_failure="eager"
    )
    with pytest.warns(UserWarning, match="graphplan runs this step eagerly: .* on the host"):
        rig.drive(step, 20)
    assert step.is_down
    assert step.stats.skipped == {SkipReason.HOST_SYNC: 17}
    assert hooks_of(rig.model, rig.optimizer)[:5] == before


def test_signatures_that_never_repeat_stand_down(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, min_speedup=None, on_failure="eager")
    with pytest.warns(UserWarning, match="no step was captured in 24 steps"):
        rig.drive(rig.step, 60, rows=lambda index: index + 1)
    assert rig.step.is_down
    assert rig.step.stats.skipped == {SkipReason.SHAPE: 36}


@pytest.mark.twice
def test_new_signatures_are_eager_in_the_end_and_known_ones_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warm-up, no trace, no look at the owners for what will never have a program."""
    rig = Rig(monkeypatch, min_speedup=None)
    rig.drive(rig.step, 10)
    rig.drive(rig.step, 60, rows=lambda index: index + 6)
    stats = rig.step.stats
    assert stats.skipped[SkipReason.MAX_GRAPHS] == 60 - 24
    walks: list[Any] = []
    monkeypatch.setattr(rig.step.machine.managed, "walk", lambda: walks.append(1))
    rig.drive(rig.step, 10, rows=lambda index: index + 100)
    assert walks == []
    monkeypatch.undo()
    assert (stats.captured, stats.replayed) == (1, 4)
    rig.drive(rig.step, 10)
    assert rig.step.stats.replayed == 14


@pytest.mark.twice
def test_a_shape_that_waits_is_served_once_replays_of_another_have_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no replay follows another one: what replays save is known from those between eager steps."""
    rig = Rig(monkeypatch)
    stats = rig.step.stats
    monkeypatch.setattr("graphplan.step.programs._ALLOWANCE", 50)
    monkeypatch.setattr("graphplan.step.programs._HORIZON", 0)
    monkeypatch.setattr(type(stats), "spent", lambda stats, *_: 60.0 * stats.traced)

    def call(x: Tensor) -> Any:
        # The rig lets each step take as long as a replay once there is a program.
        rig.clock.time += 0.9 if stats.captured == 1 and len(x) == 6 else 0.0
        return rig.step(x)

    rig.drive(call, 200, rows=lambda index: 5 + index % 2)
    assert stats.captured == 1
    assert stats.measured["replayed"] == pytest.approx(0.1)
    assert "is traced once replays have saved the time of earlier traces and captures" in rig.step.report()
    rig.drive(call, 200, rows=lambda index: 5 + index % 2)
    assert stats.captured == 2


def test_what_has_begun_is_to_be_paid_before_another_shape_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape whose first trace took ten steps takes more until it is captured."""
    rig = Rig(monkeypatch)
    stats = rig.step.stats
    monkeypatch.setattr("graphplan.step.programs._ALLOWANCE", 50)
    monkeypatch.setattr(type(stats), "spent", lambda stats, *_: 10.0 * stats.traced)
    traced: set[int] = set()

    def call(x: Tensor) -> Any:
        before = stats.traced
        out = rig.step(x)
        traced.update([len(x)] * (stats.traced - before if not stats.captured else 0))
        return out

    rig.drive(call, 60, rows=lambda index: 5 + index % 5)
    assert stats.captured
    assert len(traced) == 2


def serve(monkeypatch: pytest.MonkeyPatch, replay: float, **options: Any) -> tuple[Any, Clock, nn.Module]:
    """A graphed function that takes a second, or ``replay`` seconds once it is captured."""
    clock = set_clock(monkeypatch, Clock(passes=lambda: replay if run.stats.captured else 1.0))
    model = nn.Linear(6, 3)
    run = graphed(model, backend="tape", min_speedup=1.0, **options)
    return run, clock, model


@torch.no_grad()
@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_served_calls_that_do_not_pay(monkeypatch: pytest.MonkeyPatch, outputs: str) -> None:
    """Each signature is timed by itself, whatever its caller does between calls; in the end the function is left."""
    run, clock, model = serve(monkeypatch, 5.0, outputs=outputs)
    for index in range(60):
        x = torch.full((4, 6), float(index))
        out = run(x)
        clock.time += 100
        assert torch.equal(out.as_subclass(Tensor) if outputs == "clone" else out.clone(), model(x))
    assert run.is_down
    assert run.num_graphs == 0
    assert run.stats.calls == 60
    assert run.stats.skipped[SkipReason.SLOWER] > 20
    assert re.search(r"1000000 µs per call eagerly and 50000\d\d µs with replays", run.report())


@torch.no_grad()
def test_served_calls_that_pay_and_others_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some signatures have programs, and those that were found slower cost no more than a look-up."""
    run, clock, _ = serve(monkeypatch, 0.1)
    for _ in range(40):
        run(torch.zeros(9, 6))
    clock.passes = lambda: 1.0 if run.stats.captured == 1 else 5.0
    for _ in range(40):
        run(torch.zeros(4, 6))
    assert run.num_graphs == 1
    assert run.stats.skipped.keys() == {SkipReason.SHAPE, SkipReason.SLOWER}
    rests, replayed = clock.rests, run.stats.replayed
    walks: list[Any] = []
    monkeypatch.setattr(run.machine.managed, "refresh", lambda: walks.append(1))
    for _ in range(10):
        run(torch.zeros(9, 6))
        run(torch.zeros(4, 6))
    assert (clock.rests, run.stats.replayed, walks) == (rests, replayed + 10, [])


@torch.no_grad()
def test_programs_that_are_asked_for_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, clock, _ = serve(monkeypatch, 5.0)
    assert run.prewarm([1, 2], example=(torch.zeros(1, 6),)) == 2
    assert clock.rests == 0
    for _ in range(20):
        run(torch.zeros(2, 6))
    assert (clock.rests, run.num_graphs) == (0, 2)


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
    with idleness.CAPTURE_LOCK:
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
