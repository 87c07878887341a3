"""The speed gate: measures a step without graphplan, then with replays, and decides whether replays pay off.

It waits for the device at both ends of a measurement, and nowhere else. A training step is timed from the end of one
step to the end of the next, an inference call by itself. If the device is always busy, replays cannot save time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import count, pairwise
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

import torch

from graphplan.backends.idleness import Idleness
from graphplan.environment.devices import current_stream, is_accelerator, synchronize
from graphplan.errors import SkipReason, SlowerError
from graphplan.feed.signature import Feed
from graphplan.plan.build import find_device
from graphplan.program.faults import refusal_of
from graphplan.report.stats import Stats
from graphplan.step.options import Options
from graphplan.step.peers import Peers
from graphplan.step.runner import StepContext, to_device

Serve = Callable[[tuple[Any, ...], dict[str, Any]], Any]
SKIPPED = 2  # First eager calls, which are not timed: they load kernels, and optimizers create their state.
STEPS = 5  # Minimum number of steps that are timed together.
_MOST_IDLE = 0.062
"""Share of a step in which a busy device may be idle. In 1,000 steps, replays have to save the cost of a program: two
traces, a capture and checks took as long as 62 launches of a GPT-2 step on an H200.
"""
_WINDOWS = 3  # Measurements of replays before they count as slower; the best one counts.
_CLEAR = 2.0  # If replays are slower by this factor, one measurement is enough.
_SINGLE = 64  # Maximum number of other steps for whose end the host waits, to time a replay after them.
_UNEVEN = 0.5
"""A timing window is repeated if one step takes a larger share of it: a validation or a checkpoint came between."""
_PATIENCE = 1.0  # Seconds that a rank waits for the votes of the others.


class Clock:
    """The host's clock, together with the device to synchronize with."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """The host's time in seconds, without a synchronization."""
        return perf_counter()

    def rest(self) -> float:
        """Wait for the device, and return the time."""
        synchronize(self._device)
        return self.now()

    def watch(self) -> Callable[[], float]:
        """Start to watch the device. The returned function stops that, and returns the share of time it was idle."""
        return Idleness([current_stream(self._device)]).end if is_accelerator(self._device) else lambda: 1.0


class Gate:
    """The comparison of a step's time with replays and without graphplan: is it ``least`` times as fast with replays?

    If the step ``loops``, it is timed from the end of one step to the end of the next, else each call by itself. The
    loop's work repeats after ``period`` steps. ``peers`` are other ranks, which come to the same decision.
    """

    def __init__(
        self, least: float, clock: Clock, *, period: int = 1, loops: bool = True, peers: Peers | None = None
    ) -> None:
        self._least, self._clock, self._period = least, clock, period
        self._loops, self._peers = loops, peers
        self._numbers = count()  # Numbers for the votes of ``peers``: each gate of a run needs its own.
        self._number = next(self._numbers)
        self._skips = SKIPPED
        self._times: list[float] = []  # The end times of a loop's steps, or the durations of calls, in seconds.
        self._retries = 0
        self._watch: Callable[[], float] | None = None
        self._windows: list[float] = []
        self._single: list[float] = []  # Durations in seconds of single replays that follow other steps.
        self._waits = _SINGLE
        self._other_end: float | None = None
        self.eager: float | None = None  # Seconds per step without graphplan, once measured.
        self.idle = 1.0  # The share of that time in which the device was idle.

    @classmethod
    def of(cls, options: Options, device: torch.device, **others: Any) -> Gate | None:
        """A gate for a step on ``device``; None if replays do not have to be faster than eager steps."""
        least = options.least_speedup(device)
        return cls(least, Clock(device), **others) if options.backend != "eager" and least > 0 else None

    def again(self) -> Gate:
        """Make a gate for another form of the step, with the same eager time."""
        gate = copy(self)
        gate._number, gate._times, gate._windows, gate._single = next(self._numbers), [], [], []
        return gate

    @property
    def measured(self) -> dict[str, float]:
        """Seconds per step, ``"eager"`` (without graphplan) and ``"replayed"``, as far as they were measured."""
        found = {"eager": self.eager, "replayed": min(self._windows, default=None)}
        return {kind: seconds for kind, seconds in found.items() if seconds is not None}

    @property
    def is_busy(self) -> bool:
        """Whether the device was busy during nearly all of the eager steps' time, on all ranks."""
        return self._agree("busy", self.idle <= _MOST_IDLE)

    def _agree(self, what: str, answer: bool) -> bool:
        return answer if self._peers is None else self._peers.vote(f"{what} {self._number}", answer, _PATIENCE) is True

    def begin(self) -> float:
        """Begin a step or a call. Pass the result to ``end_eager`` or ``end_replay``."""
        return 0.0 if self._loops else self._clock.rest()

    def _end(self, start: float) -> float | None:
        """End a step or a call. Return the seconds per step, once enough were timed."""
        if self._loops:
            return self._end_lap()
        self._times.append(self._clock.rest() - start)
        if len(self._times) < STEPS:
            return None
        times, self._times = self._times, []
        return median(times)

    def _end_lap(self) -> float | None:
        """End a step of a loop. Repeat the window if one step took longer than all others together."""
        if not self._times:
            self._times = [self._clock.rest()]
            return self._end_single(self._times[0])
        self._times.append(self._clock.now())
        steps = ceil(STEPS / self._period) * self._period
        if len(self._times) <= steps:
            return None
        ends, self._times = self._times, []
        longest = max(end - start for start, end in pairwise(ends))
        # Ranks have to vote in the same steps, so they do not repeat windows.
        if self._peers is None and self._retries < _WINDOWS - 1 and longest > _UNEVEN * (ends[-1] - ends[0]):
            self._retries += 1
            return None
        self._retries = 0
        return (self._clock.rest() - ends[0]) / steps

    def _end_single(self, now: float) -> float | None:
        """End the first replay after another step. Return the median of such replays, once enough were timed."""
        if self._other_end is None:
            return None
        self._single.append(now - self._other_end)
        self._other_end = None
        if len(self._single) < STEPS:
            return None
        times, self._single = self._single, []
        return median(times)

    def end_other(self) -> None:
        """End a step that is no replay, while replays are timed. If shapes alternate, there may be no consecutive
        replays, so a single replay is timed from the end of this step.
        """
        self.cancel()
        if self._loops and self._period == 1 and self._peers is None and self._waits:
            self._waits -= 1
            self._other_end = self._clock.rest()

    def end_eager(self, start: float = 0.0) -> bool:
        """End a step without graphplan. Return True once its time is known."""
        if self._skips > 1 or (self._skips and not self._loops):
            self._skips -= 1
            return False
        self.eager = self._end(start)
        is_running = self._loops and bool(self._times)
        if self._watch is None and is_running:
            self._watch = self._clock.watch()
        elif self._watch is not None and not is_running:
            self.idle, self._watch = self._watch(), None
        return self.eager is not None

    def end_replay(self, start: float = 0.0) -> bool | None:
        """End a replay. Return True or False once it is known whether replays pay off, else None."""
        assert self.eager is not None
        seconds = self._end(start)
        if seconds is None:
            return None
        self._windows.append(seconds)
        needed, is_last = min(self._windows) * self._least, len(self._windows) == _WINDOWS
        if self._peers is not None and not is_last:
            return None
        if not self._agree("slower", needed > self.eager):
            return True
        return False if is_last or needed > self.eager * _CLEAR else None

    def cancel(self) -> None:
        """Discard this call's time, since something else has run. In a loop, restart the measurement."""
        if self._loops:
            self._times, self._other_end = [], None
        if self._watch is not None:
            self._watch()
            self._watch = None

    def error(self, what: str, costs: str = "") -> SlowerError:
        """Make the error for replays of ``what`` that do not pay off."""
        eager, replayed = (self.measured[kind] * 1e6 for kind in ("eager", "replayed"))
        return SlowerError(
            f"{what} took {eager:.0f} µs per {'step' if self._loops else 'call'} eagerly and {replayed:.0f} µs with "
            f"replays{costs}. Expected replays to be at least {self._least:g} times as fast. Look for host work "
            "beside the replay, make batches smaller if the device is busy all the time, or pass min_speedup=0 to "
            "keep the programs anyway"
        )


class Timing:
    """The timing of a step whose replays have to be faster than eager steps. A training step has one ``gate``, which is
    made for its first calls unless it is given; an inference step has one for each signature.

    ``handler``: if set, runs the calls in place of the state machine. ``leave``: transforms the arguments of stock
    calls, which run the function alone. ``down_because``: why all calls are stock; None if they are not, or are timed.
    """

    def __init__(
        self, parts: StepContext, *, gate: Gate | None, opens: bool, serve: Serve, stand_down: Callable[..., None]
    ) -> None:
        self._runner, self._managed = parts.runner, parts.managed
        self._options, self._peers = parts.options, parts.peers
        self._serve, self._stand_down = serve, stand_down
        self.leave: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] = lambda args, kwargs: (args, kwargs)
        self._gate = gate
        if gate is not None:
            self._runner.stats.measured = gate.measured
        self.opens = opens and gate is None
        self.handler: Serve | None = None if gate is None else self._timed
        self._calls = 0  # Stock calls that the statistics do not contain yet.
        self.down_because: tuple[SkipReason, str] | None = None

    @property
    def is_stock(self) -> bool:
        """Whether calls run the step's function alone, and graphplan only counts them."""
        return self.handler == self._call_stock

    def take_counts(self) -> Stats:
        """Return the statistics of all calls so far, including stock calls."""
        stats = self._runner.stats
        count, self._calls = self._calls, 0
        stats.count_stock(count, *(self.down_because or ()))
        return stats

    def be_stock(self, reason: SkipReason | None, detail: str = "") -> None:
        """Run the step's function alone from now on: for a ``reason``, or without one to time it."""
        self.take_counts()
        self.handler = self._call_stock
        self.down_because = None if reason is None else (reason, detail)

    def _call_stock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            result = self._runner.call(to_device(self._options.feed_device, *self.leave(args, kwargs)))
        except BaseException:
            if self._gate is not None:
                self._gate.cancel()
            raise
        self._runner.outcome = None
        self._calls += 1
        if self.down_because is None:
            self._look()
        return result

    def close(self) -> None:
        """Stop timing, and let the state machine run the calls again."""
        if self._gate is not None:
            self._gate.cancel()
        self._go_on(None)

    def _go_on(self, handler: Serve | None) -> None:
        """End stock calls. Run the next calls by ``handler``, or without one by the state machine."""
        self.take_counts()
        self.handler, self.down_because = handler, None

    def begins(self, feed: Feed) -> bool:
        """Return True if the next calls are stock and timed, and start that. Only the first call has an effect."""
        if not self.opens or self._options.mode != "train":
            return False
        self.opens = False
        device = self._options.feed_device or find_device(self._managed.walk_before(), feed)
        gate = Gate.of(self._options, device, peers=self._peers)
        if gate is not None:
            self._gate = gate
            self._managed.release()
            self.be_stock(None)
        return gate is not None

    def _look(self) -> None:
        """After a timed stock call: continue with the state machine once the eager time is known."""
        gate = self._gate
        assert gate is not None
        with self.having_run():
            if not gate.end_eager():
                return
            self.take_counts().measured = gate.measured
            if gate.is_busy and self._options.may_stay_eager:
                self._stand_down(SkipReason.BUSY, "")
            else:
                self._managed.prepare()
                self._go_on(self._timed)

    def _timed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gate = self._gate
        assert gate is not None
        start = gate.begin()
        try:
            result = self._serve(args, kwargs)
        except BaseException:
            gate.cancel()
            raise
        if self.is_stock:
            return result
        with self.having_run():
            pays = None
            if self._runner.stats.last_kind == "replayed":
                pays = gate.end_replay(start)
            elif self._runner.stats.captured:
                gate.end_other()
            else:
                gate.cancel()
            if pays is not None:
                self._go_on(None)
                error = self.decide(gate, pays)
                if error is not None:
                    self._stand_down(error.reason, str(error))
        return result

    def decide(self, gate: Gate, pays: bool) -> SlowerError | None:
        """Record the measured times. Return the error if replays do not pay off."""
        stats = self.take_counts()
        stats.measured = gate.measured
        if pays:
            return None
        plan, own = self._runner.plan, stats.replay_us() or 0.0
        costs = f", {own:.0f} µs of them in the replay itself on the host"
        error = gate.error("the step" if plan is None else plan.name, costs)
        stats.note(f"dropped: {error}")
        return error

    @contextmanager
    def having_run(self) -> Iterator[None]:
        """Postpone a refusal in the block to the next call, since this call's step has already run."""
        try:
            yield
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is None:
                raise
            self._managed.refusal = refusal
            self._go_on(None)
