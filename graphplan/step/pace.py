"""Whether a step is to wait with its program, since there is next to nothing to gain.

Where the device cannot keep up with the host, it is busy all the time, and a replay has only the gaps between kernels
to save. What the way to a program takes (traces, a capture, a check) is lost then. So it is taken once it is a small
part of the run. Until then the step is what it is without graphplan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, TypeVar

import torch

from graphplan.step.peers import Peers

SHARE = 0.005
"""Of a run's time, what the way to its program may take: later checks take as much again."""
_WAY = 31
"""As often as in the way to a program (two traces, a capture, its first check) the host could launch a step: GPT-2 with
124M parameters on an H200, 0.65 s beyond the steps themselves, of which each is launched in 21 ms.
"""
_PAYS = 1000
"""Steps in which a program has to save what the way to it took, and as much again for checks."""
_DOUBTS = 3
"""After so many steps in a row between which it could, there is something to gain after all."""
_OFTEN = 64
"""At most so many steps go by until it is looked at how the last ones went."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Sample:
    """One eager step: device events around it, and the seconds that the host took for it and since the step before."""

    begin: Any
    end: Any
    host: float
    outside: float

    def is_ahead(self) -> bool:
        """Whether the host is done with this step and all since the one before in less time than the device takes."""
        # If the device is not even done, the host is ahead with all that it has done since then, too.
        return not self.end.query() or self.begin.elapsed_time(self.end) / 1000 > self.host + self.outside

    def leaves_gaps(self, before: _Sample) -> bool:
        """Whether replays could save enough: the device waits for the host in the step, or for long after the one
        ``before``. (Who reads a value in each step has the host wait for the device: that is no time of the host's.)
        """
        if not self.end.query():
            return False
        gap = before.end.elapsed_time(self.begin) / 1000
        return self.host > self.begin.elapsed_time(self.end) / 1000 or gap * _PAYS > 2 * _WAY * self.host


class Pace:
    """Measures eager steps that nobody watches, and says for how long steps are to wait after them; entered around
    each call of the step. With ``peers`` all ranks wait, or none: a device waits for the slowest of them.
    """

    def __init__(self, peers: Peers | None) -> None:
        self._peers = peers
        self._start: float | None = None
        self._left: float | None = None
        self._outside = inf
        self._samples: deque[_Sample] = deque(maxlen=_DOUBTS + 1)
        self._until: float | None = None
        self._waited = 0

    def __enter__(self) -> None:
        now = perf_counter()
        if self._start is None:
            self._start = now
        if self._left is not None:
            self._outside = now - self._left

    def __exit__(self, *error: object) -> None:
        self._left = perf_counter()

    def measured(self, call: Callable[[], Result], device: torch.device) -> Result:
        """The result of ``call``, an eager step on the current stream of ``device``."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        start = perf_counter()
        result = call()
        taken = perf_counter() - start
        end.record(stream)
        self._samples.append(_Sample(begin, end, taken, self._outside))
        return result

    def begins_to_wait(self) -> bool:
        """Whether steps are to wait from now on: the host is ahead of the device with the last one measured."""
        if not self._agree("busy", bool(self._samples) and self._samples[-1].is_ahead()):
            return False
        assert self._start is not None
        self._until = self._start + _WAY * self._samples[-1].host / SHARE
        return True

    @property
    def waits(self) -> bool:
        """Whether steps wait, since :meth:`begins_to_wait` has said so."""
        return self._until is not None

    def is_over(self) -> bool:
        """Whether they have waited long enough, or are not what they were taken for; asked before each that waits."""
        assert self._until is not None
        self._waited += 1
        # After 4, 8, 16, 32 and every 64 steps: ranks have to ask each other then.
        if self._waited % _OFTEN and (self._waited & (self._waited - 1) or self._waited <= _DOUBTS):
            return False
        steps = list(self._samples)
        doubtful = len(steps) > _DOUBTS and all(map(_Sample.leaves_gaps, steps[1:], steps))
        return not self._agree(f"still busy {self._waited}", not doubtful and perf_counter() < self._until)

    def _agree(self, question: str, answer: bool) -> bool:
        return answer if self._peers is None else self._peers.all_say(question, answer)
