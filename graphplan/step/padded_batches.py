"""Steps and predictions whose batches are padded to capture sizes. Rehearsals check that padding has no effect: the
step runs on the original batch and on the padded one, without dropout, and both runs are undone.

The check compares *changes*. Kernels for other sizes round differently, so two changes may differ by a share of the
change itself. Where terms cancel, only rounding is left: they may also differ by a multiple of the effect of other last
bits of the parameters, which a third rehearsal measures. (Changes of six kinds of language models on a CPU differed by
up to four times that in float32, and by half of it in bfloat16.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphplan.backends.backend import first_line
from graphplan.effects.allowed import is_allowed
from graphplan.environment.devices import default_generators
from graphplan.environment.surroundings import surroundings
from graphplan.errors import FeedError, HostEffectError, OptionError, PaddingError, RefusalError, SkipReason
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import Feed, asks_for_gradients, flatten, is_dense, no_keys
from graphplan.observe.source import find_source
from graphplan.observe.watching import Unwatched
from graphplan.owners.generators import HostGenerators
from graphplan.owners.slots import Walk, is_optimizer_state
from graphplan.owners.snapshot import Snapshot
from graphplan.program.faults import is_steps_own, lost, refusal_of
from graphplan.program.program import Program
from graphplan.step.call_lock import running_step
from graphplan.step.capture_sizes import ShapeStats, tolerance
from graphplan.step.compiled import uncompiled
from graphplan.step.memory_budget import find_room
from graphplan.step.padding import Arguments, Kind, Padding
from graphplan.step.runner import to_device
from graphplan.step.state_machine import StateMachine
from graphplan.tensors.attributes import attributes_on
from graphplan.tensors.copying import copy_all
from graphplan.tensors.dtensors import local
from graphplan.tensors.storages import storage_id
from graphplan.tensors.trees import map_result
from graphplan.trace.composites import OperatorMode
from graphplan.trace.operator_schemas import OperatorCall, tensors_in
from graphplan.trace.records import Trace
from graphplan.verify.compare import RESPONSES, SPREADS, Run, Sides, describe, differing_values, distances, fits, nudged
from graphplan.verify.schedule import Timetable
from graphplan.verify.state import State, collect_tensors, collect_values, tensors_of

_CALLS_TO_KNOW = 2
"""First calls of a training step, which are not padded: an object that the step changes becomes an owner when it is
used a second time, and only changes of owners can be undone. For predictions, only the first call is not padded.
"""
_SHARE = "dropout_p"  # An argument of attention operators and their derivatives.
_NOISE, _NATIVE = "aten.bernoulli_.float", "aten.native_dropout.default"
_SIDES = Sides("the padded step", "the unpadded step", "rounding comes to")


class PaddedBatches:
    """The padding of one step's calls to capture sizes. Raises OptionError if several ranks train together."""

    def __init__(self, machine: StateMachine, shapes: ShapeStats) -> None:
        if machine.peers is not None:
            raise OptionError(
                "shapes='bucket' does not work with several ranks: a batch that is compared runs its step several "
                "times, and the other ranks would wait. Expected one rank, or shapes='exact'"
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
        """Run a call that holds the call lock, padded to its capture size if there is one."""
        feed = self._plain_feed(args, kwargs)
        begins = self._calls < (_CALLS_TO_KNOW if self._trains else 1)
        kind: Kind | None = None
        if feed is not None and not (self._trains and (begins or self._stopped_by is not None)):
            # If no tensor has a dimension, the call may be wrong: let the step itself raise its error.
            are_expected = not self.shapes.shapes and any(leaf.dim() for _, leaf in feed.tensors())
            found = self.padding.kind(feed, are_expected=are_expected)
            if isinstance(found, str):
                return self._serve_unpadded(feed, SkipReason.BUCKET, found)
            kind = found
        if feed is None or kind is None or begins:
            result = self._machine.serve(*self.padding.leave(args, kwargs))
            # Stock calls, as for the gate's eager time, discover no owners, so they do not count.
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
        """The flattened call; None if its tensors cannot be replaced by padded ones, or if it will not be replayed."""
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
        """Run the call unpadded: in training like any step, in inference eagerly, since its shape may never recur."""
        args, kwargs = self._as_it_came(feed)
        if self._trains:
            if reason is not SkipReason.PADDING:
                self._runner.stats.note(f"not padded: {detail}")
            return self._machine.serve(args, kwargs)
        with running_step():
            result = self._runner.eager(to_device(self._options.feed_device, args, kwargs), reason, detail)
        self._runner.outcome = None
        return result

    def _serve_padded(self, feed: Feed, kind: Kind, *, is_compared: bool = False) -> Any:
        if not (self._trains or kind.is_padded) and isinstance(self._machine.latest, SkipReason):
            # The latest call was eager. Pass the original arguments, since Python code may change their containers.
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
                "the step returns another structure than in the compared call, so graphplan cannot remove the "
                "padding: this call's result is as large as the padded batch. Expected results of one structure: "
                "return values that do not grow with the batch, such as the loss, or pass shapes='exact'",
                result=result,
            )
        )
        return result

    def _is_known(self, kind: Kind) -> bool:
        """Return True if the code that ran was compared with an unpadded run: an eager call, or a checked program."""
        latest = self._machine.latest
        is_old = not kind.is_padded or isinstance(latest, SkipReason) or latest in kind.size.checked
        return is_old and kind.is_sure

    def _compare_in_time(self, feed: Feed, kind: Kind) -> tuple[SkipReason, str] | None:
        """Rehearse the step with and without padding. Return why not to pad the call, if so; may raise RefusalError."""
        size, stats = kind.size, self._runner.stats
        number = size.calls + 1
        padded = kind.pad(feed)
        assert self._runner.device is not None
        timetable = size.timetable = size.timetable or Timetable(self._options.check_every, self._runner.device)
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
                self._machine.refusals.warn(
                    f"graphplan does not pad a batch, because its comparison failed with {reason}"
                )
        finally:
            # A rehearsal's result is not the result of the call.
            self._runner.outcome = None
        if reason:
            return SkipReason.CHECK, f"it could not be compared: {reason}"
        self.shapes.checked += 1
        size.next_check = timetable.end(number)
        return None

    def _compare(self, feed: Feed, kind: Kind, padded: Arguments) -> str:
        """Compare the call with and without padding. Return why there is no memory for that, if so."""
        runner, moved = self._runner, self._machine.lookup.moved
        walk = self._machine.managed.walk()
        assert runner.device is not None
        nbytes = sum({id(t): t.nbytes for t in tensors_of(walk).values() if id(t) not in walk.found}.values())
        # Three rehearsals leave copies, one more than the two steps of a replay's check.
        room, reason = find_room(nbytes, runner.device, runner.backend.may_take, copies=4)
        if room is not None:
            own, other = (moved(flatten(*each, no_keys)) for each in (self._as_it_came(feed), padded))
            PaddingCheck(self._machine, walk, own, room).run(other, kind)
        return reason

    def _refuse(self, error: RefusalError) -> None:
        """Raise ``error``, or warn that batches are no longer padded."""
        self._machine.refusals.refuse(error, "graphplan no longer pads this step's batches")
        self._stopped_by = error
        self._runner.stats.note(f"no longer padded: {error}")


def _is_plain(leaf: Tensor) -> bool:
    """Return True if a padded tensor can replace ``leaf``."""
    return type(leaf) is Tensor and is_dense(leaf) and not (asks_for_gradients(leaf) or attributes_on(leaf))


class RehearsalMode(OperatorMode):
    """A dispatch mode that skips dropout, notes draws, and copies storages that are not ``copied`` when ``written``."""

    def __init__(self, copied: set[int | None]) -> None:
        super().__init__()
        self._known = set(copied)  # Storages that have a copy, or that the step has made.
        self.record = Trace()  # Changes that no snapshot can undo, and the dtypes of all results.
        self._states = self.record.unowned_generator_states
        self._states += [(generator, generator.get_state()) for generator in default_generators()]
        self._host_states = HostGenerators()
        self._places: dict[str, None] = {}
        self.written: set[int | None] = set()

    def operate(self, aside: Unwatched, call: OperatorCall) -> Any:
        """Run an operator, unless it is dropout."""
        if call.schema.may_write:
            self._save(call)
        out = self._run(aside, call)
        for tensor in tensors_in(out):
            self._known.add(storage_id(tensor))
            self.record.dtypes.add(tensor.dtype)
        return out

    def _run(self, aside: Unwatched, call: OperatorCall) -> Any:
        schema, args, kwargs = call.schema, call.args, call.kwargs
        if schema.name == _NOISE:
            # Dropout multiplies by this mask divided by the share that it keeps. Fill it with the share: that gives 1.
            share = call.given(1)
            return args[0].fill_(0.5 if share is None else share)
        if schema.name == _NATIVE:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if _SHARE in schema.arguments:
            at = schema.arguments.index(_SHARE)
            args = (*args[:at], 0.0, *args[at + 1 :]) if at < len(args) else args
            kwargs = kwargs if at < len(args) else {**kwargs, _SHARE: 0.0}
        elif schema.is_random:
            own = kwargs.get("generator")
            if own is not None and all(own is not known for known, _ in self._states):
                self._states.append((own, own.get_state()))
            self._places[f"at {find_source()}"] = None
        return aside.run(schema.operator, args, kwargs)

    def _save(self, call: OperatorCall) -> None:
        """Copy storages that are about to be written, unless they have a copy or were made by the step."""
        for tensor in call.written():
            storage = storage_id(tensor)
            if storage is not None and storage not in self._known:
                self._known.add(storage)
                self.written.add(storage)
                self.record.note_write(tensor)

    @property
    def draws(self) -> list[str]:
        """The places that drew random numbers; empty if no generator's state changed."""
        moved = self._host_states.moved()
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._states):
            moved += self._places
        return moved


class PaddingCheck:
    """One comparison with the original ``feed``. ``walk`` is a current walk over the owners; copies go to ``room``."""

    def __init__(self, machine: StateMachine, walk: Walk, feed: Feed, room: torch.device) -> None:
        self._machine, self._walk, self._feed, self._room = machine, walk, feed, room
        self._snapshot = Snapshot(walk, extra=[tensor for _, tensor in feed.tensors()], device=room)
        self._rounding = 0.0

    def run(self, padded: Feed, kind: Kind) -> None:
        """Compare with the step on ``padded``. Raises PaddingError if that gives other values, or if the comparison is
        impossible, and HostEffectError if the step changes fed containers.
        """
        try:
            problems = self._compare(padded, kind)
        except BaseException:
            # The third rehearsal changes the last bits of parameters, so restore them after an error, too.
            self._snapshot.restore()
            raise
        if problems:
            first, *others = problems
            names = ", ".join(problem.partition(":")[0] for problem in others[:4])
            more = f" (and {len(others)} more: {names})" if others else ""
            raise PaddingError(
                f"padding from {kind} changes the outcome of the step: {first}{more}. Expected the outcome without "
                "padding, within rounding: mask the padding (in the loss, in statistics), pad with another value "
                "(pad=), name the dimensions that may be padded (dynamic=), or pass shapes='exact'"
            )

    def _compare(self, padded: Feed, kind: Kind) -> list[str]:
        names, size = self._feed.names(), kind.size
        expected, came = self._rehearse(self._feed, {names[index]: self._feed.leaves[index] for index in kind.own})
        try:
            result, left = self._rehearse(padded, {names[index]: part for index, part in kind.own.items()})
        except (PaddingError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever padding makes of the user's code
            return [f"the padded step raises {type(error).__name__}: {error}"]
        problems, pairs = size.learn(expected, size.meet(result, kind.sizes), kind.true)
        others = differing_values(left.values, came.values, _SIDES)
        problems += [f"{path}: {text}" for path, text in others.items()]
        ours = {name: own for name, (own, _) in pairs.items()} | came.tensors
        theirs = {name: part for name, (_, part) in pairs.items()} | left.tensors
        return self._differences(ours, theirs) + problems

    def _differences(self, came: Mapping[str, Tensor], padded: Mapping[str, Tensor]) -> list[str]:
        """Describe differences that rounding does not explain, causes first. Raises ArithmeticError if not finite."""
        live = tensors_of(self._walk)
        old = {path: value for path, t in live.items() if (value := self._snapshot.value(t)) is not None}
        alike = [path for path in came if path in padded and fits(came[path], padded[path])]
        far = Run.of(came, padded).far
        moves, sizes = distances(alike, came, old), distances(alike, came)
        over: dict[str, float] = {}
        for path in alike:
            apart = far.get(path, 0.0)
            share = tolerance(came[path].dtype)
            # Also allow two units in the last place of the tensor itself.
            excess = apart - share * moves[path] - share**2 / 2 * sizes[path]
            if not excess <= 0:
                if not (math.isfinite(apart) or bool(came[path].isfinite().all())):
                    raise ArithmeticError(f"{path} has infinite or NaN elements, also without padding")
                over[path] = excess
        # Without gradients, no terms cancel in updates, and other threads may read the parameters: do not nudge them.
        noise: Mapping[str, float] = {}
        if over and torch.is_grad_enabled():
            params = {path: local(param) for path, param in self._walk.parameters.values()}
            repeat = lambda: self._rehearse(self._feed, {})[1].tensors  # noqa: E731
            again = nudged(repeat, params, self._snapshot.value, self._rounding)
            noise = Run.of(came, again).far
        times = RESPONSES if self._rounding > torch.finfo(torch.float32).eps else SPREADS
        found = {p: n for p, excess in over.items() if not excess <= times * (n := noise.get(p, 0.0))}
        found.update({path: 0.0 for path in [*came, *padded] if path not in alike})
        ranked = {path: found[path] for path in sorted(found, key=self._rank)}
        return [f"{path}: {text}" for path, text in describe(ranked, old, padded, came, _SIDES).items()]

    def _rank(self, path: str) -> int:
        slot = self._walk.slots.get(path)
        if slot is None or slot.param is not None:
            return 1 if slot is None else 2
        return 3 if slot.is_parameter or is_optimizer_state(path) else 0

    def _rehearse(self, feed: Feed, extra: Mapping[str, Tensor]) -> tuple[Any, State]:
        """Run the step without dropout and undo it. Return its result, and copies of its state and of ``extra``."""
        fed = CallArguments(*feed.rebuild(feed.leaves)).watch()
        mode, runner = RehearsalMode(self._snapshot.storages), self._machine.runner
        try:
            with uncompiled(), mode:
                result = runner.run(lambda: map_result(lambda tensor: tensor.detach().clone(), runner.call(fed)))
            draws, change = mode.draws, fed.change()
            if draws:
                raise PaddingError(
                    f"the step draws random numbers: {'; '.join(draws[:3])}. For a padded batch it draws other and "
                    "more numbers, so the effect of padding cannot be checked. The check can leave out dropout, but "
                    "no other draws. Expected a step without other draws: draw outside the step and pass the numbers "
                    "as an argument, or pass shapes='exact'"
                )
            if change is not None:
                raise HostEffectError(change)
            self._rounding = mode.record.rounding
            return result, self._left(extra, mode.written)
        finally:
            mode.record.undo_uncopied_writes()
            self._snapshot.restore()
            torch.clear_autocast_cache()

    def _left(self, extra: Mapping[str, Tensor], written: set[int | None]) -> State:
        walk, allow = self._machine.managed.walk(), self._machine.options.allow

        def is_left_out(path: str) -> bool:
            # Leave out untouched tensors that are found only by a name, which may be a whole dataset.
            tensors = walk.slots[path].tensors() if path in walk.slots else []
            untouched = all(id(t) in walk.found and storage_id(t) not in written for t in tensors)
            return (bool(tensors) and untouched) or is_allowed(path, allow)

        left = collect_tensors(walk, (), extra, (), is_left_out)
        copies = dict(zip(left, copy_all(list(left.values()), self._room), strict=True))
        return State(copies, collect_values(walk, (), lambda path: is_allowed(path, allow), {}))
