"""Whether a step is to wait with its program, since there is next to nothing to gain.

Where the device cannot keep up with the host, it is busy all the time, and a replay has only the gaps between kernels
to save. What the way to a program takes (traces, a capture, checks) is lost then, and so is what kernels that can be
captured take longer than others. So the way is taken once the device turns out to wait for the host. Until then the
step is what it is without graphplan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from graphplan.step.idleness import Idleness
from graphplan.step.options import Options
from graphplan.step.peers import Peers

_WAY = 62
"""As often as in the way to a program (two traces, a capture, ten checks) the host could launch a step: GPT-2 with 124M
parameters on an H200, 1.3 s beyond the steps themselves, of which each is launched in 21 ms.
"""
_PAYS = 1000
"""Steps in which a program has to save that, or as many as there were already: a run may go on for as long again."""
_LEAST_IDLE = 0.03
"""Of each step's time, what a program has to save in any case: with the kernels that AdamW is prepared to use
(capturable=True), GPT-2's step takes the device 4 % longer.
"""
_MAY_BE_IDLE = 0.5
"""The same, of the one step that comes before: it tells little, and to watch three more costs four that are eager."""
_WATCHED = 3
"""Steps that are watched before it is decided again."""
_OFTEN = 1024
"""At most so many steps go by until it is decided again."""
Result = TypeVar("Result")


def _is_turn(waited: int) -> bool:
    """Whether it is decided again after so many calls that wait: 4, 8, 16, ... 1024, and every 1024."""
    return waited % _OFTEN == 0 if waited >= _OFTEN else waited >= 4 and waited & (waited - 1) == 0


def _pays(idle: float, calls: int) -> bool:
    """Whether a program is worth the way to it, if a replay could save ``idle`` of each step's time."""
    return idle > max(_WAY / max(_PAYS, calls), _LEAST_IDLE)


class Pace:
    """Watches an eager step, and says for how long steps are to wait after it. With ``peers`` all ranks wait, or none:
    a device waits for the slowest of them.
    """

    def __init__(self, options: Options, peers: Peers | None) -> None:
        self._options = options
        self._peers = peers
        self._stream: torch.cuda.Stream | None = None
        self._first: int | None = None
        self._idleness: Idleness | None = None
        self._shares: list[float] = []

    def watched(self, call: Callable[[], Result], device: torch.device) -> Result:
        """The result of ``call``, an eager step on the current stream of ``device``, which is looked at until the next
        step; where none waits, as it is.
        """
        if not self._options.is_paced(device):
            return call()
        self.close()
        self._stream = torch.cuda.current_stream(device)
        self._idleness = Idleness(self._stream)
        return call()

    def begins_to_wait(self, call: int) -> bool:
        """Whether steps are to wait from the ``call``-th on: the device was busy for most of the one watched."""
        idle = self._ended()
        if not self._agree("busy", idle is not None and idle <= _MAY_BE_IDLE):
            return False
        self._first = call
        return True

    @property
    def waits(self) -> bool:
        """Whether steps wait, since :meth:`begins_to_wait` has said so."""
        return self._first is not None

    def is_over(self, call: int) -> bool:
        """Whether they have waited long enough, since the device has gaps after all; asked before each call."""
        assert self._first is not None
        assert self._stream is not None
        waited = call - self._first
        idle = self._ended()
        if idle is not None:
            self._shares.append(idle)
        if any(_is_turn(waited + ahead) for ahead in range(1, _WATCHED + 1)):
            self._idleness = Idleness(self._stream)
        if not _is_turn(waited):
            return False
        # A validation after one of the steps has their stream idle, too.
        least, self._shares = min(self._shares), []
        return not self._agree(f"busy after {waited}", not _pays(least, call))

    def close(self) -> None:
        """End what it may have begun."""
        self._ended()

    def _ended(self) -> float | None:
        """For what part of the time that is watched the device had nothing to do; None if nobody watches."""
        idleness, self._idleness = self._idleness, None
        return None if idleness is None else idleness.end()

    def _agree(self, question: str, answer: bool) -> bool:
        return answer if self._peers is None else self._peers.all_say(question, answer)
