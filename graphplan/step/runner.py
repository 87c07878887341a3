"""How a managed step runs as Python: where it computes, around what, and how an eager call is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphplan.backends.backend import Backend, resolve_backend
from graphplan.backends.cudagraph import CUDAGraphBackend
from graphplan.backends.tape import TapeBackend
from graphplan.errors import RefusalError, SkipReason
from graphplan.feed.call_arguments import CallArguments, call_step
from graphplan.feed.signature import Feed, check_feed
from graphplan.observe.capture_state import presenting_capture
from graphplan.owners.slots import Walk
from graphplan.plan.build import find_device
from graphplan.plan.plan import Plan
from graphplan.program.program import Program
from graphplan.report.stats import Stats
from graphplan.step.managed import Managed
from graphplan.step.options import Options
from graphplan.tensors.trees import map_result


class Backends:
    """Backends by device and name, for steps of one owner: their programs share a stream and a pool."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, torch.device], Backend] = {}

    def get(self, name: str, device: torch.device) -> Backend:
        """The backend of that name for that device."""
        key = (name, device)
        if key not in self._known:
            self._known[key] = TapeBackend() if name == "tape" else CUDAGraphBackend(device)
        return self._known[key]


class Runner:
    """Runs one step's function, and counts the calls of the step.

    ``backend`` and ``device`` are None until they are settled; ``plan`` is the latest one, None before there is one.
    """

    def __init__(self, fn: Callable[..., Any], managed: Managed, backend: str, backends: Backends) -> None:
        self.fn = fn
        self._managed = managed
        self._asked = backend
        self._backends = backends
        self.backend: Backend | None = None
        self.device: torch.device | None = None
        self.plan: Plan | None = None
        self.stats = Stats()
        self.outcome: tuple[Any] | None = None
        """What the step's function has returned in the call that is going on, once it has."""

    def call(self, fed: CallArguments) -> Any:
        """The step's function itself on what it is fed."""
        return fed.lend(self._note_outcome)

    def _note_outcome(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._managed.sharding.settle()
        result = call_step(self.fn, args, kwargs)
        self.outcome = (result,)
        self._managed.sharding.settle()
        return result

    @property
    def stock(self) -> Callable[..., Any]:
        """The step's function, and nothing else where nothing is sharded."""
        return self._at_rest if self._managed.sharding.is_there else self.fn

    def _at_rest(self, *args: Any, **kwargs: Any) -> Any:
        """The function from rest to rest: what FSDP2 gathers must not depend on how a rank came to run it."""
        self._managed.sharding.settle()
        result = call_step(self.fn, args, kwargs)
        self._managed.sharding.settle()
        return result

    def run(
        self,
        body: Callable[[], Any],
        *,
        traced: bool = False,
        between: tuple[Program, Sequence[Any], Callable[[], Walk]] | None = None,
    ) -> Any:
        """Run ``body`` as every managed step runs: as if captured, on the backend's stream, with device learning rates
        for the optimizers; in a trace for all code. ``between``: the program between whose replays it runs, what it is
        fed, and what leads to all that its owners hold afterwards.
        """
        with presenting_capture(), self._managed.rates if traced else self._managed.rates.within_optimizers():
            if self.backend is None:
                return body()
            if between is None:
                return self.backend.run(body)
            program, leaves, walk = between
            return program.run_between(self.backend, body, leaves, walk)

    def eager(self, feed: Feed, reason: SkipReason, detail: str = "") -> Any:
        """An eager step as managed ones run, counted under ``reason``."""
        result = self.run(lambda: self.call(CallArguments.of(feed)))
        self.count_eager(reason, detail)
        return result

    def untouched(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The function and nothing else, for ``backend="eager"``."""
        result = call_step(self.fn, args, kwargs)
        self.count_eager(SkipReason.BACKEND_EAGER)
        return result

    def plain(self, fed: CallArguments, reason: SkipReason, detail: str = "") -> Any:
        """An eager step for that reason, on arguments of any kind.

        No program will be compared with it, so learning rates are numbers, for whoever reads them in the step. The
        kernels are those of the steps before it: the run as a whole is an eager one with prepared optimizers.
        """
        with self._managed.rates.kernels():
            result = self.call(fed)
        self.count_eager(reason, detail)
        return result

    def outside(self, fed: CallArguments, reason: SkipReason, detail: str = "") -> Any:
        """An eager call through which gradients may flow."""
        result = self.call(fed)
        self.count_eager(reason, detail)
        return result

    def surrounded(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        what: str,
        options: Options,
    ) -> Any:
        """An eager call, of which nothing is learnt, since ``what`` is active around it."""
        fed = brought_to(options.feed_device, args, kwargs)
        if options.autograd:
            return self.outside(fed, SkipReason.SURROUNDINGS, what)
        result = self.run(lambda: self.call(fed))
        self.count_eager(SkipReason.SURROUNDINGS, what)
        return result

    def refused(self, feed: Feed, error: RefusalError) -> Any:
        """:meth:`plain` on a feed."""
        return self.plain(CallArguments.of(feed), error.reason, str(error))

    def count_eager(self, reason: SkipReason | None, detail: str = "") -> None:
        """Count an eager call that has returned."""
        self.stats.eager += 1
        self.stats.end_call("eager")
        if reason is not None:
            self.stats.skip(reason, detail)
        if self.plan is not None:
            self.stats.launches_eager += self.plan.launches

    def settle_backend(self, feed: Feed) -> None:
        """Choose device and backend once the owners' and the feed's tensors show where the step computes."""
        if self.backend is not None:
            return
        device = find_device(self._managed.walk(), feed)
        name = resolve_backend(self._asked, device)
        check_feed(feed, device)
        self.device = device
        self.backend = self._backends.get(name, device)


def brought_to(device: torch.device | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallArguments:
    """Arguments of any kind with their tensors on ``device``, if that is given."""
    if device is None:
        return CallArguments(args, kwargs)
    are_moved = []

    def move(tensor: Tensor) -> Tensor:
        there = tensor.to(device, non_blocking=True)
        are_moved.append(there is not tensor)
        return there

    its_args, its_kwargs = map_result(move, (args, dict(kwargs)))
    return CallArguments(its_args, its_kwargs, (args, kwargs)) if any(are_moved) else CallArguments(args, kwargs)
