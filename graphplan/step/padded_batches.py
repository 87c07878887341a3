"""Training steps whose batches are padded to capture sizes. Replays are checked as ever; that padding has no effect is
checked by rehearsals (:mod:`padding_check`). Each batch is trained on once: padded, or as it came if that differs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphplan.backends.backend import first_line
from graphplan.environment.surroundings import surroundings
from graphplan.errors import FeedError, OptionError, PaddingError, RefusalError
from graphplan.feed.signature import Feed, asks_for_gradients, flatten, is_dense
from graphplan.feed.unread import UnreadValues
from graphplan.program.bindings import settle_companions
from graphplan.step.call import Before
from graphplan.step.call_lock import running_step
from graphplan.step.capture_sizes import ShapeStats
from graphplan.step.padding import Kind, PaddedCall, Padding
from graphplan.step.padding_check import PaddingCheck
from graphplan.step.state_machine import StateMachine
from graphplan.tensors.attributes import attributes_on
from graphplan.verify.copy_placement import find_room
from graphplan.verify.schedule import Timetable

_CALLS_TO_KNOW = 2
"""First calls, which are not padded: an object that the step changes is known once it turns up a second time, and has
to be known to be undone."""


class PaddedBatches:
    """Serves the calls of one training step at capture sizes. Raises OptionError if ranks train together."""

    def __init__(self, machine: StateMachine, shapes: ShapeStats) -> None:
        options = machine.options
        assert options.buckets is not None
        if machine.peers is not None:
            raise OptionError(
                "shapes='bucket' is given where several ranks train together: a batch that is compared takes its step "
                "several times, and the other ranks would wait. Expected one rank, or shapes='exact'"
            )
        self.shapes = shapes
        self._machine = machine
        self._runner = machine.runner
        self._options = options
        self._padding = Padding(
            self._runner.fn, options.buckets, options.dynamic, options.pad, options.mask, options.feed_device,
            self.shapes,
        )  # fmt: skip
        self._host_values = UnreadValues()
        self._known_calls = 0
        self._stopped_by: RefusalError | None = None
        machine.timing.leave = self._with_mask

    @property
    def fact(self) -> str:
        """What the report says of padding."""
        return f"{self.shapes} ({self._padding.ladders})"

    def _with_mask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call as it came, with a mask that hides nothing where the step wants one."""
        if self._options.mask is None:
            return args, kwargs
        try:
            feed = flatten(args, kwargs)
        except FeedError:
            return args, kwargs
        return self._padding.leave(feed)

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: Before | None = None) -> Any:
        """Make a call that has the turn, at its capture size if it has one."""
        feed = self._plain_feed(args, kwargs)
        pads = feed is not None and self._known_calls >= _CALLS_TO_KNOW and self._stopped_by is None
        kind = self._kind(feed) if feed is not None and pads else None
        if feed is not None and kind is not None:
            size = kind.size
            is_due = kind.is_padded and (size.calls + 1 == size.next_check or not kind.is_sure)
            if not is_due:
                return self._serve_padded(feed, kind)
            if self._is_harmless(feed, kind):
                result = self._serve_padded(feed, kind)
                self._runner.stats.end_call("compared")
                return result
        result = self._machine.serve(*self._with_mask(args, kwargs), before)
        # Before a step begins, its calls are the function's own.
        self._known_calls += self._machine.timing.stock is None
        return result

    def _plain_feed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Feed | None:
        """The call, if padded tensors can stand for those in it, and it is to be replayed at all."""
        if self._options.backend == "eager" or self._machine.is_closed or surroundings() is not None:
            return None
        try:
            feed = flatten(args, kwargs, self._host_values.keys)
        except FeedError:
            return None
        return feed if all(_is_plain(leaf) for _, leaf in feed.tensors()) else None

    def _kind(self, feed: Feed) -> Kind | None:
        """How a call is padded; None if it fits no capture size."""
        # A call with no dimension at all may be a wrong one, which the step itself has words for.
        are_expected = not self.shapes.shapes and any(leaf.dim() for _, leaf in feed.tensors())
        kind = self._padding.kind(feed, are_expected=are_expected)
        if isinstance(kind, str):
            self._runner.stats.note(f"not padded: {kind}")
            return None
        return kind

    def _serve_padded(self, feed: Feed, kind: Kind) -> Any:
        call = PaddedCall(self._padding, feed, kind)
        self.shapes.count(kind.own.values(), kind.staged.values())
        result = self._machine.serve(call.args, call.kwargs)
        try:
            call.hand_back()
            leaves = call.take(result)
            if kind.is_sure:
                return call.cut(leaves)
        except Exception:
            self._runner.outcome = (result,)
            raise
        self._refuse(
            PaddingError(
                "the step returns something else than in the call that was compared, and what is padding in that "
                "cannot be told: this call's result is as large as the padded batch. Expected results of one "
                "structure: return what does not grow with the batch, such as the loss, or pass shapes='exact'",
                result=result,
            )
        )
        return result

    def _is_harmless(self, feed: Feed, kind: Kind) -> bool:
        """Rehearse the step both ways; whether padding makes no difference. RefusalError if it does."""
        size, stats = kind.size, self._runner.stats
        number = size.calls + 1
        settle_companions()
        assert self._runner.device is not None
        timetable = size.timetable = size.timetable or Timetable(self._options.schedule, self._runner.device)
        timetable.begin(number)
        try:
            with running_step(), stats.timed("verify"):
                reason = self._compare(feed, kind)
        except RefusalError as error:
            self._refuse(error)
            return False
        except ArithmeticError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - an error of the step's own comes again in the call as it came
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._machine.refusals.warn(f"graphplan does not pad a batch, since comparing it ended with {reason}")
        finally:
            # It was a rehearsal.
            self._runner.outcome = None
        if reason:
            stats.note(f"not padded, since it could not be compared: {reason}")
            return False
        self.shapes.checked += 1
        size.next_check = timetable.end(number)
        return True

    def _compare(self, feed: Feed, kind: Kind) -> str:
        """Compare the call with and without padding. Returns why there was no room for that, if so."""
        managed, backend = self._machine.managed, self._runner.backend
        walk = managed.walk()
        assert self._runner.device is not None
        tensors = {id(t): t.nbytes for slot in walk.slots.values() for t in slot.tensors() if id(t) not in walk.found}
        # Three rehearsals leave copies, where a check of a replay has those of two steps.
        room, reason = find_room(sum(tensors.values()) * 4 // 3, self._runner.device, backend.may_take)
        if room is None:
            return reason
        moved = self._machine.lookup.moved
        own = moved(flatten(*self._padding.leave(feed)))
        padded = moved(flatten(*self._padding.pad(feed, kind)))
        check = PaddingCheck(self._runner, managed, walk, own, allow=self._options.allow, room=room)
        check.run(padded, kind)
        return ""

    def _refuse(self, error: RefusalError) -> None:
        """Raise, or say that batches are no longer padded."""
        self._machine.refusals.refuse(error, "graphplan no longer pads this step's batches")
        self._stopped_by = error
        self._runner.stats.note(f"no longer padded: {error}")


def _is_plain(leaf: Tensor) -> bool:
    """Whether the padded tensor can stand for ``leaf``."""
    return type(leaf) is Tensor and is_dense(leaf) and not (asks_for_gradients(leaf) or attributes_on(leaf))
