"""Replays of programs, with or without a check against the eager step."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from graphplan.backends.backend import first_line
from graphplan.errors import CheckMemoryError, OutcomeError, PeerError, RefusalError, VerifyError
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import Feed
from graphplan.owners.slots import Walk
from graphplan.plan.difference import check_operators
from graphplan.program.program import Program, ReplayCount
from graphplan.report.stats import STARTING, Stats
from graphplan.step.memory_budget import find_room, room_beside
from graphplan.step.runner import StepContext
from graphplan.tensors.copying import COMPARISON, FEW
from graphplan.trace.batch_reads import answers_in
from graphplan.trace.repeated_operators import RepeatedOperators
from graphplan.verify.check import Check, Verdict, detached
from graphplan.verify.schedule import Timetable, next_check

_UNPROVEN = "the first replay after a single trace could not be checked"
_LATEST = 2  # Latest captures whose check schedule continues after a recapture.


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of a replay that was due for a check: the call's ``result``, and the ``error`` if it was wrong.

    ``is_inconclusive``: the program comes from a single trace, and the check did not prove it correct. The step is
    traced twice instead. If those traces show no reason for a refusal, it is refused for any ``single_trace_error``.
    """

    result: Any
    error: VerifyError | None = None
    single_trace_error: RefusalError | None = None
    is_inconclusive: bool = False


class _CheckSchedule(ReplayCount):
    """The check schedule of programs of one form, checked as often as one program, and each at its ``first`` replay."""

    def __init__(self, timetable: Timetable, first: int) -> None:
        super().__init__(first)
        self.timetable = timetable
        self._first = first
        self._checked: WeakKeyDictionary[Program, int] = WeakKeyDictionary()

    def is_due(self, program: Program) -> bool:
        """Return True if ``program``'s next replay is checked: a check is due, and it is its turn or one is overdue."""
        number = self.replays + 1
        if program not in self._checked:
            return number >= self._first
        latest = [number for known, number in self._checked.items() if known.is_open]
        is_overdue = number > self.due + len(latest)
        return number >= self.due and (is_overdue or self._checked[program] == min(latest))

    def note(self, program: Program, number: int, stats: Stats) -> None:
        self._checked[program] = number
        if number >= self.due:
            step_us = stats.step_us("eager") or stats.shortest * 1e6
            spent = stats.spent(step_us, STARTING[1:])
            self.due = self.timetable.end(number, step_us / 1e6, stats.phases["verify"], spent)


class Replays:
    """The replays of one step: runs, checks and counts them."""

    def __init__(self, parts: StepContext) -> None:
        self._runner, self._options, self._peers = parts.runner, parts.options, parts.peers
        self._stats = parts.runner.stats
        self._asked = 0
        self._by_form: WeakValueDictionary[int, _CheckSchedule] = WeakValueDictionary()
        # Keeps the latest series alive after their programs are closed, for programs that are captured again.
        self._latest: deque[_CheckSchedule] = deque(maxlen=_LATEST)

    def replay(self, program: Program, leaves: Sequence[Any]) -> Any:
        """Replay once. Raises OutcomeError if a branch changed; the replay is undone then."""
        start = perf_counter()
        result = program.run(leaves)
        try:
            end = perf_counter()
            if self._options.debug and not program.replays:
                program.wait("its first replay")
            self._stats.count_replay(start, end, program.bytes_per_replay, first=not program.replays)
            self._count(program)
        except Exception:
            self._runner.outcome = (result,)
            raise
        return result

    def instead(self, program: Program, feed: Feed, outcome: OutcomeError) -> Any:
        """Run the step eagerly in place of a replay that ended with ``outcome``."""
        result = self._between(program, CallArguments.of(feed), feed.leaves, program.plan.handles.walk)
        self._runner.count_eager(outcome.reason, str(outcome))
        return result

    def _count(self, program: Program) -> None:
        program.replays += 1
        program.replay_count.replays += 1

    def is_due(self, program: Program) -> bool:
        """Return True if the next replay of ``program`` is to be checked."""
        return isinstance(program.replay_count, _CheckSchedule) and program.replay_count.is_due(program)

    def check(self, program: Program, feed: Feed) -> Checked | None:
        """Replay and compare with the eager step, whose outcome stands. If a check is impossible, only replay, or
        return None if the program is unproven. Raises OutcomeError and PeerError with everything undone, and
        CheckMemoryError if memory runs out in an eager step that other ranks run as well.
        """
        nbytes = program.count_state_bytes()
        room, reason = find_room(nbytes, program.plan.device, self._runner.backend.may_take)
        if program.plan.communicates:
            reason = self._ask_peers(reason)
        if room is None or reason:
            return self._unchecked(program, feed, reason)
        self._asked = 0
        series = program.replay_count
        assert isinstance(series, _CheckSchedule)
        number = series.replays + 1
        series.timetable.begin(number)
        fed = CallArguments.of(feed).watch()
        repeated = None
        if program.needs_first_check:
            repeated = RepeatedOperators(program.expected, answers_in(fed.kwargs), program.numbers)
        try:
            with self._stats.timed("verify"):
                place = partial(self._place, program, nbytes, room)
                verdict = self._compare(program, fed, feed.leaves, place, repeated)
        except (torch.OutOfMemoryError, PeerError) as error:
            # The traceback's frames hold the check's copies, and gradients, which a replay would take for kept.
            traceback.clear_frames(error.__traceback__)
            reason = first_line(error)
        if reason:
            fed.restore()
            return self._unchecked(program, feed, reason)
        unlike = None if repeated is None else _unlike(repeated)
        if program.needs_first_check and (unlike is not None or verdict.open or verdict.differences):
            wrong = _disagreement(program, verdict) if verdict.differences else None
            self._stats.note(f"traced anew: {unlike or wrong or f'{_UNPROVEN} ({verdict.open})'}", "traces")
            return Checked(verdict.result, single_trace_error=wrong and (unlike or wrong), is_inconclusive=True)
        if verdict.differences:
            return Checked(verdict.result, _disagreement(program, verdict, verdict.result))
        change = fed.change()
        if change is not None:
            text = f"replay {program.replays + 1} of {program.plan.name} is not what the eager step does: {change}"
            return Checked(verdict.result, VerifyError(text, result=verdict.result))
        program.expected, program.numbers = (), {}
        self._stats.shortest = min(self._stats.shortest, verdict.seconds)
        series.note(program, number, self._stats)
        self._count(program)
        self._stats.replayed += 1
        self._stats.bytes_copied += program.bytes_per_replay
        if verdict.open:
            self._stop_checks(program, verdict.open)
        else:
            self._stats.verified += 1
            self._stats.bytes_verified = nbytes
        self._stats.end_call("verified")
        return Checked(verdict.result)

    def _compare(
        self,
        program: Program,
        fed: CallArguments,
        leaves: Sequence[Any],
        place: Callable[[], tuple[torch.device, float]],
        repeated: RepeatedOperators | None,
    ) -> Verdict:
        on_any = self._on_any if program.plan.communicates else bool
        check = Check(program, leaves, allow=self._options.allow, place=place, on_any=on_any)
        return check.run(partial(self._eager, program, fed, leaves, repeated))

    def begin(self, program: Program) -> None:
        """Add a program to the check schedule of its form. If it communicates, all ranks check in the same steps."""
        plan, every, peers = program.plan, self._options.check_every, self._peers
        agree: Callable[[int], int] = int
        if peers is not None and plan.communicates:
            agree = lambda number: peers.settle(f"after check {self._stats.calls}", number)  # noqa: E731
        timetable = Timetable(every, plan.device, agree)
        series = _CheckSchedule(timetable, next_check(every, 0))
        if every is None:
            series = self._by_form.setdefault(plan.form, series)
            self._latest.append(series)
        program.replay_count = series

    def _ask_peers(self, reason: str) -> str:
        """Return why this check is impossible, or "". It repeats collectives, so all ranks must check the same step."""
        if self._peers is None:
            return "the step communicates with other ranks, and a check on one rank would keep them waiting"
        can = self._peers.vote(f"check {self._stats.calls}", not reason)
        if can is None:
            self._peers.check()
            return reason or "the ranks do not check the same steps"
        return reason or ("" if can else "another rank has no room for a check")

    def _eager(
        self,
        program: Program,
        fed: CallArguments,
        leaves: Sequence[Any],
        repeated: RepeatedOperators | None,
        walk: Callable[[], Walk],
    ) -> Any:
        """Run the eager step of a check under ``repeated``. ``walk`` walks the owners as they are after the step."""
        try:
            return self._between(program, fed, leaves, walk, repeated)
        except torch.OutOfMemoryError as error:
            if not program.plan.communicates:
                raise
            raise CheckMemoryError(
                f"{first_line(error)}: the eager step of a check of {program.plan.name} failed, and other ranks wait "
                "for its collectives. A check needs memory for an eager step beside the program; make the batch "
                "smaller, or turn checks off with verify='off'"
            ) from error

    def _between(
        self,
        program: Program,
        fed: CallArguments,
        leaves: Sequence[Any],
        walk: Callable[[], Walk],
        repeated: RepeatedOperators | None = None,
    ) -> Any:
        """Run the step eagerly between two replays of ``program``."""

        def call() -> Any:
            with repeated or nullcontext():
                result = self._runner.call(fed)
            return detached(result)

        result = self._runner.run(call, within=partial(program.run_between, self._runner.backend, leaves, walk))
        self._runner.outcome = (result,)
        return result

    def _on_any(self, says: bool) -> bool:
        """Return True if any rank ``says`` so. Raises PeerError if one has left the check because of lack of memory."""
        assert self._peers is not None
        self._asked += 1
        is_none = self._peers.vote(f"check {self._stats.calls} {self._asked}", not says, together=True)
        if is_none is None:
            raise PeerError("another rank has left the check")
        return not is_none

    def _place(self, program: Program, nbytes: int, room: torch.device) -> tuple[torch.device, float]:
        """The device for a check's next copy, and how many bytes of the copy stay on the program's device if the rest
        goes to the host: pinned memory is slow to allocate, and not all copies need it.
        """
        backend, device = self._runner.backend, program.plan.device
        # The eager step makes gradients beside those of the program. Few bytes are compared on the host.
        taken = program.bindings.gradient_bytes + (COMPARISON if nbytes > FEW else 0)
        place = find_room(nbytes, device, lambda more: backend.may_take(more + taken), copies=1)[0] or room
        # Leave memory for the eager step, and for comparing the copies, which needs less than the copies take.
        rest = program.plan.footprint.peak + nbytes
        return place, 0 if place == device else room_beside(device, backend, taken, rest)

    def _unchecked(self, program: Program, feed: Feed, reason: str) -> Checked | None:
        """Replay without the check that is due; None if the program is unproven and must not be replayed unchecked."""
        if program.needs_first_check:
            self._stats.note(f"traced anew: {_UNPROVEN} ({reason})", "traces")
            return None
        self._stop_checks(program, reason)
        # A check that began has undone it.
        program.adopted.renew()
        return Checked(self.replay(program, feed.leaves))

    def _stop_checks(self, program: Program, reason: str) -> None:
        program.replay_count = ReplayCount()
        self._stats.note(f"not checked against eager: {reason}", "checks")


def _unlike(repeated: RepeatedOperators) -> RefusalError | None:
    """The error if the eager step ran other operators than the traced step, or with other numbers; else None."""
    repeated.faults.check()
    try:
        for _ in check_operators(repeated.expected, repeated.found):
            pass
    except RefusalError as error:
        return error.with_traceback(None)
    return None


def _disagreement(program: Program, verdict: Verdict, result: Any = None) -> VerifyError:
    number = program.replays + 1
    (first, text), *others = verdict.differences.items()
    # Replays between two checks are not compared, so earlier ones may have been wrong, too.
    past = "; replays since the previous check may also have differed" if number > 1 else ", nothing is lost"
    more = f" (and {len(others)} more: {', '.join(path for path, _ in others[:4])})" if others else ""
    return VerifyError(
        f"replay {number} of {program.plan.name} is not what the eager step does: {first}: {text}{more}. The step "
        "depends on something that is not in the recording: a Python or NumPy value that changes where graphplan "
        "cannot see it, an operator that writes memory unseen, or host code. Keep the value in a tensor that the step "
        f"updates, pass it as an argument, or run the step eagerly. The eager step's outcome stands{past}",
        result=result,
    )
