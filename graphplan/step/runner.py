"""Run a step's function as Python, count eager calls, and raise refusals or warn about them."""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphplan.backends.backend import Backend, resolve_backend
from graphplan.backends.cudagraph import CUDAGraphBackend
from graphplan.backends.tape import TapeBackend
from graphplan.errors import DeviceError, FeedError, RefusalError, SkipReason
from graphplan.feed.call_arguments import CallArguments, call_step, hands_over
from graphplan.feed.signature import Feed, check_feed
from graphplan.observe.capture_state import presenting_capture
from graphplan.owners.discovery import names_in
from graphplan.owners.walk import walk_owners
from graphplan.plan.build import find_device
from graphplan.plan.plan import Plan
from graphplan.report.stats import Stats
from graphplan.step.given_numbers import GivenNumbers
from graphplan.step.managed import Managed
from graphplan.step.options import Options
from graphplan.step.peers import Peers
from graphplan.step.programs import Programs
from graphplan.tensors.trees import map_result

_LEADING = (nn.Module, Optimizer, Tensor)  # Types of objects that are or hold tensors.


class Backends:
    """The backends, by name and device, of steps that belong together: their programs share a stream and a pool."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, torch.device], Backend] = {}

    def get(self, name: str, device: torch.device) -> Backend:
        """The backend of that name for that device."""
        key = (name, device)
        if key not in self._known:
            self._known[key] = TapeBackend() if name == "tape" else CUDAGraphBackend(device)
        return self._known[key]


_NUMBER = re.compile(r"(?<![\w.:\[])-?\d[\w.+-]*")  # A number in a text, but no line number and no part of a path.
ADVICE = "Or pass on_failure='eager' to continue without replays"  # The end of the text of each refusal that is raised.


class Refusals:
    """The refusals of one step. Those that escalate (by default, before the first replay) are raised, others warn."""

    def __init__(self, on_failure: str, stats: Stats, peers: Peers | None) -> None:
        self._peers = peers
        self._warned: set[str] = set()
        self.escalates: Callable[[RefusalError], bool] = lambda error: on_failure == "raise" and not stats.replayed

    def refuse(self, error: RefusalError, consequence: str = "graphplan runs this step eagerly") -> None:
        """Raise ``error`` if it escalates, else warn once of the ``consequence``. Inform other ranks in both cases."""
        if self._peers is not None and not isinstance(error, FeedError):
            self._peers.refuse(error)
        is_always_raised = isinstance(error, DeviceError)
        if is_always_raised or self.escalates(error):
            error.is_raised = True
            text = str(error)
            if not is_always_raised and "on_failure=" not in text:
                text = f"{text.rstrip('.')}. {ADVICE}"
                error.args = (text, *error.args[1:])
            raise error
        _forget_frames(error)
        self.warn(f"{consequence}: {error}")

    @hands_over
    def warn(self, text: str) -> None:
        """Warn once for texts that differ only in numbers (of two programs). Raises if warnings are errors."""
        sentence = _NUMBER.sub("0", text)
        if sentence not in self._warned:
            self._warned.add(sentence)
            warnings.warn(text, UserWarning, stacklevel=6)


def _forget_frames(error: BaseException | None) -> None:
    """Clear the tracebacks of an error and its causes: refusals are kept, and their frames reference the batch."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__


class Runner:
    """The runner of one step's function, with its backend and the statistics of its calls."""

    def __init__(self, fn: Callable[..., Any], managed: Managed, backend: str, backends: Backends) -> None:
        self.fn = fn
        self._managed = managed
        self._asked = backend
        self._backends = backends
        self._backend: Backend | None = None
        self.device: torch.device | None = None
        self.plan: Plan | None = None
        self.stats = Stats()
        self.outcome: tuple[Any] | None = None  # The result of the step's function, once it has returned in this call.

    @property
    def backend(self) -> Backend:
        """The backend; available after :meth:`settle_backend`."""
        assert self._backend is not None
        return self._backend

    def call(self, fed: CallArguments) -> Any:
        """Call the step's function. Reshard FSDP2 modules before and after it."""
        self._managed.sharding.settle()
        result = call_step(self.fn, fed.args, fed.kwargs)
        self.outcome = (result,)
        self._managed.sharding.settle()
        return result

    def run(
        self, body: Callable[[], Any], *, traced: bool = False, within: Callable[[Callable[[], Any]], Any] | None = None
    ) -> Any:
        """Run ``body`` as a managed step: code is told that a capture is active, and optimizers get device learning
        rates (if ``traced``, all code does). ``within`` replaces the backend's ``run``, to prepare a program's memory.
        """
        with presenting_capture(), self._managed.rates if traced else self._managed.rates.within_optimizers():
            if self._backend is None:
                return body()
            return (within or self._backend.run)(body)

    def eager(self, fed: CallArguments, reason: SkipReason | None, detail: str = "", *, managed: bool = False) -> Any:
        """Run an eager call: as a ``managed`` step, like those before a trace, or with learning rates as numbers."""
        if managed:
            result = self.run(lambda: self.call(fed))
        else:
            with self._managed.rates.kernels():
                result = self.call(fed)
        self.count_eager(reason, detail)
        return result

    def count_eager(self, reason: SkipReason | None, detail: str = "") -> None:
        """Count an eager call that has returned."""
        self.stats.eager += 1
        self.stats.end_call("eager")
        if reason is not None:
            self.stats.skip(reason, detail)

    def settle_backend(self, feed: Feed) -> None:
        """Choose the device and the backend, once, from the tensors of the owners and the feed."""
        if self._backend is not None:
            return
        walk = self._managed.walk_before()
        if not feed.tensors() and not any(slot.tensors() for slot in walk.slots.values()):
            # Neither the feed nor the owners have tensors: use those that the code names, which become owners later.
            named = dict(names_in(inspect.unwrap(self.fn)))
            walk = walk_owners({name: each for name, each in named.items() if isinstance(each, _LEADING)})
        device = find_device(walk, feed)
        name = resolve_backend(self._asked, device)
        check_feed(feed, device)
        self.device = device
        self._backend = self._backends.get(name, device)


@dataclass(frozen=True, slots=True)
class StepContext:
    """The objects that the classes of one step share."""

    options: Options
    managed: Managed
    runner: Runner
    refusals: Refusals
    programs: Programs
    peers: Peers | None
    given: GivenNumbers


def to_device(device: torch.device | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """The arguments, of any kind, with their tensors moved to ``device`` if that is given."""
    if device is None:
        return CallArguments(args, kwargs)
    return CallArguments(*map_result(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs)))
