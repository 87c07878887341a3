"""The state machine of a graphed step: eager warm-up, two traces, one capture, then replays; per key.

Every one of these is a real step on the batch it is given: nothing is run twice. A refusal before the first good replay
raises and undoes its call; after it the key is demoted to eager with one warning, so that nobody loses a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from graphplan.backend import Backend, check_backend, resolve_backend
from graphplan.buffers import Buffers
from graphplan.compiler import build_plan, find_device
from graphplan.cudagraph import CUDAGraphBackend
from graphplan.errors import ClosedError, DeviceError, FeedError, OptionError, PolicyError, RefusalError, SkipReason
from graphplan.owners import Snapshot
from graphplan.plan import Plan
from graphplan.policy import Policy, check_mode
from graphplan.program import Program, capture_program
from graphplan.signature import Feed, check_feed, flatten
from graphplan.stats import Stats
from graphplan.step.entry import Entry, Line, Phase
from graphplan.step.managed import Managed
from graphplan.tape import TapeBackend
from graphplan.tracer import Trace, trace

EagerIf = Callable[..., bool] | int | None


class GraphedStep:
    """A step that replays itself. Made by :func:`graph_step`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        owners: Mapping[str, Any] | Sequence[Any] | None = None,
        mode: str = "train",
        policy: Policy | None = None,
        backend: str = "auto",
        device: str | torch.device | None = None,
        warmup_steps: int = 3,
        on_failure: str = "raise",
        allow: Sequence[str] = (),
        eager_if: EagerIf = None,
        prepare_optimizers: bool = True,
        max_graphs: int = 16,
    ) -> None:
        check_options(warmup_steps, on_failure, allow, eager_if, max_graphs)
        if not callable(fn):
            raise OptionError(f"the step is a {type(fn).__name__}; expected a function or another callable")
        if policy is not None and not isinstance(policy, Policy):
            raise PolicyError(f"policy is {policy!r}; expected a Policy, such as Policy.train()")
        self._fn = fn
        self._policy = policy or Policy.of_mode(check_mode(mode))
        self._backend_name = check_backend(backend)
        self._feed_device = torch.device(device) if device is not None else None
        self._warmup_steps = warmup_steps
        self._raises = on_failure == "raise"
        self.escalate: Callable[[RefusalError], bool] = self._escalates
        self._allow = tuple(allow)
        self._eager_if = eager_if
        self._max_graphs = max_graphs
        self.managed = Managed(fn, owners, prepare=prepare_optimizers and backend != "eager")
        self.stats = Stats()
        self.plan: Plan | None = None
        self._backend: Backend | None = None
        self._device: torch.device | None = None
        self._entries: dict[Any, Entry] = {}
        self._captured_feeds: set[Any] = set()
        self._buffers = Buffers(self._on_growth)
        self._warned: set[str] = set()
        self._calls = 0
        self._closed = False
        self._demoted: RefusalError | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step: eagerly, traced, captured or replayed. Same results whichever it is."""
        if self._closed:
            raise ClosedError("this step was closed; make a new one with graph_step")
        self._calls += 1
        feed = flatten(args, kwargs)
        if self._backend_name == "eager":
            return self._eager(feed, SkipReason.BACKEND_EAGER, managed=False)
        if self._eager_if is not None and self._asks_eager(args, kwargs):
            return self._eager(self._moved(feed), SkipReason.EAGER_IF)
        if self._demoted is None and self.managed.refusal is not None:
            self._demote(self.managed.refusal)
        if self._demoted is not None:
            return self._eager(self._moved(feed), self._demoted.reason, str(self._demoted))
        try:
            entry = self._entry(feed)
        except RefusalError as error:
            self._demote(error)
            return self._eager(self._moved(feed), error.reason, str(error))
        if entry.refusal is not None:
            return self._eager(self._moved(feed), entry.refusal.reason, str(entry.refusal))  # type: ignore[attr-defined]
        program = entry.any_program
        if program is None and entry.lines:
            line = entry.lines.get(self.managed.grad_presence())
            program = line.program if line is not None else None
        if program is not None and self._ready(program, entry):
            return self._replay(program, feed)
        return self._advance(entry, feed)

    @property
    def prepared(self) -> list[str]:
        """What was changed on the optimizers to make them capturable."""
        return self.managed.changes

    def _entry(self, feed: Feed) -> Entry:
        key = (feed.key, _environment(), self.managed.next_fingerprint())
        entry = self._entries.get(key)
        if entry is None:
            check_feed(feed, self._feed_home())
            entry = self._entries[key] = Entry()
        elif any(leaf.requires_grad for _, leaf in feed.tensors()):
            check_feed(feed, self._feed_home())
        return entry

    def _feed_home(self) -> torch.device | None:
        return None if self._feed_device is not None else self._device

    def _asks_eager(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if callable(self._eager_if):
            return bool(self._eager_if(*args, **kwargs))
        assert isinstance(self._eager_if, int)
        return (self._calls - 1) % self._eager_if == 0

    def _moved(self, feed: Feed) -> Feed:
        """The feed with its tensors on the step's device, if ``device=`` asks for that."""
        home = self._feed_device
        if home is None:
            return feed
        leaves = [leaf.to(home, non_blocking=True) if isinstance(leaf, Tensor) else leaf for leaf in feed.leaves]
        return Feed(leaves, feed.structure, feed.key)

    def _call(self, feed: Feed) -> Any:
        args, kwargs = feed.rebuild(feed.leaves)
        return self._fn(*args, **kwargs)

    def _run(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` as every managed step runs: on the backend's stream, with device learning rates."""
        with self.managed.rates:
            return self._backend.run(body) if self._backend is not None else body()

    def _eager(self, feed: Feed, reason: SkipReason, detail: str = "", *, managed: bool = True) -> Any:
        call = lambda: self._call(feed)  # noqa: E731
        result = self._run(call) if managed else call()
        self.stats.eager += 1
        self.stats.skip(reason, detail)
        if self.plan is not None:
            self.stats.launches_eager += self.plan.launches
        return result

    def _ready(self, program: Program, entry: Entry) -> bool:
        if program.guards.hold():
            return True
        reason = program.resync()
        self.managed.refresh()
        if reason is not None:
            self._note(f"recapture: {reason}")
            entry.drop()
            entry.warm = min(entry.warm, self._warmup_steps - 1)
            return False
        return True

    def _replay(self, program: Program, feed: Feed) -> Any:
        start = perf_counter()
        result = program.run(feed.leaves)
        stats = self.stats
        stats.replayed += 1
        stats.launches_replayed += 1
        stats.bytes_copied += program.bytes_per_replay
        phase = "steady" if program.has_replayed else "first_replay"
        program.has_replayed = True
        stats.add_time(phase, perf_counter() - start)
        return result

    def _advance(self, entry: Entry, feed: Feed) -> Any:
        """One step on the way to a program."""
        feed = self._moved(feed)
        if entry.warm < self._warmup_steps:
            return self._warm_up(entry, feed)
        line = entry.lines.setdefault(self.managed.grad_presence(), Line())
        if line.phase() is Phase.TRACE:
            return self._guarded(entry, feed, lambda: self._trace(entry, line, feed), values=True)
        return self._guarded(entry, feed, lambda: self._capture(entry, line, feed), values=True)

    def _warm_up(self, entry: Entry, feed: Feed) -> Any:
        self._settle_backend(feed)
        with self.stats.timed("warmup"):
            result = self._run(lambda: self.managed.discover(lambda: self._call(feed)))
        self.managed.refresh()
        if entry.warm == 0:
            self._rekey(entry, feed)
        entry.warm += 1
        entry.eager_calls += 1
        self.stats.eager += 1
        if self.stats.captured:
            self.stats.skip(SkipReason.SHAPE)
        return result

    def _rekey(self, entry: Entry, feed: Feed) -> None:
        """Put an entry made before the owners were known under the key that its next call will have."""
        self._settle_backend(feed)
        for key in [key for key, known in self._entries.items() if known is entry]:
            del self._entries[key]
        self._entries[(feed.key, _environment(), self.managed.fingerprint())] = entry

    def _settle_backend(self, feed: Feed) -> None:
        """Choose device and backend once the owners' and the feed's tensors show where the step computes."""
        if self._backend is not None:
            return
        device = find_device(self.managed.owners, feed)
        name = resolve_backend(self._backend_name, device)
        self._device = device
        check_feed(feed, device)
        self._backend = TapeBackend() if name == "tape" else CUDAGraphBackend(device)

    def _guarded(self, entry: Entry, feed: Feed, attempt: Callable[[], Any], *, values: bool) -> Any:
        """Run a trace or a capture as a transaction: a refusal undoes it, then raises or steps eagerly instead."""
        extra = [tensor for _, tensor in feed.tensors()]
        snapshot = Snapshot(self.managed.walk(), values=values, extra=extra)
        try:
            return attempt()
        except RefusalError as error:
            snapshot.restore()
            self._refuse(error)
            entry.refusal = error
            return self._eager(feed, error.reason, str(error))
        except BaseException:
            snapshot.restore()
            raise

    def _trace(self, entry: Entry, line: Line, feed: Feed) -> Any:
        with self.stats.timed("trace"):
            body = lambda: trace(self._fn, feed, owners=self.managed.owners, device=self._device)  # noqa: E731
            result, facts = self._run(lambda: self.managed.discover(body))
            try:
                self._take(entry, line, feed, facts)
            except RefusalError as error:
                if self.escalate(error):
                    facts.undo_unowned_writes()
                # The step is done and is a good eager step: unless the refusal is to be raised, it stands.
                self._refuse(error)
                entry.refusal = error
                self.stats.skip(error.reason, str(error))
        entry.eager_calls += 1
        self.stats.traced += 1
        return result

    def _take(self, entry: Entry, line: Line, feed: Feed, facts: Trace) -> None:
        """Keep a trace; with the second one comes the plan."""
        if facts.violation is not None:
            raise facts.violation
        line.traces.append(facts)
        if len(line.traces) == 2:
            self._plan(entry, line, feed)

    def _plan(self, entry: Entry, line: Line, feed: Feed) -> None:
        first, second = line.traces
        line.traces = []
        with self.managed.rates:
            line.plan = build_plan(
                first,
                second,
                feed,
                owners=lambda: self.managed.owners,
                function=lambda: self._fn,
                allow=self._allow,
                rates=self.managed.rates,
            )
        self.plan = line.plan
        self.stats.launches_eager += line.plan.launches * (entry.eager_calls + 1)

    def _capture(self, entry: Entry, line: Line, feed: Feed) -> Any:
        assert line.plan is not None
        assert self._backend is not None
        with self.stats.timed("capture"):
            backend = self._backend
            if isinstance(backend, CUDAGraphBackend):
                backend.generators = list(line.plan.generators)
                backend.constants = list(line.plan.device_constants)
            with self.managed.rates:
                program = capture_program(line.plan, feed, policy=self._policy, backend=backend, buffers=self._buffers)
            result = program.run_recorded(feed.leaves, executed=backend.executes)
        line.program = program
        if not line.plan.entry_grads:
            entry.any_program = program
        self.managed.refresh()
        self._count_capture(entry, feed, program)
        return result

    def _count_capture(self, entry: Entry, feed: Feed, program: Program) -> None:
        stats = self.stats
        stats.captured += 1
        stats.launches_eager += program.plan.launches
        if entry.recapture or feed.key in self._captured_feeds:
            stats.recaptured += 1
        entry.recapture = False
        self._captured_feeds.add(feed.key)
        self.managed.captured()
        self._evict(entry)
        stats.bytes_static = self._buffers.nbytes + sum(
            program.nbytes for other in self._entries.values() for program in other.programs()
        )

    def _evict(self, newest: Entry) -> None:
        """Keep at most ``max_graphs`` programs: the key that was made first goes first."""
        while sum(len(entry.programs()) for entry in self._entries.values()) > self._max_graphs:
            oldest = next(entry for entry in self._entries.values() if entry.programs() and entry is not newest)
            self._note("evicted: more programs than max_graphs")
            oldest.drop()

    def _on_growth(self, position: int) -> None:
        """A static input is about to be replaced by a larger one: programs that point into it go."""
        for entry in self._entries.values():
            if entry.programs():
                self._note(f"recapture: input {position} grew")
                entry.drop()

    def _escalates(self, error: RefusalError) -> bool:
        """Whether a refusal is the caller's affair: before the first good replay, if asked for."""
        return self._raises and self.stats.replayed == 0

    def _refuse(self, error: RefusalError) -> None:
        """Raise if the refusal escalates, else warn once."""
        if isinstance(error, DeviceError) or self.escalate(error):
            raise error
        text = str(error)
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"graphplan runs this step eagerly: {text}", UserWarning, stacklevel=4)

    def _demote(self, error: RefusalError) -> None:
        """Raise, or run eagerly from now on; a feed's fault is its own call's only."""
        self._refuse(error)
        if not isinstance(error, FeedError):
            self._demoted = error

    def _note(self, text: str) -> None:
        self.stats.events.append(text)

    def invalidate(self, why: str) -> None:
        """Drop every program; the next calls trace and capture again. ``why`` goes into the report."""
        self._note(f"invalidated: {why}")
        for entry in self._entries.values():
            entry.drop()
            entry.refusal = None

    def close(self) -> None:
        """Drop every program and put the optimizers' flags back. The step cannot be called again."""
        for entry in self._entries.values():
            entry.drop()
        self._entries.clear()
        self._buffers.clear()
        self.managed.release()
        self._closed = True


def check_options(warmup_steps: int, on_failure: str, allow: Sequence[str], eager_if: EagerIf, max_graphs: int) -> None:
    """Refuse option values that make no sense.

    Raises:
        OptionError: naming the option, its value and what was expected.
    """
    if warmup_steps < 1:
        raise OptionError(
            f"warmup_steps is {warmup_steps}; expected at least 1: an optimizer makes its state in that step"
        )
    if on_failure not in ("raise", "eager"):
        raise OptionError(f"on_failure is {on_failure!r}; expected 'raise' or 'eager'")
    if isinstance(allow, str):
        raise OptionError(f"allow is the string {allow!r}; expected a sequence of paths, such as ({allow!r},)")
    countable = isinstance(eager_if, int) and not isinstance(eager_if, bool)
    if eager_if is not None and not callable(eager_if) and not countable:
        raise OptionError(f"eager_if is {eager_if!r}; expected a predicate, or n >= 1 for every n-th call")
    if isinstance(eager_if, int) and eager_if < 1:
        raise OptionError(f"eager_if is {eager_if}; expected a predicate, or n >= 1 for every n-th call")
    if max_graphs < 1:
        raise OptionError(f"max_graphs is {max_graphs}; expected at least 1")


def _environment() -> tuple[Any, ...]:
    """Global modes that a program bakes in."""
    cuda = torch.is_autocast_enabled("cuda")
    cpu = torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cuda") if cuda else None,
        torch.get_autocast_dtype("cpu") if cpu else None,
        torch.are_deterministic_algorithms_enabled(),
    )


def graph_step(
    fn: Callable[..., Any],
    *,
    owners: Mapping[str, Any] | Sequence[Any] | None = None,
    mode: str = "train",
    policy: Policy | None = None,
    backend: str = "auto",
    device: str | torch.device | None = None,
    warmup_steps: int = 3,
    on_failure: str = "raise",
    allow: Sequence[str] = (),
    eager_if: EagerIf = None,
    prepare_optimizers: bool = True,
    max_graphs: int = 16,
) -> GraphedStep:
    """Make a step that replays itself as one CUDA graph (or tape).

    Example:
        >>> step = graph_step(train_step, owners={"model": model, "optimizer": optimizer})
        >>> loss = step(x, y)

    Args:
        fn: the step: forward, backward, optimizer, whatever of these it has. Takes pytrees of tensors and literals.
        owners: objects whose tensors make up the step's state, by name or as a sequence. Modules and optimizers that
            the step uses are found without being named.
        mode: ``"train"`` or ``"inference"``: which default policy holds.
        policy: which roles are static and which are copied in; overrides ``mode``.
        backend: ``"auto"`` (a CUDA graph where the tensors are on CUDA, the tape on the CPU), ``"cudagraph"``,
            ``"tape"``, or ``"eager"``.
        device: where to move fed tensors; without it they must be where the step computes.
        warmup_steps: eager steps per feed signature before it is traced; at least 1.
        on_failure: ``"raise"`` (refusals before the first good replay raise, later ones go on eagerly with a warning)
            or ``"eager"`` (always go on).
        allow: paths (or patterns) of Python effects that replays may leave out, such as ``"model.calls"``.
        eager_if: a predicate over the step's arguments, or n for every n-th call: these calls run eagerly.
        prepare_optimizers: whether optimizers may be made capturable (see :func:`prepare_optimizer`).
        max_graphs: how many programs are kept.

    Returns:
        A callable with ``plan``, ``stats``, ``invalidate(why)`` and ``close()``.

    Raises:
        OptionError, PolicyError, BackendError: for arguments that make no sense.
        OptimizerError: for an owner that cannot be captured at all.
    """
    return GraphedStep(
        fn,
        owners=owners,
        mode=mode,
        policy=policy,
        backend=backend,
        device=device,
        warmup_steps=warmup_steps,
        on_failure=on_failure,
        allow=allow,
        eager_if=eager_if,
        prepare_optimizers=prepare_optimizers,
        max_graphs=max_graphs,
    )
