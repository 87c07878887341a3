"""The stages on the way to a program: eager warm-up, two traces, plan, capture.

Each is a real step on the batch it is given. A trace or a capture that is refused is undone; whether the refusal then
raises or the step goes on eagerly is decided here too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphplan.backend import Backend, resolve_backend
from graphplan.buffers import Buffers
from graphplan.compiler import build_plan, find_device
from graphplan.cudagraph import CUDAGraphBackend
from graphplan.errors import DeviceError, RefusalError, SkipReason, VerifyError
from graphplan.owners import Snapshot, is_optimizer_state
from graphplan.plan import Plan
from graphplan.program import NO_CHECK, Program, capture_program
from graphplan.signature import Feed, check_feed
from graphplan.stats import Stats
from graphplan.step.entry import Entry, Line
from graphplan.step.managed import Managed
from graphplan.step.options import Options
from graphplan.tape import TapeBackend
from graphplan.tracer import Trace, trace
from graphplan.verify import Schedule, Verdict, check_replay, find_room


class Stages:
    """Runs steps eagerly, traced or captured, and counts them."""

    def __init__(self, fn: Callable[..., Any], managed: Managed, options: Options, buffers: Buffers) -> None:
        self._fn = fn
        self._managed = managed
        self._options = options
        self._buffers = buffers
        self._backend: Backend | None = None
        self._warned: set[str] = set()
        self.stats = Stats()
        self.device: torch.device | None = None
        self.plan: Plan | None = None
        self.escalate: Callable[[RefusalError], bool] = self._escalates

    def _call(self, feed: Feed) -> Any:
        args, kwargs = feed.rebuild(feed.leaves)
        return self._fn(*args, **kwargs)

    def _run(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` as every managed step runs: on the backend's stream, with device learning rates."""
        with self._managed.rates:
            return self._backend.run(body) if self._backend is not None else body()

    def eager(self, feed: Feed, reason: SkipReason, detail: str = "") -> Any:
        """An eager step as managed ones run, counted under ``reason``."""
        result = self._run(lambda: self._call(feed))
        self.count_eager(reason, detail)
        return result

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: SkipReason, detail: str = "") -> Any:
        """An eager step on arguments as they came, with nothing of ours around it."""
        result = self._fn(*args, **kwargs)
        self.count_eager(reason, detail)
        return result

    def count_eager(self, reason: SkipReason, detail: str = "") -> None:
        """Count an eager call that has returned."""
        self.stats.eager += 1
        self.stats.end_call("eager")
        self.stats.skip(reason, detail)
        if self.plan is not None:
            self.stats.launches_eager += self.plan.launches

    def warm_up(self, entry: Entry, feed: Feed) -> Any:
        """An eager step that takes in the owners that it turns out to use."""
        self.settle_backend(feed)
        with self.stats.timed("warmup"):
            result = self._run(lambda: self._managed.discover_all(lambda: self._call(feed)))
        self._managed.refresh()
        entry.eager_calls += 1
        self.stats.eager += 1
        self.stats.end_call("eager")
        if self._managed.unborn:
            self.stats.skip(SkipReason.UNBORN)
            return result
        entry.warm += 1
        if self.stats.captured:
            self.stats.skip(SkipReason.SHAPE)
        return result

    def settle_backend(self, feed: Feed) -> None:
        """Choose device and backend once the owners' and the feed's tensors show where the step computes."""
        if self._backend is not None:
            return
        device = find_device(self._managed.owners, feed)
        name = resolve_backend(self._options.backend, device)
        check_feed(feed, device)
        self.device = device
        self._backend = TapeBackend() if name == "tape" else CUDAGraphBackend(device)

    def advance(self, entry: Entry, feed: Feed) -> Any:
        """A trace, or with a plan in hand the capture, as a transaction."""
        line = entry.lines.setdefault(self._managed.grad_presence(), Line())
        walk = self._managed.walk()
        gone = next((path for path in line.state if path not in walk.slots), None)
        if gone is not None:
            # A recording would make it anew in every replay.
            self.stats.note(f"traced anew: {gone} is gone, which only an eager step can make")
            del entry.lines[self._managed.grad_presence()]
            return self.warm_up(entry, feed)
        changed = line.plan.changed_tensors(walk) if line.plan is not None else []
        snapshot = Snapshot(walk, extra=[*changed, *(tensor for _, tensor in feed.tensors())])
        try:
            return self._trace(entry, line, feed) if line.plan is None else self._capture(entry, line, feed)
        except RefusalError as error:
            snapshot.restore()
            self.refuse(error)
            entry.refusal = error
            return self.eager(feed, error.reason, str(error))
        except BaseException:
            snapshot.restore()
            raise

    def _trace(self, entry: Entry, line: Line, feed: Feed) -> Any:
        with self.stats.timed("trace"):
            body = lambda: trace(self._fn, feed, owners=self._managed.owners, device=self.device)  # noqa: E731
            result, facts = self._run(lambda: self._managed.discover(body))
            try:
                self._take(entry, line, feed, facts)
            except RefusalError as error:
                if self.escalate(error):
                    facts.undo_unowned_writes()
                # The step is done and is a good eager step: unless the refusal is to be raised, it stands.
                self.refuse(error)
                entry.refusal = error
                self.stats.skip(error.reason, str(error))
        entry.eager_calls += 1
        self.stats.traced += 1
        self.stats.end_call("traced")
        return result

    def _take(self, entry: Entry, line: Line, feed: Feed, facts: Trace) -> None:
        """Keep a trace; with the second one comes the plan."""
        if facts.violation is not None:
            raise facts.violation
        if self._managed.take_names(facts.ran):
            # Code ran that had not run before: what it uses was not watched yet.
            line.traces = []
            return
        line.traces.append(facts)
        line.state = [path for path in facts.entry_paths if is_optimizer_state(path)]
        if len(line.traces) < 2:
            return
        first, second = line.traces
        line.traces = []
        with self._managed.rates:
            line.plan = build_plan(
                first,
                second,
                feed,
                owners=lambda: self._managed.owners,
                function=lambda: self._fn,
                allow=self._options.allow,
                rates=self._managed.rates,
            )
        self.plan = line.plan
        self.stats.launches_eager += line.plan.launches * (entry.eager_calls + 1)

    def _capture(self, entry: Entry, line: Line, feed: Feed) -> Any:
        plan, backend = line.plan, self._backend
        assert plan is not None
        assert backend is not None
        with self.stats.timed("capture"):
            if isinstance(backend, CUDAGraphBackend):
                backend.generators = list(plan.generators)
                backend.constants = list(plan.device_constants)
            with self._managed.rates:
                program = capture_program(
                    plan, feed, policy=self._options.roles, backend=backend, buffers=self._buffers
                )
            result = program.run_recorded(feed.leaves, executed=backend.executes)
        line.program = program
        if not plan.entry_grads:
            entry.any_program = program
        self._managed.refresh()
        self._managed.captured()
        self.stats.captured += 1
        self.stats.end_call("captured")
        self.stats.launches_eager += plan.launches
        return result

    def replay(self, program: Program, feed: Feed) -> Any:
        """One replay."""
        with self.stats.timed("steady" if program.replays else "first_replay"):
            result = program.run(feed.leaves)
        self._count_replay(program)
        self.stats.end_call("replayed")
        return result

    def _count_replay(self, program: Program) -> None:
        program.replays += 1
        self.stats.replayed += 1
        self.stats.launches_replayed += 1
        self.stats.bytes_copied += program.bytes_per_replay

    def check(self, program: Program, feed: Feed, schedule: Schedule) -> tuple[Any, VerifyError | None]:
        """A replay that is checked against eager, where there is room for that; then eager's outcome stands."""
        number = program.replays + 1
        program.next_check = schedule.after(number)
        assert self.device is not None
        room, reason = find_room(program.state_bytes, self.device)
        if room is None:
            return self._unchecked(program, feed, reason)
        try:
            with self.stats.timed("verify"):
                eager = lambda: self._run(lambda: self._call(feed))  # noqa: E731
                verdict = check_replay(program, feed.leaves, eager, allow=self._options.allow, device=room)
        except torch.OutOfMemoryError as error:
            return self._unchecked(program, feed, str(error).splitlines()[0])
        if verdict.differences:
            return verdict.result, _disagreement(program, number, verdict)
        self._count_replay(program)
        self.stats.launches_eager += program.plan.launches
        self.stats.verified += 1
        self.stats.bytes_verified = program.state_bytes
        self.stats.end_call("verified")
        return verdict.result, None

    def _unchecked(self, program: Program, feed: Feed, reason: str) -> tuple[Any, None]:
        """Go on without checks of this program, and say so."""
        program.next_check = NO_CHECK
        self.stats.note(f"not checked against eager: {reason}")
        return self.replay(program, feed), None

    def _escalates(self, error: RefusalError) -> bool:
        """Whether a refusal is the caller's affair: before the first good replay, if asked for."""
        return self._options.on_failure == "raise" and self.stats.replayed == 0

    def refuse(self, error: RefusalError) -> None:
        """Raise if the refusal escalates, else warn once."""
        if isinstance(error, DeviceError) or self.escalate(error):
            raise error
        text = str(error)
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"graphplan runs this step eagerly: {text}", UserWarning, stacklevel=5)


def _disagreement(program: Program, number: int, verdict: Verdict) -> VerifyError:
    first, *others = verdict.differences
    more = f" (and {len(others)} more: {', '.join(d.path for d in others[:4])})" if others else ""
    return VerifyError(
        f"replay {number} of {program.plan.name} is not what the eager step does: {first}{more}. Something that the "
        "step depends on is not in the recording: a Python or NumPy value that changes where graphplan cannot see it, "
        "an operator that writes memory unseen, or host code. Hold it in a tensor that the step updates, feed it, or "
        "keep the step eager. The eager step's outcome stands, nothing is lost",
        result=verdict.result,
    )
