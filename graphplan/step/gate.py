"""The speed gate: measures a step without graphplan, then with replays, and says whether replays pay.

- Eager time comes first: calls of the function alone, of which those after the first two are timed. A device that is
  busy for nearly all of that time leaves replays next to nothing to save.
- Replays are timed once there are enough in a row that are not checked.
- A training step is timed from the end of one step to the end of the next (:class:`Laps`), with all that the host does
  in between; an inference call by itself (:class:`Calls`).
- The device is waited for at both ends of what is timed, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, pairwise
from math import ceil
from statistics import median
from time import perf_counter

import torch

from graphplan.backends.idleness import Idleness
from graphplan.environment.devices import current_stream, is_accelerator, synchronize
from graphplan.errors import SlowerError
from graphplan.step.peers import Peers

SKIPPED = 2
"""First eager calls, which are not timed: they load kernels, and optimizers make their state."""
STEPS = 5
"""Steps that are timed together, at least."""
AGAIN = 1000
"""Steps after which a device that was busy is looked at again; twice as many each time."""
_MOST_IDLE = 0.062
"""Share of a step in which the device may have nothing to do: in 1,000 steps replays have to save what the way to a
program takes (two traces, a capture and checks took as long as 62 launches of a GPT-2 step on an H200).
"""
_WINDOWS = 3
"""Times that replays are measured before they are found slower; the best counts."""
_CLEAR = 2.0
"""Slower by this factor in one window is enough."""
_UNEVEN = 0.5
"""A step that takes more than this share of a window is none of the loop's: a validation, a checkpoint."""
_PATIENCE = 1.0
"""Seconds that a rank waits for the votes of the others."""


class Clock:
    """The host's clock, and one device to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Seconds."""
        return perf_counter()

    def rest(self) -> float:
        """Wait for the device; the time then."""
        synchronize(self._device)
        return self.now()

    def watch(self) -> Callable[[], float]:
        """Begin to watch the device; what is returned ends that, and gives the share of time in which it was idle."""
        return Idleness([current_stream(self._device)]).end if is_accelerator(self._device) else lambda: 1.0


class Laps:
    """Seconds per step of a loop: ``count`` steps in a row, from end to end; measured again, ``retries`` times at most,
    if one of the steps took longer than all others together.
    """

    def __init__(self, clock: Clock, count: int, retries: int) -> None:
        self._clock, self._count, self._retries = clock, count, retries
        self._tries = 0
        self._ends: list[float] = []

    def begin(self) -> float:
        """A step begins."""
        return 0.0

    def end(self, start: float) -> float | None:
        """A step has ended: seconds per step, once there were enough."""
        if not self._ends:
            self._ends = [self._clock.rest()]
            return None
        self._ends.append(self._clock.now())
        if len(self._ends) <= self._count:
            return None
        ends, self._ends = self._ends, []
        longest = max(end - start for start, end in pairwise(ends))
        if self._tries < self._retries and longest > _UNEVEN * (ends[-1] - ends[0]):
            self._tries += 1
            return None
        self._tries = 0
        return (self._clock.rest() - ends[0]) / self._count

    @property
    def is_running(self) -> bool:
        """Whether steps are being timed."""
        return bool(self._ends)

    def cancel(self) -> None:
        """Something else ran: begin again."""
        self._ends = []


class Calls:
    """Seconds per call: the median of ``count`` calls, each with the device at rest before it and after it."""

    is_running = False

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock, self._count = clock, count
        self._taken: list[float] = []

    def begin(self) -> float:
        """A call begins: the time."""
        return self._clock.rest()

    def end(self, start: float) -> float | None:
        """A call has ended that began at ``start``: seconds per call, once there were enough."""
        self._taken.append(self._clock.rest() - start)
        if len(self._taken) < self._count:
            return None
        taken, self._taken = self._taken, []
        return median(taken)

    def cancel(self) -> None:
        """That call is not to be counted."""


class Gate:
    """Compares one step's time with replays to its time without graphplan.

    Args:
        least: how many times as fast as without graphplan the step has to be.
        clock: of the step's device.
        period: steps after which a loop does the same again.
        loops: whether steps are timed from end to end, or else by themselves.
        peers: other ranks, which decide alike.
        eager: seconds per step without graphplan, if known.
        family: numbers the gates of one run: each puts questions of its own to ``peers``.
    """

    def __init__(
        self,
        least: float,
        clock: Clock,
        *,
        period: int = 1,
        loops: bool = True,
        peers: Peers | None = None,
        eager: float | None = None,
        family: Iterator[int] | None = None,
    ) -> None:
        self._least, self._clock, self._period = least, clock, period
        self._loops, self._peers = loops, peers
        self._family = family or count()
        self._number = next(self._family)
        # Ranks have to come to their votes in the same steps.
        retries = _WINDOWS - 1 if peers is None else 0
        laps = ceil(STEPS / period) * period
        self._timer: Laps | Calls = Laps(clock, laps, retries) if loops else Calls(clock, STEPS)
        self._skips = SKIPPED
        self._watch: Callable[[], float] | None = None
        self._windows: list[float] = []
        self.eager = eager
        self.idle = 1.0
        """Share of the eager steps' time in which the device had nothing to do."""

    def with_same_eager_time(self) -> Gate:
        """A gate for another form of the step."""
        return Gate(
            self._least, self._clock, period=self._period, loops=self._loops, peers=self._peers, eager=self.eager,
            family=self._family,
        )  # fmt: skip

    def anew(self) -> Gate:
        """A gate that knows nothing yet."""
        gate = self.with_same_eager_time()
        gate.eager = None
        return gate

    @property
    def replayed(self) -> float | None:
        """Seconds per step with replays; None before they were measured."""
        return min(self._windows, default=None)

    @property
    def is_busy(self) -> bool:
        """Whether the device was busy for nearly all of the eager steps' time, on all ranks."""
        busy = self.idle <= _MOST_IDLE
        return busy if self._peers is None else self._agree(self._peers, "busy", busy)

    def _agree(self, peers: Peers, what: str, answer: bool) -> bool:
        return peers.vote(f"{what} {self._number}", answer, _PATIENCE) is True

    def begin(self) -> float:
        """A step or call begins that is going to be timed: what its end is to be told."""
        return self._timer.begin()

    def end_eager(self, start: float = 0.0) -> bool:
        """A step without graphplan has ended; whether its time is known now."""
        if self._skips > 1 or (self._skips and not self._loops):
            self._skips -= 1
            return False
        self.eager = self._timer.end(start)
        if self._watch is not None and not self._timer.is_running:
            self.idle, self._watch = self._watch(), None
        elif self._watch is None and self._timer.is_running:
            self._watch = self._clock.watch()
        return self.eager is not None

    def end_replay(self, start: float = 0.0) -> bool | None:
        """A replay has ended. True: replays pay; False: they do not; None: that is not known yet."""
        assert self.eager is not None
        seconds = self._timer.end(start)
        if seconds is None:
            return None
        self._windows.append(seconds)
        needed = min(self._windows) * self._least
        is_slower = needed > self.eager
        if self._peers is not None:
            if len(self._windows) < _WINDOWS:
                return None
            return not self._agree(self._peers, "slower", is_slower)
        if not is_slower:
            return True
        return False if len(self._windows) == _WINDOWS or needed > self.eager * _CLEAR else None

    def cancel(self) -> None:
        """What has run is neither: times begin anew."""
        self._timer.cancel()
        if self._watch is not None:
            self._watch()
            self._watch = None

    def error(self, what: str, costs: str = "") -> SlowerError:
        """What is to be said of ``what`` where replays do not pay."""
        assert self.eager is not None
        assert self.replayed is not None
        unit = "step" if self._loops else "call"
        return SlowerError(
            f"{what} was measured to take {self.eager * 1e6:.0f} µs per {unit} eagerly and {self.replayed * 1e6:.0f} "
            f"µs with replays{costs}. Expected replays to be at least {self._least:g} times as fast. Look for what "
            "the host does beside the replay, make batches smaller if the device is busy all the time, or pass "
            "min_speedup=0, which keeps programs all the same"
        )
