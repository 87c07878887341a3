"""The CUDA-graph backend: stream capture of a whole step. All its recordings share one stream and one memory pool."""

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
from graphplan.backends.cudapools import PoolAllocation, forget_workspaces, move
from graphplan.backends.cudastates import CapturedStates
from graphplan.backends.idleness import CAPTURE_LOCK
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

_FIX = "Move that operation out of the step"
_MODE = "thread_local"
"""Other threads (a pin-memory thread) may use CUDA during a capture."""

_ON_ANOTHER_STREAM = ("legacy stream depend on a capturing", "uncaptured work in another stream")
"""CUDA's messages for a dependency between the captured stream and another one."""
_SHARE = 1.2
"""With checks and copies of the state, reserved memory may reach this multiple of the memory of eager steps: 1.3 with
what torch reserves for tensors on another stream, such as batches.
"""
_UNUSED = 0.1
"""The least share of the memory of eager steps for whose release tensors are moved."""
_SMALL = 2**20
"""Bytes up to which torch's allocator keeps tensors in segments of their own, of 2 MiB."""
_LIVING: weakref.WeakSet[GraphRecording] = weakref.WeakSet()


class Branch(NamedTuple):
    """A branch of a captured step on a device value, which the preceding graph copies to pinned ``memory``."""

    memory: Tensor
    read: HostRead


@dataclass(eq=False)
class GraphRecording:
    """Instantiated CUDA graphs, one more than ``branches``, which are evaluated between them."""

    graphs: list[torch.cuda.CUDAGraph]
    branches: list[Branch]
    device: torch.device
    nbytes: int
    generation: object = None
    states: CapturedStates | None = None
    is_spoiled: bool = field(default=False, init=False)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`reset` has not been called."""
        return bool(self.graphs)

    def replay(self) -> None:
        """Launch the graphs on the current stream."""
        assert self.graphs, "a closed program is refused before its recording is asked"
        end = None if self.states is None else self.states.before_replay()
        for graph, branch in zip(self.graphs, self.branches, strict=False):
            graph.replay()
            torch.cuda.current_stream(self.device).synchronize()
            branch.read.compare(branch.memory.item())
        self.graphs[-1].replay()
        if self.states is not None and end is not None:
            self.states.after_replay(end)

    def reset(self) -> None:
        """Destroy the graphs. The pool's memory is freed with the last recording of the pool."""
        if self.graphs:
            torch.cuda.synchronize(self.device)
            while self.graphs:
                self.graphs.pop().reset()
            # The memory of a pool without graphs stays reserved until the cache is emptied.
            _empty_cache()


class _Capture:
    """A capture on the current stream, split into graphs at the step's branches. ``pool`` is the handle of their memory
    pool; ``states`` has the generators for the states that the step restores.
    """

    def __init__(self, pool: Any, traced: TracedValues, states: CapturedStates | None) -> None:
        self._pool, self._generators, self.states = pool, traced.generators, states
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.branches: list[Branch] = []
        # Host memory cannot be pinned during a capture, so allocate it before.
        kinds = [torch.tensor(read.outcome).dtype for read in traced.reads if read.expected]
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
            # Suppress torch's warning about empty graphs: a step may end with a branch, or fail at once.
            warnings.simplefilter("ignore")
            self.graphs[-1].capture_end()

    def split(self, tensor: Tensor, read: HostRead) -> None:
        """End the graph at the step's read of ``tensor``, and begin the next one."""
        if not self._memories:
            raise CaptureError(f"the captured step reads more values than the traced steps at {read.place}. {_FIX}")
        memory = self._memories.pop(0)
        memory.copy_(read.outcome_of(tensor.detach()).reshape(()), non_blocking=True)
        self.end()
        self.branches.append(Branch(memory, read))
        self.begin()

    def abandon(self) -> bool:
        """End a failed capture and discard its graphs. Return True if CUDA had not invalidated the capture."""
        intact = True
        try:
            self.end()
        except RuntimeError:
            # CUDA reports an invalidated capture again here; the caller already has the first error.
            intact = False
        for graph in self.graphs:
            with suppress(RuntimeError):
                graph.reset()
        return intact


def _note_living(recording: GraphRecording) -> None:
    """Destroy ``recording`` at process exit, before all exit handlers registered so far: NCCL's
    ``destroy_process_group`` waits until no graph with its kernels is left, and a traceback may keep one alive.
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
        """The stream of captures, and of eager work that will be captured."""
        self._pool: Any = None
        self._living: weakref.WeakSet[GraphRecording] = weakref.WeakSet()
        self._eager_bytes = self._workspaces = 0
        self._has_recorded = self._has_failed = False
        self._lends = PoolAllocation.is_possible()

    def run(self, body: Callable[[], Any]) -> Any:
        """Run ``body`` on the capture stream, after earlier and before later work of the current stream. AccumulateGrad
        nodes remember the stream they were made on: made here, they cause no wait for another stream in a capture.
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
        if not self._lends or self.may_take(nbytes + self._workspaces):
            return self.run(body)

        def within() -> Any:
            loan = PoolAllocation(self.device, recording.generation)
            try:
                with loan:
                    result = body()
                torch.clear_autocast_cache()
                forget_workspaces()
                loan.move_out(left(result))
            except torch.OutOfMemoryError:
                # The caller undoes the step, so nothing has to be moved out.
                forget_workspaces()
                raise
            except BaseException:
                self._spoil(recording.generation)
                raise
            # Tensors still in the pool are most likely in young reference cycles. Others can only be found by the
            # garbage collector: in a cache, or in a container that the step has replaced and the check has to keep.
            for free in (partial(gc.collect, 0), loan.move_out_all, gc.collect):
                if loan.is_over():
                    return result
                free()
            if not loan.is_over():
                self._spoil(recording.generation)
            return result

        return self.run(within)

    def _spoil(self, generation: object) -> None:
        """Forbid further replays and loans: eager code keeps a tensor in memory that replays overwrite."""
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
        """See :meth:`graphplan.backends.backend.Backend.may_take`. Empty the cache before answering False."""
        if not super().may_take(nbytes):
            self.trim()
        return super().may_take(nbytes)

    def room(self) -> float:
        """See :meth:`graphplan.backends.backend.Backend.room`."""
        most = _SHARE * self._eager_bytes if self._eager_bytes else math.inf
        return most - torch.cuda.memory_reserved(self.device)

    def record(self, body: Callable[[], Any], traced: TracedValues = NOTHING_TRACED) -> tuple[GraphRecording, Any]:
        """See :meth:`graphplan.backends.backend.Backend.record`."""
        if self._pool is None or not self._in_pool():
            # torch drops a pool with its last graph, so its handle must not be used again.
            self._pool = torch.cuda.graph_pool_handle()
        self._has_recorded = True
        generator = torch.cuda.default_generators[self.stream.device_index]
        states = CapturedStates(generator, traced.states) if traced.states.saves else None
        capture = _Capture(self._pool, traced, states)
        # Garbage of the preceding steps is in the young generations. A full collection takes 0.3 s, so run one only
        # after a failed capture, or if a closed recording is still alive.
        is_clean = not self._has_failed and all(recording.is_open for recording in self._living)
        gc.collect(1 if is_clean else 2)
        self._has_failed = False
        torch.cuda.synchronize(self.device)
        # Memory that eager steps left cached would stay reserved beside the pool: a capture cannot free it.
        self._forget_workspaces()
        self.trim()
        before = torch.cuda.memory_reserved(self.device)
        try:
            # A garbage collection could free another graph's memory, which is illegal during a capture.
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
        """Return the peak bytes, less the memory that the pool already has for them."""
        if alone or self._pool is None:
            return footprint.peak
        return max(0, footprint.peak - sum(recording.nbytes for recording in self._in_pool()))

    def begin_generation(self) -> None:
        """See :meth:`graphplan.backends.backend.Backend.begin_generation`."""
        self._pool = None

    def compact(self, tensors: Sequence[Tensor]) -> None:
        """See :meth:`graphplan.backends.backend.Backend.compact`. Nothing is moved if graphs may have the addresses, if
        little of the reserved memory is unused, or if there is no room for copies.
        """
        if any(recording.is_open for recording in self._living):
            return
        self._forget_workspaces()
        self.trim()
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        moved = [t for t in tensors if type(t) in PLAIN_KINDS and t.device == self.device and t.nbytes > _SMALL]
        if unused > _UNUSED * self._eager_bytes and self.may_take(sum(tensor.nbytes for tensor in moved)):
            self.run(lambda: move(moved, self.trim))
            self.trim()

    def _forget_workspaces(self) -> None:
        allocated = torch.cuda.memory_allocated(self.device)
        forget_workspaces()
        self._workspaces = max(self._workspaces, allocated - torch.cuda.memory_allocated(self.device))

    def trim(self) -> None:
        """See :meth:`graphplan.backends.backend.Backend.trim`."""
        _empty_cache()

    def _in_pool(self) -> list[GraphRecording]:
        """Return the open recordings whose memory is in the current pool."""
        return [recording for recording in self._living if recording.is_open and recording.generation == self._pool]

    def _capture(self, capture: _Capture, body: Callable[[], Any], traced: TracedValues) -> Any:
        current = torch.cuda.current_stream(self.device)
        constants = DeviceConstants(traced.device_constants) if traced.device_constants else nullcontext()
        # Compiled code ignores a dispatch mode, or runs uncompiled under one: enter a mode only if it is needed.
        is_needed = traced.in_mode or traced.transfers or any(read.waits for read in traced.reads)
        is_given = is_needed or traced.answers is not None
        on_expected = capture.split
        given = GivenValues(traced.reads, traced.transfers, traced.answers, on_expected) if is_given else None
        states = capture.states
        self.stream.wait_stream(current)
        with CAPTURE_LOCK, torch.cuda.stream(self.stream):
            try:
                capture.begin()
                with constants, given or nullcontext(), nullcontext() if states is None else states.captured():
                    result = body()
                    if given is not None:
                        given.check()
            except BaseException as error:
                # The traceback's frames would keep the unfinished autograd graph and its accumulators' stream alive.
                traceback.clear_frames(error.__traceback__)
                intact = self._abandon(capture, traced.generators)
                if any(text in str(error) for text in _ON_ANOTHER_STREAM):
                    raise CaptureError(
                        f"the step failed while it was captured{_place(error)}: {first_line(error)}. Perhaps the step "
                        "keeps a result of another stream with its autograd graph: detach the results that it keeps"
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
        """End a failed capture so that the process can train on. Return True if CUDA had not invalidated it."""
        self._has_failed = True
        intact = capture.abandon()
        if not intact:
            self._give_back_pool()
        # Autocast's cached casts are in the pool and were never computed.
        torch.clear_autocast_cache()
        self._pool = None
        if torch.cuda.is_current_stream_capturing():
            # Replace only a stream stuck in a capture: autograd's accumulators and cuBLAS workspaces belong to it.
            self.stream = torch.cuda.Stream(self.device)
        if not intact:
            self._heal_generators(generators)
        return intact

    def _heal_generators(self, generators: Sequence[torch.Generator]) -> None:
        """Reset generators that an unfinished capture left in capture mode, by an empty capture. A fresh copy of their
        state would not do: existing graphs would keep the old state and draw other numbers.
        """
        graph = torch.cuda.CUDAGraph()
        _register(generators, graph)
        with torch.cuda.stream(torch.cuda.Stream(self.device)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph.capture_begin(capture_error_mode=_MODE)
            graph.capture_end()
        graph.reset()

    def _give_back_pool(self) -> None:
        """End the allocation to the pool after an invalidated capture, or torch may never free any memory."""
        place = (self.stream.device_index, self._pool)
        # If torch has already done this, the calls raise RuntimeError.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(*place)
        if not self._in_pool():
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(*place)


def lend(result: Any, stream: Any, device: torch.device) -> None:
    """Record ``stream`` for the tensors of ``result``, whose memory belongs to the capture stream, so that it is not
    reused too early. Skip this under a mode or transform of the caller, which would see these operators, or fail.
    """
    if surroundings() is not None:
        return
    for tensor in (local(leaf) for leaf in flatten_result(result)[0] if isinstance(leaf, Tensor)):
        if type(tensor) in PLAIN_KINDS and tensor.device == device and tensor.layout is torch.strided:
            # Record the storage: for a tensor marked as conjugated, torch would record a copy.
            memory = torch.empty(0, dtype=torch.uint8, device=device)
            memory.set_(tensor.untyped_storage()).record_stream(stream)


def _register(generators: Sequence[torch.Generator], graph: torch.cuda.CUDAGraph) -> None:
    for generator in generators:
        # A CPU generator draws outside the graph.
        if generator.device.type == "cuda":
            graph.register_generator_state(generator)


def _empty_cache() -> None:
    # Some releases of torch cannot empty the cache while another thread captures; then keep it.
    with suppress(RuntimeError):
        torch.cuda.empty_cache()


def _place(error: BaseException) -> str:
    """Return the place in the user's source that raised ``error``; empty if the capture did not begin."""
    source = find_raise(error)
    return "" if source is None else f", at {source}"


def _is_own(error: BaseException, *, intact: bool) -> bool:
    """Return True for an error that an eager step would also raise, or that callers handle."""
    if isinstance(error, RefusalError) or not isinstance(error, Exception) or is_out_of_memory(error):
        return True
    code = raising_code(error)
    is_users = code is not None and not is_library(code.co_filename)
    return intact and (is_users or not isinstance(error, RuntimeError))
