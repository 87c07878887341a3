"""Calls of a step's own function: while it is timed, and after it has stood down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graphplan.errors import SkipReason, SlowerError
from graphplan.feed.call_arguments import hands_over
from graphplan.feed.signature import Feed
from graphplan.plan.build import find_device
from graphplan.program.faults import refusal_of
from graphplan.report.stats import Stats
from graphplan.step.gate import AGAIN, Clock, Gate
from graphplan.step.runner import Parts, brought_to

Serve = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Stock:
    """Calls of a step's own function, with nothing of graphplan's around them but a count.

    Args:
        call: the step's function, on all its arguments.
        ended: called after each ``every``-th call.
        failed: called where one raises.
    """

    def __init__(
        self,
        call: Serve,
        ended: Callable[[], object] | None = None,
        every: int = 1,
        failed: Callable[[], object] | None = None,
    ) -> None:
        self._call, self._ended, self._failed = call, ended, failed
        self._left = self._every = every if ended is not None else 0
        self._calls = 0

    def take_count(self) -> int:
        """Calls that have returned since this was asked last."""
        count, self._calls = self._calls, 0
        return count

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call."""
        try:
            result = self._call(args, kwargs)
        except BaseException:
            if self._failed is not None:
                self._failed()
            raise
        self._calls += 1
        self._left -= 1
        if not self._left and self._ended is not None:
            self._left = self._every
            self._ended()
        return result


class Timing:
    """Times a step that has to be faster than without graphplan, if its options say so.

    A training step has one gate; without a ``gate`` that knows the eager time, its first calls are calls of its
    function alone, and timed. An inference step has a gate for each signature.

    Args:
        serve: makes a call in the step's own way.
        stand_down: drops all that is not the user's own; takes a reason, its wording, and options of a Stock.

    Attributes:
        way: what makes calls instead of the state machine; None: nothing does.
        stock: the same, where that is the step's function alone.
        leave: what arguments pass on their way to the function alone.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        gate: Gate | None,
        opens: bool,
        serve: Serve,
        stand_down: Callable[..., None],
    ) -> None:
        self._runner, self._managed = parts.runner, parts.managed
        self._options, self._peers = parts.options, parts.peers
        self._serve, self._stand_down = serve, stand_down
        self.leave: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        self._gate = gate
        self.opens = opens and gate is None
        self._again = AGAIN
        self._is_asked_for = False
        self.way: Serve | None = None if gate is None else self._timed
        self.stock: Stock | None = None
        self._reason: SkipReason | None = None
        self._detail = ""

    def take_counts(self) -> Stats:
        """What the calls so far were, those of the function alone among them."""
        stats = self._runner.stats
        count = 0 if self.stock is None else self.stock.take_count()
        if count:
            stats.count_stock(count)
            if self._reason is not None:
                stats.skip(self._reason, self._detail, count)
        return stats

    @property
    def down_because(self) -> tuple[SkipReason, str] | None:
        """Why calls are calls of the step's function, and nothing else, and its wording; None if they are not."""
        return (self._reason, self._detail) if self.stock is not None and self._reason is not None else None

    def be_stock(self, reason: SkipReason | None, detail: str = "", **options: Any) -> None:
        """Have calls be calls of the step's own function."""
        self.take_counts()
        fn, device, leave = self._runner.stock, self._options.feed_device, self.leave
        # The first of several may be made within a call that is not stock.
        own = hands_over(lambda args, kwargs: fn(*args, **kwargs))
        moved = own if device is None else lambda args, kwargs: brought_to(device, args, kwargs).lend(own)
        call = moved if leave is None else lambda args, kwargs: moved(*leave(args, kwargs))
        self.way = self.stock = Stock(call, **options)
        self._reason, self._detail = reason, detail

    def close(self) -> None:
        """Have calls made in the step's own way."""
        if self._gate is not None:
            self._gate.cancel()
        self.take_counts()
        self.way = self.stock = None

    def begins(self, feed: Feed) -> bool:
        """Whether the next calls are eager and timed, before anything of the step's is prepared. Asked once."""
        if not self.opens or self._options.mode != "train":
            return False
        self.opens = False
        device = self._options.feed_device or find_device(self._managed.walk_before(), feed)
        if not self._options.is_gated(device):
            return False
        self._time_eager_calls(Gate(self._options.least_speedup(device), Clock(device), peers=self._peers))
        return True

    def _time_eager_calls(self, gate: Gate) -> None:
        self._gate = gate
        self._managed.release()
        self.be_stock(None, ended=self._end_eager, failed=gate.cancel)

    def _end_eager(self) -> None:
        with self.having_run():
            gate = self._gate
            assert gate is not None
            if not gate.end_eager():
                return
            assert gate.eager is not None
            self.take_counts().measured["eager"] = gate.eager
            self.stock = None
            if gate.is_busy and self._options.may_stay_eager:
                self._stand_down(SkipReason.BUSY, "", every=self._again, ended=self._look_again)
            else:
                self._managed.prepare()
                self.way = self._timed

    def _look_again(self) -> None:
        """Time eager calls anew: the device may not be busy all the time any more."""
        assert self._gate is not None
        self.take_counts().note("timed again: the device was busy all the time")
        self._again *= 2
        self._time_eager_calls(self._gate.anew())

    def _timed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call while it is open whether replays pay."""
        gate = self._gate
        assert gate is not None
        try:
            result = self._serve(args, kwargs)
        except BaseException:
            gate.cancel()
            raise
        if self.way != self._timed:
            return result
        with self.having_run():
            pays = None
            if self._runner.stats.last_kind == "replayed":
                pays = gate.end_replay()
            else:
                gate.cancel()
            if pays is not None:
                self.way = None
                self.settle(gate, pays)
        return result

    def settle(self, gate: Gate, pays: bool) -> None:
        """Stand down unless replays pay, as ``gate`` has found."""
        error = self.decide(gate, pays)
        if error is not None:
            self._stand_down(error.reason, str(error))

    def decide(self, gate: Gate, pays: bool) -> SlowerError | None:
        """Note what was measured; what is to be said if replays do not pay."""
        stats = self.take_counts()
        assert gate.eager is not None
        assert gate.replayed is not None
        stats.measured = {"eager": gate.eager, "replayed": gate.replayed}
        if pays:
            return None
        plan, own = self._runner.plan, stats.mean_us("steady") or 0.0
        costs = f", {own:.0f} µs of them in the replay itself on the host"
        error = gate.error("the step" if plan is None else plan.name, costs)
        stats.note(f"dropped: {error}")
        return error

    def gate_of_calls(self, feed: Feed) -> Gate | None:
        """A gate for the calls of one signature, if replays have to pay."""
        self._runner.settle_backend(feed)
        device = self._runner.device
        assert device is not None
        if self._is_asked_for or not self._options.is_gated(device):
            return None
        return Gate(self._options.least_speedup(device), Clock(device), loops=False)

    @contextmanager
    def asked_for(self) -> Iterator[None]:
        """Programs of the block's calls are wanted whether they pay or not."""
        self._is_asked_for = True
        try:
            yield
        finally:
            self._is_asked_for = False

    @contextmanager
    def having_run(self) -> Iterator[None]:
        """Have the next call told of what fails in the block: the step is done."""
        try:
            yield
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is None:
                raise
            self._managed.refusal, self.way, self.stock = refusal, None, None
