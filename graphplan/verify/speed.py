"""Does a program pay? Every check runs one batch both ways, from the same state: the times of these pairs say.

An eager step that is queued behind other work is at its fastest, with some of its kernels launched before their turn: a
program that wins all the same would win anywhere. Only where it does not, later pairs have their eager steps begin when
the device has nothing left to do, which is the worst that an eager step can be: a program that loses all the same would
lose in a busy loop too. That waits for what the device has queued, and so does reading a clock: once the pairs have
decided, checks are not timed any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, stdev
from time import perf_counter
from typing import TypeVar

import torch

_PAIRS = 6
"""Fewer say nothing."""
_ENOUGH = 9
"""Checks of a geometric schedule until replay 512, but the first."""
_QUANTILE = 4.03
"""Student's t for five degrees of freedom that one sample in 200 exceeds; with more pairs it is less."""
_LEAST = 1e-3
"""A speed-up that any program has."""
Result = TypeVar("Result")
Seconds = Callable[[], float]


def timed(call: Callable[[], Result], device: torch.device, *, alone: bool) -> tuple[Result, Seconds]:
    """The result of ``call``, and what tells how many seconds it took until ``device`` had done it. That waits for the
    device; if ``alone``, so does this, before the call.
    """
    if device.type != "cuda":
        start = perf_counter()
        result = call()
        taken = perf_counter() - start
        return result, lambda: taken
    if alone:
        torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    result = call()
    end.record(stream)

    def seconds() -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    return result, seconds


class Trials:
    """Times of one program's replays and of the eager steps on the same batches."""

    def __init__(self) -> None:
        self._alone: list[float] = []
        self._queued: list[float] = []
        self._is_first = True

    def add(self, replay: float, eager: float, *, alone: bool = True) -> None:
        """One pair, in seconds, whose eager step began ``alone``, or queued. The first is left out: a graph's first
        launch loads it.
        """
        if not self._is_first and replay > 0 and eager > 0:
            (self._alone if alone else self._queued).append(math.log(eager / replay))
        self._is_first = False

    def want_alone(self, bound: float) -> bool:
        """Whether the device has to be waited for before an eager step: queued, they are not ``bound`` times as slow
        as replays.
        """
        return bool(self._alone or (self._queued and fmean(self._queued) < math.log(max(bound, _LEAST))))

    @property
    def speedup(self) -> float:
        """How often a replay fits into an eager step: the geometric mean of the pairs, 1 without any."""
        return math.exp(fmean(self._pairs)) if self._pairs else 1.0

    def want_more(self, bound: float) -> bool:
        """Whether another pair is worth waiting for the device: the speed-up may be less than ``bound``, or not."""
        if len(self._pairs) < _PAIRS or (not self._alone and self.want_alone(bound)):
            return True
        return len(self._pairs) < _ENOUGH and fmean(self._pairs) - self._error < math.log(max(bound, _LEAST))

    @property
    def are_enough(self) -> bool:
        """Whether there were enough pairs, of whatever kind, that ranks may ask each other about a loss: where they
        check together, so it is on all from one check on.
        """
        return len(self._alone) + len(self._queued) >= _PAIRS

    @property
    def _pairs(self) -> list[float]:
        """Those that began alone, if any did: queued ones did not show a gain."""
        return self._alone or self._queued

    def surely_below(self, bound: float) -> bool:
        """Whether the speed-up is less than ``bound`` even at the upper end of its confidence interval."""
        if len(self._alone) < _PAIRS or bound <= 0:
            return False
        return fmean(self._alone) + self._error < math.log(bound)

    @property
    def _error(self) -> float:
        return _QUANTILE * stdev(self._pairs) / math.sqrt(len(self._pairs))
