"""Replays of a program that is ready: plain ones, and those that are checked against the eager step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from graphplan.backend import first_line
from graphplan.errors import CheckMemoryError, PeerError, VerifyError
from graphplan.fed import Fed
from graphplan.owners import Walk
from graphplan.program import NO_CHECK, Program, settle_companions
from graphplan.signature import Feed
from graphplan.step.options import Options
from graphplan.step.peers import Peers
from graphplan.step.runner import Runner
from graphplan.verify import Noise, Timetable, Verdict, check_replay, detached, find_room


class Replays:
    """Replays programs, checks replays, and counts both."""

    def __init__(self, runner: Runner, options: Options, peers: Peers | None) -> None:
        self._runner = runner
        self._peers = peers
        self._options = options
        self._stats = runner.stats
        self._asked = 0
        self._noises: WeakKeyDictionary[Program, Noise] = WeakKeyDictionary()
        self._timetables: WeakKeyDictionary[Program, Timetable] = WeakKeyDictionary()

    def replay(self, program: Program, leaves: Sequence[Any]) -> Any:
        """One replay."""
        settle_companions()
        start = perf_counter()
        if self._options.debug_eager:
            result = self._runner.run(lambda: program.run_eagerly(leaves))
        else:
            result = program.run(leaves)
        try:
            end = perf_counter()
            if self._options.debug and not program.replays:
                program.wait("its first replay")
            self._stats.count_replay(start, end, program.bytes_per_replay, first=not program.replays)
            program.replays += 1
            program.leave()
        except Exception:
            self._runner.outcome = (result,)
            raise
        return result

    def check(self, program: Program, feed: Feed) -> tuple[Any, VerifyError | None]:
        """A replay that is checked against eager, where there is room for that; then eager's outcome stands.

        Raises:
            PeerError: before anything runs, if another rank has found its program wrong, or cannot go on otherwise.
            CheckMemoryError: if the eager step has no room, and other ranks run it as well.
        """
        number = program.replays + 1
        device = self._runner.device
        assert device is not None
        assert self._runner.backend is not None
        nbytes = program.count_state_bytes()
        room, reason = find_room(nbytes, device, self._runner.backend.may_take)
        if program.plan.communicates:
            reason = self._ask_peers(reason)
        if room is None or reason:
            return self._unchecked(program, feed, reason)
        self._asked = 0
        timetable = self._timetable(program)
        timetable.begin(number)
        fed = Fed.of(feed).watch()
        try:
            with self._stats.timed("verify"):
                verdict = check_replay(
                    program,
                    feed.leaves,
                    partial(self._eager, program, fed, feed.leaves),
                    allow=self._options.allow,
                    device=room,
                    on_any=self._on_any if program.plan.communicates else bool,
                    noise=self._noises.setdefault(program, Noise()),
                )
        except (torch.OutOfMemoryError, PeerError) as error:
            fed.restore()
            return self._unchecked(program, feed, first_line(error))
        if verdict.differences:
            return verdict.result, _disagreement(program, number, verdict)
        change = fed.change()
        if change is not None:
            text = f"replay {number} of {program.plan.name} is not what the eager step does: {change}"
            return verdict.result, VerifyError(text, result=verdict.result)
        program.next_check = timetable.end(number)
        program.replays += 1
        self._stats.replayed += 1
        self._stats.launches_replayed += 1
        self._stats.bytes_copied += program.bytes_per_replay
        self._stats.launches_eager += program.plan.launches
        if verdict.open:
            self._stop_checks(program, verdict.open)
        else:
            self._stats.verified += 1
            self._stats.bytes_verified = nbytes
        self._stats.end_call("verified")
        return verdict.result, None

    def _timetable(self, program: Program) -> Timetable:
        """When ``program`` is checked, on all ranks in the same steps if it communicates."""
        if program not in self._timetables:
            agree = self._agree_on if program.plan.communicates else int
            self._timetables[program] = Timetable(self._options.schedule, program.plan.device, agree)
        return self._timetables[program]

    def _agree_on(self, following: int) -> int:
        assert self._peers is not None
        return self._peers.settle(f"after check {self._stats.calls}", following)

    def _ask_peers(self, reason: str) -> str:
        """Why this check cannot be, if so: it communicates twice, and every rank has to do that in the same step."""
        if self._peers is None:
            return "the step communicates with other ranks, which a check on one of them would keep waiting"
        can = self._peers.vote(f"check {self._stats.calls}", not reason)
        if can is None:
            self._peers.check()
            return reason or "the ranks do not check the same steps"
        return reason or ("" if can else "another rank has no room for a check")

    def _eager(self, program: Program, fed: Fed, leaves: Sequence[Any], walk: Callable[[], Walk]) -> Any:
        """The eager step of a check. ``walk`` leads to what its owners hold afterwards."""
        try:
            result = self._runner.run(lambda: detached(self._runner.call(fed)), between=(program, leaves, walk))
            self._runner.outcome = (result,)
            return result
        except torch.OutOfMemoryError as error:
            if not program.plan.communicates:
                raise
            raise CheckMemoryError(
                f"{first_line(error)}: in the eager step that {program.plan.name} was checked with, whose collectives "
                "other ranks wait for. A check needs room for an eager step beside the program; make the batch "
                "smaller, or leave checks out with verify='off'"
            ) from error

    def _on_any(self, says: bool) -> bool:
        """Whether it is so on any rank that checks.

        Raises:
            PeerError: if one has left the check, for want of memory: a replay here would wait for its next step.
        """
        assert self._peers is not None
        self._asked += 1
        is_none = self._peers.vote(f"check {self._stats.calls} {self._asked}", not says, together=True)
        if is_none is None:
            raise PeerError("another rank has left the check")
        return not is_none

    def _unchecked(self, program: Program, feed: Feed, reason: str) -> tuple[Any, None]:
        self._stop_checks(program, reason)
        return self.replay(program, feed.leaves), None

    def _stop_checks(self, program: Program, reason: str) -> None:
        """Go on without checks of this program, and say so."""
        program.next_check = NO_CHECK
        self._stats.note(f"not checked against eager: {reason}")


def _disagreement(program: Program, number: int, verdict: Verdict) -> VerifyError:
    first, *others = verdict.differences
    # Nobody compared those between two checks.
    past = "; replays since the check before it may have gone wrong unseen" if number > 1 else ", nothing is lost"
    more = f" (and {len(others)} more: {', '.join(d.path for d in others[:4])})" if others else ""
    return VerifyError(
        f"replay {number} of {program.plan.name} is not what the eager step does: {first}{more}. Something that the "
        "step depends on is not in the recording: a Python or NumPy value that changes where graphplan cannot see it, "
        "an operator that writes memory unseen, or host code. Hold it in a tensor that the step updates, feed it, or "
        f"keep the step eager. The eager step's outcome stands{past}",
        result=verdict.result,
    )
