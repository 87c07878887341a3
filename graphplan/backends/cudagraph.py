"""The CUDA-graph backend: stream capture of a whole step. One stream and one memory pool serve all its recordings."""

from __future__ import annotations

import atexit
import gc
import math
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphplan.backends.backend import NOTHING_TRACED, Backend, Recording, TracedValues, first_line, is_out_of_memory
from graphplan.backends.cudapools import Loan, forget_workspaces
from graphplan.backends.cudastates import CapturedStates
from graphplan.backends.idleness import UNDISTURBED
from graphplan.environment.collector import no_collections
from graphplan.environment.origin import is_library
from graphplan.environment.surroundings import surroundings
from graphplan.errors import CaptureError, RefusalError
from graphplan.observe.source import find_raise, raising_code
from graphplan.specs.roles import Footprint
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.dtensors import local
from graphplan.tensors.trees import flatten_result
from graphplan.trace.given_values import DeviceConstants, GivenValues
from graphplan.trace.host_reads import HostRead

_FIX = "Keep that out of the step"
_MODE = "thread_local"
"""Other threads (a pin-memory thread) may use CUDA during a capture."""

_ON_ANOTHER_STREAM = ("legacy stream depend on a capturing", "uncaptured work in another stream")
"""What CUDA says where a captured stream and another one would have to wait for each other."""
_SHARE = 1.3
"""As many times the memory that eager steps have taken, checks and copies of the state may have reserved."""
_LIVING: weakref.WeakSet[GraphRecording] = weakref.WeakSet()


class Branch(NamedTuple):
    """Where a captured step branches on a value of the device, which the graph before copies to pinned ``memory``."""

    memory: Tensor
    read: HostRead


@dataclass(eq=False)
class GraphRecording:
    """Instantiated CUDA graphs, one more than ``branches``, which lie between them."""

    graphs: list[torch.cuda.CUDAGraph]
    branches: list[Branch]
    device: torch.device
    nbytes: int
    generation: object = None
    states: CapturedStates | None = None
    is_spoiled: bool = field(default=False, init=False)

    @property
    def is_open(self) -> bool:
        """Return True until :meth:`reset`."""
        return bool(self.graphs)

    def replay(self) -> None:
        """Launch the graphs on the current stream."""
        assert self.graphs, "a closed program is refused before its recording is asked"
        end = None if self.states is None else self.states.set_out()
        for graph, branch in zip(self.graphs, self.branches, strict=False):
            graph.replay()
            torch.cuda.current_stream(self.device).synchronize()
            branch.read.compare(branch.memory.item())
        self.graphs[-1].replay()
        if self.states is not None and end is not None:
            self.states.arrive(end)

    def reset(self) -> None:
        """Destroy the graphs and let their pool's memory go, once no other recording of the pool is left."""
        if self.graphs:
            torch.cuda.synchronize(self.device)
            while self.graphs:
                self.graphs.pop().reset()
            # A pool without graphs stays reserved until this is asked for.
            _empty_cache()


class _Capture:
    """A capture on the current stream, in as many graphs as the step's branches need. ``pool`` is the handle of their
    memory, ``states`` are the generators for the states that the step puts back.
    """

    def __init__(self, pool: Any, traced: TracedValues, states: CapturedStates | None) -> None:
        self._pool, self._generators, self.states = pool, traced.generators, states
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.branches: list[Branch] = []
        # No memory of the host can be pinned while a stream is captured.
        kinds = [torch.tensor(read.value).dtype for read in traced.reads if read.expected]
        self._memories = [torch.empty((), dtype=kind, pin_memory=True) for kind in kinds]

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        _register(self._generators, graph)
        if self.states is not None:
            self.states.register(graph)
        self.graphs.append(graph)
        graph.capture_begin(pool=self._pool, capture_error_mode=_MODE)

    def end(self) -> None:
        with warnings.catch_warnings():
            # torch warns of an empty one: nothing may come after a branch, and a step may fail at once.
            warnings.simplefilter("ignore")
            self.graphs[-1].capture_end()

    def split(self, tensor: Tensor, read: HostRead) -> None:
        """End a graph where the step reads ``tensor``, and begin the next one."""
        if not self._memories:
            raise CaptureError(f"the captured step reads more values than the traced steps at {read.place}. {_FIX}")
        memory = self._memories.pop(0)
        memory.copy_(tensor.detach().reshape(()), non_blocking=True)
        self.end()
        self.branches.append(Branch(memory, read))
        self.begin()

    def abandon(self) -> bool:
        """End a capture that is of no use. True if CUDA could have gone on."""
        intact = True
        try:
            self.end()
        except RuntimeError:
            # CUDA reports an invalidated capture a second time here; the caller already has the first report.
            intact = False
        for graph in self.graphs:
            with suppress(RuntimeError):
                graph.reset()
        return intact


def _note_living(recording: GraphRecording) -> None:
    """Have ``recording`` destroyed before what was registered for the process's end until now: NCCL's
    ``destroy_process_group`` waits until no graph that has its kernels is left, and a traceback may hold one.
    """
    _LIVING.add(recording)
    atexit.unregister(_end_recordings)
    atexit.register(_end_recordings)


def _end_recordings() -> None:
    for recording in list(_LIVING):
        with suppress(RuntimeError):
            recording.reset()


class CUDAGraphBackend(Backend):
    """Captures on one CUDA device. Capturing does not execute: the first replay is the captured step."""

    executes = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        """Where it captures, and runs what is to be captured."""
        self._pool: Any = None
        self._living: weakref.WeakSet[GraphRecording] = weakref.WeakSet()
        self._eager_bytes = 0
        self._has_recorded = self._has_failed = False
        self._lends = Loan.is_possible()

    def run(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` on the capture stream, ordered after and before the current one. Autograd's accumulators
        remember the stream that they were made on: a capture then need not wait on another one.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = body()
        current.wait_stream(self.stream)
        if current != self.stream:
            lend(result, current, self.device)
        return result

    def run_between(
        self, body: Callable[[], Any], recording: Recording, nbytes: int, left: Callable[[Any], Iterable[Tensor]]
    ) -> Any:
        """See :meth:`graphplan.backends.backend.Backend.run_between`."""
        if not self._lends or self.may_take(nbytes):
            return self.run(body)

        def within() -> Any:
            loan = Loan(self.device, recording.generation)
            try:
                with loan:
                    result = body()
                torch.clear_autocast_cache()
                forget_workspaces()
                loan.move_out(left(result))
            except torch.OutOfMemoryError:
                # The caller undoes the step.
                forget_workspaces()
                raise
            except BaseException:
                self._spoil(recording.generation)
                raise
            # The rest lies in young cycles, most likely; else where only Python's collector finds it: in a cache, or in
            # a container that the step has replaced and the check has to keep.
            for free in (partial(gc.collect, 0), loan.move_out_all, gc.collect):
                if loan.is_over():
                    return result
                free()
            if not loan.is_over():
                self._spoil(recording.generation)
            return result

        return self.run(within)

    def _spoil(self, generation: object) -> None:
        """Something that eager code keeps lies where replays write: there are no more of them, and no more loans."""
        self._lends = False
        self._pool = None
        for recording in self._living:
            if recording.generation == generation:
                recording.is_spoiled = True

    def note_eager(self) -> None:
        """See :meth:`graphplan.backends.backend.Backend.note_eager`."""
        if not self._has_recorded:
            self._eager_bytes = torch.cuda.max_memory_reserved(self.device)

    def may_take(self, nbytes: int) -> bool:
        """See :meth:`graphplan.backends.backend.Backend.may_take`. The cache is emptied first if it is in the way."""
        if not super().may_take(nbytes):
            self.trim()
        return super().may_take(nbytes)

    def room(self) -> float:
        """See :meth:`graphplan.backends.backend.Backend.room`."""
        most = _SHARE * self._eager_bytes if self._eager_bytes else math.inf
        return most - torch.cuda.memory_reserved(self.device)

    def record(self, body: Callable[[], Any], traced: TracedValues = NOTHING_TRACED) -> tuple[GraphRecording, Any]:
        """See :meth:`graphplan.backends.backend.Backend.record`."""
        if self._pool is None or not self._is_pool_used():
            # torch forgets a pool's handle when its last graph goes.
            self._pool = torch.cuda.graph_pool_handle()
        self._has_recorded = True
        generator = torch.cuda.default_generators[self.stream.device_index]
        states = CapturedStates(generator, traced.states) if traced.states.saves else None
        capture = _Capture(self._pool, traced, states)
        # What the steps on the way have left is young until a collection has come by. Old garbage may lie anywhere in
        # all that the process has, which takes 0.3 s: only after a failed capture, or where a closed recording is held.
        is_clean = not self._has_failed and all(recording.is_open for recording in self._living)
        gc.collect(1 if is_clean else 2)
        self._has_failed = False
        torch.cuda.synchronize(self.device)
        # What eager steps have left cached lies beside the pool otherwise, and no capture can have it freed.
        self.trim()
        before = torch.cuda.memory_reserved(self.device)
        forget_workspaces()
        try:
            # A collection in the middle could free another graph's memory, which is illegal during capture.
            with no_collections():
                result = self._capture(capture, body, traced)
        finally:
            forget_workspaces()
        nbytes = torch.cuda.memory_reserved(self.device) - before
        graphs, branches = capture.graphs, capture.branches
        recording = GraphRecording(graphs, branches, self.device, nbytes, self._pool, states=states)
        self._living.add(recording)
        _note_living(recording)
        return recording, result

    def needs(self, footprint: Footprint, *, alone: bool) -> int:
        """What is alive at once, less what the pool has for it already."""
        if alone or self._pool is None:
            return footprint.peak
        others = (r.nbytes for r in self._living if r.is_open and r.generation == self._pool)
        return max(0, footprint.peak - sum(others))

    def begin_generation(self) -> None:
        """See :meth:`graphplan.backends.backend.Backend.begin_generation`."""
        self._pool = None

    def trim(self) -> None:
        """See :meth:`graphplan.backends.backend.Backend.trim`."""
        _empty_cache()

    def _is_pool_used(self) -> bool:
        return any(recording.is_open for recording in self._living)

    def _capture(self, capture: _Capture, body: Callable[[], Any], traced: TracedValues) -> Any:
        current = torch.cuda.current_stream(self.device)
        constants = DeviceConstants(traced.device_constants) if traced.device_constants else nullcontext()
        # Compiled code leaves a dispatch mode out of account, or does not run compiled: no mode without need.
        is_needed = traced.in_mode or traced.transfers or any(read.waits for read in traced.reads)
        is_given = is_needed or traced.answers is not None
        on_expected = capture.split
        given = GivenValues(traced.reads, traced.transfers, traced.answers, on_expected) if is_given else None
        states = capture.states
        self.stream.wait_stream(current)
        with UNDISTURBED, torch.cuda.stream(self.stream):
            try:
                capture.begin()
                with constants, given or nullcontext(), nullcontext() if states is None else states.captured():
                    result = body()
                    if given is not None:
                        given.check()
            except BaseException as error:
                # The frames would keep the half-captured autograd graph, and its accumulators' stream, alive.
                traceback.clear_frames(error.__traceback__)
                intact = self._abandon(capture, traced.generators)
                if any(text in str(error) for text in _ON_ANOTHER_STREAM):
                    raise CaptureError(
                        f"the step failed while it was captured{_place(error)}: {first_line(error)}. A result that "
                        "was computed on another stream may be kept with its graph: detach what is kept"
                    ) from error
                if _is_own(error, intact=intact):
                    raise
                raise CaptureError(
                    f"the step failed while it was captured{_place(error)}: {first_line(error)}. {_FIX}"
                ) from error
            try:
                capture.end()
            except RuntimeError as error:
                self._abandon(capture, traced.generators)
                raise CaptureError(f"CUDA refused the captured step: {first_line(error)}. {_FIX}") from error
        current.wait_stream(self.stream)
        return result

    def _abandon(self, capture: _Capture, generators: Sequence[torch.Generator]) -> bool:
        """End a capture that is of no use, and leave the process able to train. True if CUDA could have gone on."""
        self._has_failed = True
        intact = capture.abandon()
        if not intact:
            self._give_back_pool()
        # Casts that autocast remembers lie in the pool, and were never computed.
        torch.clear_autocast_cache()
        self._pool = None
        if torch.cuda.is_current_stream_capturing():
            # Else the stream stays: autograd's accumulators and cuBLAS's workspaces belong to it.
            self.stream = torch.cuda.Stream(self.device)
        if not intact:
            self._heal_generators(generators)
        return intact

    def _heal_generators(self, generators: Sequence[torch.Generator]) -> None:
        """Make generators usable again that a capture which never ended has left in its middle: a capture of nothing
        does it. With a fresh copy of their state, living graphs would go on with the old one, and draw other numbers.
        """
        graph = torch.cuda.CUDAGraph()
        _register(generators, graph)
        with torch.cuda.stream(torch.cuda.Stream(self.device)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph.capture_begin(capture_error_mode=_MODE)
            graph.capture_end()
        graph.reset()

    def _give_back_pool(self) -> None:
        """Tell torch's allocator that a capture is over which CUDA gave up: torch may forget to, and frees nothing."""
        place = (self.stream.device_index, self._pool)
        # Where torch did not forget, it says here that there is nothing to end or to release.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(*place)
        if not self._is_pool_used():
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(*place)


def lend(result: Any, stream: Any, device: torch.device) -> None:
    """Keep the memory of ``result`` on ``device``, which is the capture stream's, from being used again before
    ``stream`` is done with it. A mode or a transform of the caller's would see this, or fail.
    """
    if surroundings() is not None:
        return
    for tensor in (local(leaf) for leaf in flatten_result(result)[0] if isinstance(leaf, Tensor)):
        if type(tensor) in PLAIN_KINDS and tensor.device == device and tensor.layout is torch.strided:
            # Not the tensor itself: of one that is marked as conjugated torch would record a copy.
            memory = torch.empty(0, dtype=torch.uint8, device=device)
            memory.set_(tensor.untyped_storage()).record_stream(stream)


def _register(generators: Sequence[torch.Generator], graph: torch.cuda.CUDAGraph) -> None:
    for generator in generators:
        # One of the host's draws outside of the graph.
        if generator.device.type == "cuda":
            graph.register_generator_state(generator)


def _empty_cache() -> None:
    # Some releases of torch cannot while another thread captures; then it stays cached.
    with suppress(RuntimeError):
        torch.cuda.empty_cache()


def _place(error: BaseException) -> str:
    """Where in the user's source ``error`` came from; empty for a capture that did not even begin."""
    source = find_raise(error)
    return "" if source is None else f", at {source}"


def _is_own(error: BaseException, *, intact: bool) -> bool:
    """Return True for an error that an eager step would have raised, too, or that others are to handle."""
    if isinstance(error, RefusalError) or not isinstance(error, Exception) or is_out_of_memory(error):
        return True
    code = raising_code(error)
    is_users = code is not None and not is_library(code.co_filename)
    return intact and (is_users or not isinstance(error, RuntimeError))
