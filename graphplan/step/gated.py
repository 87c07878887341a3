"""How a graphed step is timed, and what its calls are before it begins and after it has stood down."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphplan.errors import SkipReason, SlowerError
from graphplan.feed.call_arguments import CallArguments, hands_over
from graphplan.feed.signature import Feed
from graphplan.plan.build import find_device
from graphplan.program.faults import refusal_of
from graphplan.step.gate import AGAIN, Clock, Gate, Stock
from graphplan.step.options import Options
from graphplan.step.peers import Peers
from graphplan.step.reporting import Reporting
from graphplan.step.runner import brought_to


class Gated(Reporting):
    """A step that has to be faster than without graphplan, if its options say so.

    A training step has one gate; where none is given, its first calls are calls of its function alone, and timed. An
    inference step has a gate for each signature.
    """

    _options: Options
    _peers: Peers | None
    _way: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
    """What makes calls instead of :meth:`_call`."""

    @abstractmethod
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, in whatever way."""

    @abstractmethod
    def _stand_down(self, reason: SkipReason, detail: str, **options: Any) -> None:
        """Take everything away that is not the user's own. ``options`` are those of :class:`Stock`."""

    @property
    def is_down(self) -> bool:
        """Whether calls are calls of the step's function, and nothing else, because of :attr:`down_because`."""
        return self.stock is not None and self._stock_reason is not None

    @property
    def down_because(self) -> tuple[SkipReason, str]:
        """Why the step stands down, and its wording."""
        assert self._stock_reason is not None
        return self._stock_reason, self._stock_detail

    def _take_gate(self, gate: Gate | None, *, opens: bool) -> None:
        self._gate = gate
        self._opens_gate = opens and gate is None
        self._again = AGAIN
        self._is_asked_for = False
        if gate is not None:
            self._way = self._timed

    def _begin_timing(self, feed: Feed) -> bool:
        """Whether the next calls are to be eager and timed, before anything of the step's is prepared."""
        self._opens_gate = False
        device = self._options.feed_device or find_device(self._managed.walk(), feed)
        if not self._options.is_gated(device):
            return False
        self._time_eager_calls(Gate(self._options.least_speedup(device), Clock(device), peers=self._peers))
        return True

    def _time_eager_calls(self, gate: Gate) -> None:
        self._gate = gate
        self._managed.release()
        self._be_stock(None, ended=self._end_eager, failed=gate.cancel)

    def _end_eager(self) -> None:
        with self.having_run():
            self._end_timing()

    @contextmanager
    def having_run(self) -> Iterator[None]:
        """Have the next call told of what fails in the block: the step is done."""
        try:
            yield
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is None:
                raise
            self._managed.refusal, self._way, self.stock = refusal, None, None

    def _end_timing(self) -> None:
        gate = self._gate
        assert gate is not None
        if not gate.end_eager():
            return
        assert gate.eager is not None
        self.stats.measured["eager"] = gate.eager
        self.stock = None
        if gate.is_busy and self._options.may_stay_eager:
            self._stand_down(SkipReason.BUSY, "", every=self._again, ended=self._look_again)
        else:
            self._managed.prepare()
            self._way = self._timed

    def _look_again(self) -> None:
        """Time eager calls anew: the device may not be busy all the time any more."""
        assert self._gate is not None
        self.stats.note("timed again: the device was busy all the time")
        self._again *= 2
        self._time_eager_calls(self._gate.anew())

    def _timed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call while it is open whether replays pay."""
        gate = self._gate
        assert gate is not None
        try:
            result = self._call(args, kwargs)
        except BaseException:
            gate.cancel()
            raise
        if self._way != self._timed:
            return result
        with self.having_run():
            pays = None
            if self._runner.stats.last_kind == "replayed":
                pays = gate.end_replay()
            else:
                gate.cancel()
            if pays is not None:
                self._way = None
                self.settle(gate, pays)
        return result

    def settle(self, gate: Gate, pays: bool) -> None:
        """Stand down unless replays pay, as ``gate`` has found."""
        error = self._decide(gate, pays)
        if error is not None:
            self._stand_down(error.reason, str(error))

    def _decide(self, gate: Gate, pays: bool) -> SlowerError | None:
        """Note what was measured, and what is to be said where replays do not pay."""
        stats = self.stats
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

    def _gate_of_calls(self, feed: Feed) -> Gate | None:
        """The gate of one signature's calls, if replays have to pay."""
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

    def _eagerly_timed(self, gate: Gate, fed: CallArguments) -> Any:
        """An eager call of the function alone."""
        start = gate.begin()
        result = self._runner.call(fed)
        gate.end_eager(start)
        self._runner.count_eager(None)
        return result

    def _be_stock(self, reason: SkipReason | None, detail: str = "", **options: Any) -> None:
        """Have calls be calls of the step's own function."""
        self._take_counts()
        call = _plain_call(self._runner.stock, self._options.feed_device)
        self._way = self.stock = Stock(call, **options)
        self._stock_reason, self._stock_detail = reason, detail


def _plain_call(
    fn: Callable[..., Any], device: torch.device | None
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    # The first of several may be made within a call that is not stock.
    call = hands_over(lambda args, kwargs: fn(*args, **kwargs))
    return call if device is None else lambda args, kwargs: brought_to(device, args, kwargs).lend(call)
