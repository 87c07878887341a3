"""Whether a step is to wait with its program, since there is next to nothing to gain.

Where the device cannot keep up with the host, it is busy all the time, and a replay has only the gaps between kernels
to save. What the way to a program takes (traces, a capture, a check) is lost then. So it is taken once it is a small
part of the run. Until then the step is what it is without graphplan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, TypeVar

import torch

from graphplan.step.idleness import Idleness
from graphplan.step.options import Options
from graphplan.step.peers import Peers

SHARE = 0.005
"""Of a run's time, what the way to its program may take: later checks take as much again."""
_WAY = 31
"""As often as in the way to a program (two traces, a capture, its first check) the host could launch a step: GPT-2 with
124M parameters on an H200, 0.65 s beyond the steps themselves, of which each is launched in 21 ms.
"""
_PAYS = 1000
"""Steps in which a program has to save what the way to it took, and as much again for checks."""
_MOST_IDLE = 2 * _WAY / _PAYS
"""Of each step's time, what the device may have nothing to do in, since replays would save that."""
_WATCHED = 3
"""Steps that are watched before it is decided again."""
_OFTEN = 64
"""At most so many steps go by until it is decided again."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Sample:
    """One eager step: device events around it, and the seconds that the host took for it and since the step before."""

    stream: torch.cuda.Stream
    begin: Any
    end: Any
    host: float
    outside: float

    def is_ahead(self) -> bool:
        """Whether the host is done with this step and all since the one before in less time than the device takes."""
        # If the device is not even done, the host is ahead with all that it has done since then, too.
        return not self.end.query() or self.begin.elapsed_time(self.end) / 1000 > self.host + self.outside


def _is_turn(waited: int) -> bool:
    """Whether it is decided again after so many calls that wait: 4, 8, 16, 32, and every 64."""
    return waited % _OFTEN == 0 if waited >= _OFTEN else waited in (4, 8, 16, 32)


class Pace:
    """Measures eager steps that nobody watches, and says for how long steps are to wait after them; entered around
    each call of the step. With ``peers`` all ranks wait, or none: a device waits for the slowest of them.
    """

    def __init__(self, options: Options, peers: Peers | None) -> None:
        self._options = options
        self._peers = peers
        self._start: float | None = None
        self._left: float | None = None
        self._outside = inf
        self._sample: _Sample | None = None
        self._until = 0.0
        self._first: int | None = None
        self._idleness: Idleness | None = None
        self._shares: list[float] = []

    def __enter__(self) -> None:
        now = perf_counter()
        if self._start is None:
            self._start = now
        if self._left is not None:
            self._outside = now - self._left

    def __exit__(self, *error: object) -> None:
        self._left = perf_counter()

    def measured(self, call: Callable[[], Result], device: torch.device) -> Result:
        """The result of ``call``, an eager step on the current stream of ``device``; where none waits, as it is."""
        if not self._options.is_paced(device):
            return call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        start = perf_counter()
        result = call()
        taken = perf_counter() - start
        end.record(stream)
        self._sample = _Sample(stream, begin, end, taken, self._outside)
        return result

    def begins_to_wait(self, call: int) -> bool:
        """Whether steps are to wait from the ``call``-th on: the host was ahead of the device in the one measured. One
        long kernel at its end may do for that, which shows soon.
        """
        if not self._agree("busy", self._sample is not None and self._sample.is_ahead()):
            return False
        assert self._sample is not None
        assert self._start is not None
        self._until = self._start + _WAY * self._sample.host / SHARE
        self._first = call
        return True

    @property
    def waits(self) -> bool:
        """Whether steps wait, since :meth:`begins_to_wait` has said so."""
        return self._first is not None

    def is_over(self, call: int) -> bool:
        """Whether they have waited long enough, or the device has gaps after all; asked before each call."""
        assert self._first is not None
        assert self._sample is not None
        waited = call - self._first
        if self._idleness is not None:
            # Where nobody can tell, steps are so short that the wait is short, too.
            self._shares.append(self._idleness.end() or 0.0)
            self._idleness = None
        if any(_is_turn(waited + ahead) for ahead in range(1, _WATCHED + 1)):
            self._idleness = Idleness(self._sample.stream)
        if not _is_turn(waited):
            return False
        # A validation after one of the steps has their stream idle, too.
        idle = min(self._shares)
        self._shares = []
        return not self._agree(f"busy after {waited}", idle <= _MOST_IDLE and perf_counter() < self._until)

    def close(self) -> None:
        """End what it may have begun."""
        if self._idleness is not None:
            self._idleness.end()

    def _agree(self, question: str, answer: bool) -> bool:
        return answer if self._peers is None else self._peers.all_say(question, answer)
