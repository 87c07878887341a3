"""The capture of one call: a plan becomes a program, and the call gets its results."""

from __future__ import annotations

from collections import ChainMap
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

from graphplan.backends.backend import Backend
from graphplan.backends.cudagraph import CUDAGraphBackend
from graphplan.compare.building import build_later
from graphplan.errors import HostSyncError
from graphplan.feed.buffers import Buffers
from graphplan.feed.signature import Feed
from graphplan.feed.unread import Placeholders
from graphplan.owners.snapshot import Snapshot
from graphplan.plan.plan import Plan
from graphplan.program.capture import capture_program
from graphplan.program.program import Program
from graphplan.step.compiled import uncompiled
from graphplan.step.managed import Managed
from graphplan.step.options import Options
from graphplan.step.runner import Runner


class Captures:
    """Captures the programs of one step, which are fed from ``buffers``."""

    def __init__(self, runner: Runner, managed: Managed, options: Options, buffers: Buffers) -> None:
        self._runner = runner
        self._managed = managed
        self._options = options
        self._buffers = buffers
        self._stats = runner.stats
        self._programs: WeakSet[Program] = WeakSet()

    def take(
        self, plan: Plan, feed: Feed, placeholders: Placeholders | None, snapshot: Snapshot, *, compiled: bool
    ) -> tuple[Program, Any]:
        """A program, and the results of the call with ``feed`` that is captured, which holds ``placeholders``.
        ``snapshot`` is from before it; ``compiled``: whether the step runs compiled modules.

        Raises:
            ReadSignal: if the step used a placeholder.
        """
        backend = self._runner.backend
        assert backend is not None
        asserted = plan.assertions
        if compiled and asserted and not backend.executes:
            raise HostSyncError(
                f"the step {asserted[0]}, and runs compiled code: a capture of both waits for the device. Expected "
                "no assertion of the kind around compiled code; leave it out, use torch._assert_async, or do without "
                "torch.compile"
            )
        with self._stats.timed("capture"):
            recorded = uncompiled() if backend.executes and compiled else nullcontext()
            with self._managed.rates, recorded:
                program = self._record(plan, feed, backend)
            try:
                if placeholders is not None:
                    placeholders.check()
            except BaseException:
                program.close()
                raise
            if self._options.debug_eager and not backend.executes:
                # What the step's Python did while it was captured is undone, since it does it again.
                snapshot.restore()
                result = self._runner.run(lambda: program.run_eagerly(feed.leaves))
            else:
                result = program.run_recorded(feed.leaves, executed=backend.executes)
        if self._options.debug:
            program.wait("its capture")
        if self._options.prefetch and self._options.feed_device is not None:
            program.stage_inputs()
        program.next_check = self._options.schedule.after(0)
        self._programs.add(program)
        build_later()
        self._stats.captured += 1
        self._stats.launches_eager += plan.launches
        return program, result

    def _record(self, plan: Plan, feed: Feed, backend: Backend) -> Program:
        backend.reads = plan.host_reads
        backend.states = plan.states
        if isinstance(backend, CUDAGraphBackend):
            backend.generators = list(plan.generators)
            backend.constants = list(plan.device_constants)
            backend.watched = f"the program of {plan.name} (fed {plan.feed})" if self._options.debug else None
        return capture_program(
            plan,
            feed,
            policy=self._options.roles,
            backend=backend,
            buffers=self._buffers,
            homes=ChainMap(*(dict(program.homes) for program in self._programs if program.is_open)),
            lends=self._options.outputs == "static",
        )
