"""Whether a step is to wait with its program, since there is next to nothing to gain.

Where the device cannot keep up with the host, it is busy all the time, and a replay has only the gaps between kernels
to save. What the way to a program takes (traces, a capture, checks) is lost then, and so is what kernels that can be
captured take longer than others. So the way is taken once the device turns out to wait for the host. Until then steps
are eager, and once the device has turned out to be busy, they run the user's own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from graphplan.cudagraph import CUDAGraphBackend
from graphplan.idleness import Idleness, Queue
from graphplan.step.managed import Managed
from graphplan.step.options import Options
from graphplan.step.peers import Peers
from graphplan.step.runner import Runner

_WAY = 62
"""As often as in the way to a program (two traces, a capture, ten checks) the host could launch a step: GPT-2 with 124M
parameters on an H200, 1.3 s beyond the steps themselves, of which each is launched in 21 ms.
"""
_PAYS = 1000
"""Steps in which a program has to save that."""
_MOST_IDLE = _WAY / _PAYS
"""Of each step's time, what the device may have nothing to do in, since replays would save that."""
_WATCHED = 3
"""Steps that are watched before it is decided. The middle one of them counts: a validation may come after one."""
_FIRST = 5
"""Steps up to the first decision, which is asked for after one less."""
_PATIENCE = 1.0
"""Seconds that a rank waits for what the others say: one that is not heard may as well have said no."""
_OFTEN = 256
"""As many times that are the most steps up to the next decision."""


def _is_turn(waited: int) -> bool:
    """Whether it is decided after so many calls that wait: 4, 9, 19, 39, ... 1279, and every 1280. Of two kinds of call
    that alternate, now one is in the middle of those watched and now the other.
    """
    times, rest = divmod(waited + 1, _FIRST)
    return rest == 0 and (times % _OFTEN == 0 or times & (times - 1) == 0)


class Pace:
    """Says for how long the step is to wait whose calls ``runner`` runs. With ``peers`` all ranks wait, or none: a
    device waits for the slowest of them.
    """

    def __init__(self, options: Options, runner: Runner, managed: Managed, peers: Peers | None) -> None:
        self._options = options
        self._runner = runner
        self._managed = managed
        self._peers = peers
        self._first: int | None = None
        self._watch: Idleness | None = None
        self._shares: list[float] = []

    @property
    def waits(self) -> bool:
        """Whether steps wait, since :meth:`begins` has said so."""
        return self._first is not None

    def begins(self, call: int) -> bool:
        """Whether steps wait from the ``call``-th on, to see what there is to gain: on all ranks from the same one."""
        device = self._runner.device
        assert device is not None
        if not self._options.is_paced(device) or not self._agree(f"wait from {call}", True):
            return False
        self._first = call
        return True

    def is_over(self, call: int) -> bool:
        """Whether the wait ends with the ``call``-th, as the device waits for the host; asked before each. If it is to
        go on, the optimizers become what they were, unless runs are to be repeatable: when the kernels would change is
        a matter of time.
        """
        if self._first is None:
            return False
        waited = call - self._first
        share = self._ended()
        if share is not None:
            self._shares.append(share)
        if any(_is_turn(waited + ahead) for ahead in range(1, _WATCHED + 1)):
            self._watch = Idleness(self._streams())
        if not _is_turn(waited):
            return False
        share, self._shares = median(self._shares), []
        if self._agree(f"wait after {call}", share <= _MOST_IDLE):
            if not torch.are_deterministic_algorithms_enabled():
                self._managed.pause()
            return False
        self._managed.resume()
        return True

    def close(self) -> None:
        """End what it may have begun."""
        self._ended()

    def _streams(self) -> Sequence[Queue]:
        """Where steps are, and whoever calls them: some of them compute in part there."""
        current = torch.cuda.current_stream(self._runner.device)
        backend = self._runner.backend
        return [current, backend.stream] if isinstance(backend, CUDAGraphBackend) else [current]

    def _ended(self) -> float | None:
        """For what part of the time that was watched the device had nothing to do; None if nobody watched."""
        watch, self._watch = self._watch, None
        return None if watch is None else watch.end()

    def _agree(self, question: str, answer: bool) -> bool:
        return answer if self._peers is None else self._peers.vote(question, answer, _PATIENCE) is True
