"""Calls at capture sizes: pad, run, cut, and now and then compare with the call as it came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from graphplan.errors import HostEffectError, PaddingError, RefusalError, SkipReason
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import Feed, asks_for_gradients
from graphplan.inference.buckets.padded_effects import Draws, Effects
from graphplan.inference.graphed_options import ServeOptions
from graphplan.owners.walk import walk_owners
from graphplan.program.faults import having_run
from graphplan.program.leases import plain
from graphplan.program.program import Program
from graphplan.step.padding.buckets import Ladders
from graphplan.step.padding.call_kinds import Kind, Kinds, Size
from graphplan.step.padding.layout import Layout, Padding
from graphplan.step.padding.lent_memory import handed_on, out_of_reach
from graphplan.step.padding.shape_stats import ShapeStats
from graphplan.step.padding.shapes import Dynamic, Place
from graphplan.step.padding.slicing import distance, result_leaves, tolerance
from graphplan.step.served import ServedStep
from graphplan.tensors.trees import flatten_result
from graphplan.verify.copy_placement import find_room


@dataclass(slots=True)
class _Size(Size):
    """One capture size, and the programs of which a padded replay was checked. ``drawing`` refuses padded calls only:
    those of the size itself draw what they should.
    """

    refusal: RefusalError | None = None
    drawing: PaddingError | None = None
    checked: WeakSet[Program] = field(default_factory=WeakSet)


class _UnpaddedError(Exception):
    """A call is better made as it came: the reason, and its wording."""


class Bucketed:
    """Serves the calls of one step at capture sizes."""

    def __init__(self, fn: Callable[..., Any], step: ServedStep, options: ServeOptions, stats: ShapeStats) -> None:
        assert options.buckets is not None
        self.ladders = Ladders(options.buckets)
        self.padding = Padding(fn, self.ladders, Dynamic(fn, options.dynamic), options.pad, options.mask)
        self._step = step
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._stats = stats
        self._device = options.step.feed_device
        self._schedule = options.step.schedule
        self._allow = options.allow
        make_size = lambda: _Size(next_check=self._schedule.after(0))  # noqa: E731
        self._kinds = Kinds(self.padding, stats, make_size)

    def call(self, feed: Feed) -> Any:
        """One call of dense tensors.

        Raises:
            PaddingError: if padding changes what comes out.
        """
        kind = self._kinds.get(feed)
        places = self.padding.places(feed) if kind is None else kind.layout.places
        misfit = self.padding.misfit(feed, places) if kind is None else None
        if misfit is not None:
            return self._leave(feed, places, SkipReason.BUCKET, misfit)
        if any(map(asks_for_gradients, feed.leaves)) or self._trains():
            return self._leave(feed, places, SkipReason.GRADIENT)
        if kind is None:
            kind = self._kinds.learn(feed, places, self._device)
        self._stats.count(kind.fed, kind.padded)
        refusal = kind.size.refusal or (kind.size.drawing if kind.layout.is_padded else None)
        if refusal is not None:
            return self._leave(feed, places, SkipReason.PADDING, str(refusal))
        return self._run(feed, kind)

    def _leave(self, feed: Feed, places: Sequence[Place], reason: SkipReason, detail: str = "") -> Any:
        """The call as it came."""
        return self._step.skip(*self.padding.leave(feed, places, self._device), reason, detail)

    def _trains(self) -> bool:
        """Whether gradients could flow to parameters: what is padded lies in memory that the next call overwrites."""
        if not torch.is_grad_enabled():
            return False
        found = [owner for owner in self._step.owners.values() if isinstance(owner, nn.Module)]
        return any(asks_for_gradients(param) for owner in found for param in owner.parameters())

    def _run(self, feed: Feed, kind: Kind[_Size]) -> Any:
        layout, size = kind.layout, kind.size
        args, kwargs = self.padding.pad(feed, layout)
        staged = layout.staged
        versions = [memory._version for memory in staged.values()]
        is_padded = layout.is_padded
        size.calls += is_padded
        effects: Effects | None = None
        running: Program | None = None
        fed: CallArguments | None = None
        draws: Draws | None = None

        def before(program: Program | None, reason: SkipReason | None, detail: str) -> None:
            nonlocal draws, effects, fed, feed, running
            running = program
            feed = feed if program is None else out_of_reach(feed, program)
            fed = CallArguments(args, kwargs).watch() if program is None else None
            if is_padded and reason is not None:
                raise _UnpaddedError(reason, detail)
            if is_padded and self._is_due(kind, program):
                noting = Draws() if program is None else None
                effects = self._watch(layout, program, noting)
                size.next_check = self._schedule.after(size.calls)
                draws = noting.__enter__() if noting is not None else None

        try:
            result = self._step.call(args, kwargs, before)
        except _UnpaddedError as reason:
            return self._leave(feed, layout.places, *reason.args)
        finally:
            if draws is not None:
                draws.__exit__(None, None, None)
        with having_run(self._name):
            leaves, structure = result_leaves(result)
            mutated = [
                index for (index, memory), was in zip(staged.items(), versions, strict=True) if memory._version != was
            ]
            size.slicer.meet(leaves, structure, layout.sizes)
            if effects is not None:
                if running is not None:
                    size.checked.add(running)
                places = list(draws.places) if draws is not None else running.plan.draws if running is not None else []
                return self._check(feed, layout, size, leaves, mutated, effects, places)
            if fed is not None:
                self._refuse_change(size, fed.change())
            if is_padded and not kind.is_sure:
                # The function gives something else than before: this call's outcome is that without padding.
                size.next_check = size.calls + 1
                return self._leave(feed, layout.places, SkipReason.CHECK)
            for index in mutated:
                feed.leaves[index].copy_(layout.own[index])
            return size.slicer.cut([handed_on(leaf, layout, feed) for leaf in leaves], layout.true)

    def _refuse_change(self, size: _Size, change: str | None) -> None:
        """Refuse calls that change the containers that are made for padded tensors; others get the caller's own."""
        if change is not None:
            size.refusal = HostEffectError(change)
            self._step.refuse(size.refusal)

    def _is_due(self, kind: Kind[_Size], program: Program | None) -> bool:
        """Whether a padded call is made unpadded, too. The step's Python may do something else than in the last check,
        and so may a program that was captured since. Without a schedule, it is so where they may draw random numbers.
        """
        size = kind.size
        if size.calls == size.next_check or not kind.is_sure or program is None:
            return True
        return program not in size.checked and (self._schedule.every != 0 or bool(program.plan.draws))

    def _watch(self, layout: Layout, program: Program | None, draws: Draws | None) -> Effects:
        """What notes the effects of a call that is about to be made.

        Raises:
            _UnpaddedError: if there is no room for copies of what the owners hold.
        """
        held = {id(t): t for slot in walk_owners(self._step.owners).slots.values() for t in slot.tensors()}
        where = next((memory.device for memory in layout.staged.values()), torch.device("cpu"))
        room, reason = find_room(sum(tensor.nbytes for tensor in held.values()), where)
        if room is None:
            raise _UnpaddedError(SkipReason.CHECK, reason)
        own = program.plan.generators if program is not None else ()
        return Effects(self._step.owners, self._allow, room, own, draws)

    def _check(
        self,
        feed: Feed,
        layout: Layout,
        size: _Size,
        leaves: list[Any],
        mutated: list[int],
        effects: Effects,
        places: Sequence[str],
    ) -> Any:
        """Make the call as it came, too: its outcome stands. ``places`` are where random numbers may be drawn."""
        kept = [plain(leaf).clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        effects.undo()
        expected = self._leave(feed, layout.places, SkipReason.CHECK)
        self._stats.checked += 1
        if effects.has_drawn:
            return self._refuse_draws(layout, size, places, expected)
        problems, parts = size.slicer.learn(expected, kept, layout.true)
        for name, own in flatten_result(expected)[0]:
            part = parts.get(name)
            if part is not None and (apart := distance(own, part)) > tolerance(own.dtype):
                problems.append(f"{name} differs by {apart:.2g} of its largest value")
        problems += effects.problems()
        for index in mutated:
            own, part = feed.leaves[index], layout.own[index]
            if distance(own.to(part.device), part) > tolerance(own.dtype):
                problems.append(f"{feed.names()[index]}, which the function changes, differs")
        if problems:
            size.refusal = PaddingError(
                f"padding from {layout} changes what comes out: {'; '.join(problems[:3])}. Expected the "
                "same as without padding, within rounding: have the function leave the padding out (mask= names an "
                "argument that says what is real), pad with another value (pad=), name the dimensions that may be "
                "padded (dynamic=), or pass shapes='exact'. What came out without padding stands",
                result=expected,
            )
            self._step.refuse(size.refusal)
        return expected

    def _refuse_draws(self, layout: Layout, size: _Size, places: Sequence[str], expected: Any) -> Any:
        """Refuse padded calls that draw random numbers. That what two of them draw is alike would say nothing of the
        next, which may be of another size.
        """
        size.drawing = PaddingError(
            f"the call draws random numbers {'; '.join(places[:3]) or 'in compiled code'}, and padding from "
            f"{layout} may have it draw others, and more of them, than without padding. Expected a function "
            "that draws none: draw outside of it and feed it the numbers, or pass shapes='exact'. Calls of a capture "
            "size are replayed all the same. What came out without padding stands",
            result=expected,
        )
        self._step.refuse(size.drawing)
        return expected
