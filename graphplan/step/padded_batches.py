"""Steps and predictions whose batches are padded to capture sizes. That padding has no effect is checked by rehearsals
(:mod:`padding_check`): before a call at times, and after a prediction by Python or by a program that is new.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphplan.backends.backend import first_line
from graphplan.environment.surroundings import surroundings
from graphplan.errors import FeedError, OptionError, PaddingError, RefusalError, SkipReason
from graphplan.feed.signature import Feed, asks_for_gradients, flatten, is_dense, no_keys
from graphplan.program.bindings import settle_companions
from graphplan.program.faults import is_steps_own, lost, refusal_of
from graphplan.program.program import Program
from graphplan.step.call_lock import running_step
from graphplan.step.capture_sizes import ShapeStats
from graphplan.step.padding import Arguments, Kind, Padding
from graphplan.step.padding_check import PaddingCheck
from graphplan.step.runner import brought_to
from graphplan.step.state_machine import StateMachine
from graphplan.tensors.attributes import attributes_on
from graphplan.verify.copy_placement import find_room
from graphplan.verify.schedule import Timetable
from graphplan.verify.state import tensors_of

_CALLS_TO_KNOW = 2
"""First calls of a training step, which are not padded: an object that the step changes is known once it turns up a
second time, and has to be known to be undone. Of predictions it is the first one alone.
"""


class PaddedBatches:
    """Serves the calls of one step at capture sizes. Raises OptionError if ranks train together."""

    def __init__(self, machine: StateMachine, shapes: ShapeStats) -> None:
        if machine.peers is not None:
            raise OptionError(
                "shapes='bucket' is given where several ranks train together: a batch that is compared takes its step "
                "several times, and the other ranks would wait. Expected one rank, or shapes='exact'"
            )
        self.shapes = shapes
        self._machine = machine
        self._runner = machine.runner
        self._options = machine.options
        self._trains = self._options.mode == "train"
        self.padding = Padding(self._runner.fn, self._options, machine.buffers, shapes)
        self._calls = 0
        self._stopped_by: RefusalError | None = None
        machine.timing.leave = self.padding.leave

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that has the turn, at its capture size if it has one."""
        feed = self._plain_feed(args, kwargs)
        begins = self._calls < (_CALLS_TO_KNOW if self._trains else 1)
        kind: Kind | None = None
        if feed is not None and not (self._trains and (begins or self._stopped_by is not None)):
            # A call with no dimension at all may be a wrong one, which the step itself has words for.
            are_expected = not self.shapes.shapes and any(leaf.dim() for _, leaf in feed.tensors())
            found = self.padding.kind(feed, are_expected=are_expected)
            if isinstance(found, str):
                return self._serve_unpadded(feed, SkipReason.BUCKET, found)
            kind = found
        if feed is None or kind is None or begins:
            result = self._machine.serve(*self.padding.leave(args, kwargs))
            # Before a step begins, its calls are the function's own.
            self._calls += not self._machine.timing.is_stock and self._runner.device is not None
            return result
        if self._stopped_by is not None and kind.is_padded:
            return self._serve_unpadded(feed, SkipReason.PADDING, str(self._stopped_by))
        is_due = kind.is_padded and (kind.size.calls + 1 == kind.size.next_check or not kind.is_sure)
        why = self._compare_in_time(feed, kind) if is_due else None
        if why is not None:
            return self._serve_unpadded(feed, *why)
        result = self._serve_padded(feed, kind, is_compared=is_due)
        if is_due:
            self._runner.stats.end_call("compared")
        return result

    def _plain_feed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Feed | None:
        """The call, flattened; None if its tensors cannot be replaced by padded ones, or if it will not be replayed."""
        if self._options.backend == "eager" or self._machine.is_closed or surroundings() is not None:
            return None
        if not self._trains and torch.is_grad_enabled():
            modules = [owner for owner in self._machine.managed.owners.values() if isinstance(owner, nn.Module)]
            if any(asks_for_gradients(param) for module in modules for param in module.parameters()):
                return None
        try:
            feed = flatten(args, kwargs, self._machine.unread.keys)
        except FeedError:
            return None
        return feed if all(_is_plain(leaf) for _, leaf in feed.tensors()) else None

    def _as_it_came(self, feed: Feed) -> Arguments:
        assert feed.given is not None
        return self.padding.leave(*feed.given)

    def _serve_unpadded(self, feed: Feed, reason: SkipReason, detail: str) -> Any:
        """Make the call as it came: in training as any step, eagerly in inference, where it may never come again."""
        args, kwargs = self._as_it_came(feed)
        if self._trains:
            if reason is not SkipReason.PADDING:
                self._runner.stats.note(f"not padded: {detail}")
            return self._machine.serve(args, kwargs)
        with running_step():
            result = self._runner.eager(brought_to(self._options.feed_device, args, kwargs), reason, detail)
        self._runner.outcome = None
        return result

    def _serve_padded(self, feed: Feed, kind: Kind, *, is_compared: bool = False) -> Any:
        if not (self._trains or kind.is_padded) and isinstance(self._machine.latest, SkipReason):
            # Python ran last, and is given what was passed: it may change containers.
            return self._machine.serve(*self._as_it_came(feed))
        result = self._machine.serve(*kind.pad(feed))
        self.shapes.count(kind.own.values(), kind.staged.values())
        try:
            latest = self._machine.latest
            program = latest if isinstance(latest, Program) else None
            kind.hand_back(feed, program)
            kind.size.calls += kind.is_padded
            leaves = kind.size.meet(result, kind.sizes)
            if not (self._trains or is_compared or self._is_known(kind)):
                why = self._compare_in_time(feed, kind)
                if why is not None:
                    return self._serve_unpadded(feed, *why)
                is_compared = True
            if is_compared and program is not None:
                kind.size.checked.add(program)
            if kind.is_sure:
                return kind.cut(feed, leaves)
        except Exception as error:
            if not self._trains and refusal_of(error) is not None:
                raise lost(error, getattr(self._runner.fn, "__name__", type(self._runner.fn).__name__)) from error
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

    def _is_known(self, kind: Kind) -> bool:
        """Whether what has run was compared with padding: Python may do something else by now, and new programs too."""
        latest = self._machine.latest
        is_old = not kind.is_padded or isinstance(latest, SkipReason) or latest in kind.size.checked
        return is_old and kind.is_sure

    def _compare_in_time(self, feed: Feed, kind: Kind) -> tuple[SkipReason, str] | None:
        """Rehearse the step both ways. Returns why the call is not to be padded, if so; may raise RefusalError."""
        size, stats = kind.size, self._runner.stats
        number = size.calls + 1
        padded = kind.pad(feed)
        settle_companions()
        assert self._runner.device is not None
        timetable = size.timetable = size.timetable or Timetable(self._options.schedule, self._runner.device)
        timetable.begin(number)
        try:
            with running_step(), stats.timed("verify"):
                reason = self._compare(feed, kind, padded)
        except RefusalError as error:
            self._refuse(error)
            return SkipReason.PADDING, str(error)
        except ArithmeticError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - an error of the step's own comes again in the call as it came
            reason = f"{type(error).__name__}: {first_line(error)}"
            if not is_steps_own(error):
                self._machine.refusals.warn(f"graphplan does not pad a batch, since comparing it ended with {reason}")
        finally:
            # It was a rehearsal.
            self._runner.outcome = None
        if reason:
            return SkipReason.CHECK, f"it could not be compared: {reason}"
        self.shapes.checked += 1
        size.next_check = timetable.end(number)
        return None

    def _compare(self, feed: Feed, kind: Kind, padded: Arguments) -> str:
        """Compare the call with and without padding. Returns why there was no room for that, if so."""
        runner, moved = self._runner, self._machine.lookup.moved
        walk = self._machine.managed.walk()
        assert runner.device is not None
        nbytes = sum({id(t): t.nbytes for t in tensors_of(walk).values() if id(t) not in walk.found}.values())
        # Three rehearsals leave copies, where a check of a replay has those of two steps.
        room, reason = find_room(nbytes, runner.device, runner.backend.may_take, copies=4)
        if room is not None:
            own, other = (moved(flatten(*each, no_keys)) for each in (self._as_it_came(feed), padded))
            PaddingCheck(self._machine, walk, own, room).run(other, kind)
        return reason

    def _refuse(self, error: RefusalError) -> None:
        """Raise, or say that batches are no longer padded."""
        self._machine.refusals.refuse(error, "graphplan no longer pads this step's batches")
        self._stopped_by = error
        self._runner.stats.note(f"no longer padded: {error}")


def _is_plain(leaf: Tensor) -> bool:
    """Return True if a padded tensor can replace ``leaf``."""
    return type(leaf) is Tensor and is_dense(leaf) and not (asks_for_gradients(leaf) or attributes_on(leaf))
