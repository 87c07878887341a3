"""A graphed step: one call at a time through its state machine, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from typing_extensions import override

from graphplan.compare import building as native
from graphplan.compare.comparing import Tensors
from graphplan.errors import OptionError, SkipReason
from graphplan.feed.signature import Feed
from graphplan.plan.plan import Plan
from graphplan.program.program import Program
from graphplan.report.data import describe_data, describe_program
from graphplan.report.rendering import Reports
from graphplan.report.stats import Stats
from graphplan.report.text import describe
from graphplan.specs.policy import Policy
from graphplan.step.buckets import Buckets
from graphplan.step.call_lock import CallLock, running_step
from graphplan.step.capture_sizes import ShapeStats
from graphplan.step.dimensions import Dims
from graphplan.step.eager_calls import Before, BeforeError
from graphplan.step.gate import Gate
from graphplan.step.methods import Method, check_form, owners_of
from graphplan.step.options import EagerIf, Options
from graphplan.step.padded_batches import PaddedBatches
from graphplan.step.padding import PadValue
from graphplan.step.peers import Peers
from graphplan.step.runner import Backends, brought_to
from graphplan.step.state_machine import StateMachine
from graphplan.step.timing import Stock


class GraphedStep(Method, CallLock, Reports):
    """A step that replays itself. Made by :func:`graph_step`.

    In a class it is a method: each instance has a step, and programs, of its own. Steps that are given the same
    ``backends`` share memory; ``peers`` are other ranks that capture if this one does. Without ``compiles``,
    ``options.compile`` is the caller's business. A ``gate`` that knows the eager time decides whether replays pay;
    without one, the step times its first calls if its options ask for that, unless ``opens_gate`` is false.

    Attributes:
        machine: what makes its calls, and its parts.
        shapes: counts of shapes, capture sizes and elements, for ``shapes="bucket"``.

    Raises:
        OptionError: if ``fn`` cannot be called, or only begins something when it is.
    """

    takers = ("_call", "invalidate", "close", "find_program", "skip", "recover")

    def __init__(
        self,
        fn: Callable[..., Any],
        owners: Mapping[str, Any] | Sequence[Any] | None,
        options: Options,
        backends: Backends | None = None,
        peers: Peers | None = None,
        *,
        compiles: bool = True,
        gate: Gate | None = None,
        opens_gate: bool = True,
    ) -> None:
        super().__init__()
        if not callable(fn):
            raise OptionError(f"the step is a {type(fn).__name__}; expected a function or another callable")
        check_form(fn)
        self._be_method(fn)
        self._options, self._owners = options, owners
        self.machine = StateMachine(
            fn, owners, options, backends, peers,
            compiles=compiles, gate=gate, opens_gate=opens_gate, serve=self._call,
        )  # fmt: skip
        self.shapes = ShapeStats()
        self._padded = PaddedBatches(self.machine, self.shapes) if options.shapes == "bucket" else None
        self._serve = self.machine.serve if self._padded is None else self._padded.serve

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step: eagerly, traced, captured or replayed. Same results whichever it is.

        Raises:
            ClosedError: after :meth:`close`.
            BusyError: while another call is going on, in another thread or around this one.
            RefusalError: if the step cannot be replayed correctly (see ``on_failure``); the call is undone.
            PaddingError: if padding changes what the step leaves (``shapes="bucket"``); the call is undone.
        """
        way = self.machine.timing.way
        return self._call(args, kwargs) if way is None else way(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: Before | None = None) -> Any:
        if not self._turn.acquire(False):
            self._check_turn()
        try:
            return self._serve(args, kwargs, before)
        except Exception as error:
            refusal = self.machine.refusal_of(error)
            if refusal is None:
                raise
            return self.machine.recover(refusal, args, kwargs)
        finally:
            self._turn.release()

    @override
    def _bound_to(self, instance: Any) -> GraphedStep:
        method = MethodType(self._fn, instance)
        return type(self)(method, owners_of(method, self._owners), self._options)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: Before) -> Any:
        """A call that tells ``before`` what is about to run; if that raises, nothing has run."""
        way = self.machine.timing.way
        try:
            return self._call(args, kwargs, before) if way is None else way(args, kwargs)
        except BeforeError as error:
            raise error.args[0] from None

    def skip(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: SkipReason, detail: str = "") -> Any:
        """An eager call for a reason of the caller's, on arguments of any kind, through which gradients may flow."""
        runner = self.machine.runner
        with self._alone(), running_step():
            result = runner.eager(brought_to(self._options.feed_device, args, kwargs), reason, detail)
        runner.outcome = None
        return result

    def recover(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End a call in which ``error`` came up around the step's own call. The caller's errors are raised again."""
        refusal = self.machine.refusal_of(error)
        if refusal is None:
            raise error
        with self._alone():
            return self.machine.recover(refusal, args, kwargs)

    def find_program(self, args: tuple[Any, ...]) -> tuple[Program, Feed] | None:
        """The program that a call with ``args`` would replay now, and its feed; None if it would not replay one.

        Raises:
            RefusalError: for arguments that no program could take.
        """
        with self._alone():
            return self.machine.find_program(args)

    def invalidate(self, why: str) -> None:
        """Drop every program; the next calls trace and capture again. ``why`` goes into the report.

        Raises:
            BusyError: while a call is going on.
        """
        with self._alone():
            self.stats.note(f"invalidated: {why}", "guards")
            self.machine.forget()

    def close(self) -> None:
        """Drop every program and put the optimizers' flags back. The step cannot be called again.

        Raises:
            BusyError: while a call is going on.
        """
        with self._alone():
            self.machine.close()

    @property
    def stock(self) -> Stock | None:
        """What makes calls of the step's function alone, while it is timed or once it stands down."""
        return self.machine.timing.stock

    @property
    def is_down(self) -> bool:
        """Whether calls are calls of the step's function, and nothing else, because of :attr:`down_because`."""
        return self.machine.timing.down_because is not None

    @property
    def down_because(self) -> tuple[SkipReason, str]:
        """Why the step stands down, and its wording."""
        assert self.machine.timing.down_because is not None
        return self.machine.timing.down_because

    @property
    def plan(self) -> Plan | None:
        """The latest plan; None before the second trace."""
        return self.machine.runner.plan

    @property
    def stats(self) -> Stats:
        """What the calls so far were."""
        return self.machine.timing.take_counts()

    @property
    def programs(self) -> list[Program]:
        """Every program that is ready."""
        return self.machine.programs.all()

    @override
    def drawn(self) -> list[Program]:
        return self.programs

    @override
    def text(self) -> str:
        return describe(**self._told())

    @override
    def data(self) -> dict[str, Any]:
        data = describe_data(**self._told(), programs=list(map(describe_program, self.programs)))
        return data if self._padded is None else {**data, "shapes": self.shapes.data()}

    def _told(self) -> dict[str, Any]:
        notes = [*self.facts, *self.machine.compiled.notes]
        if Tensors is None:
            notes.append(f"guards: {native.state()}")
        return {"stats": self.stats, "plans": self.stats.captured - self.stats.recaptured, "notes": notes}

    @property
    def prepared(self) -> list[str]:
        """What was changed on the optimizers to make them capturable."""
        return self.machine.managed.changes

    @property
    def facts(self) -> list[str]:
        """What the report says of the step beside its counts: what was prepared, and what was padded."""
        padded = [] if self._padded is None else [self._padded.fact]
        return [*(f"prepared: {change}" for change in self.prepared), *padded]


def graph_step(
    fn: Callable[..., Any],
    *,
    owners: Mapping[str, Any] | Sequence[Any] | None = None,
    mode: str = "train",
    policy: Policy | None = None,
    backend: str = "auto",
    device: str | torch.device | None = None,
    warmup_steps: int = 3,
    on_failure: str = "raise",
    allow: Sequence[str] = (),
    watch: Sequence[str] = (),
    eager_if: EagerIf = None,
    prepare_optimizers: bool = True,
    fuse_optimizer: bool = False,
    compile: bool | Mapping[str, Any] = False,
    max_graphs: int = 16,
    memory_budget: int | None = None,
    verify: str | int | None = "geometric",
    min_speedup: float | None = None,
    max_recaptures: int = 16,
    debug: bool = False,
    debug_eager: bool = False,
    prefetch: bool = False,
    shapes: str = "exact",
    buckets: Buckets | None = None,
    pad: PadValue | Mapping[str, PadValue] = 0,
    mask: str | None = None,
    dynamic: Mapping[str, Dims] | None = None,
) -> GraphedStep:
    """Make a step that replays itself as one CUDA graph, or on the tape.

    Examples:
        >>> import torch
        >>> from graphplan import graph_step
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def train_step(x, y):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> step = graph_step(train_step, owners={"model": model, "optimizer": optimizer})
        >>> for _ in range(10):
        ...     loss = step(torch.randn(8, 4), torch.randn(8, 1))
        >>> step.stats.eager, step.stats.traced, step.stats.captured, step.stats.replayed
        (3, 2, 1, 4)

    Args:
        fn: the step: forward, backward, optimizer, or a part of these. It takes pytrees of tensors and literals, of any
            shape and dtype.
        owners: objects whose tensors make up the step's state, by name or as a sequence. Modules and optimizers that
            the step uses are found without being named.
        mode: ``"train"`` or ``"inference"``: which default policy holds.
        policy: which roles are static and which are copied in; overrides ``mode``.
        backend: ``"auto"`` (a CUDA graph if the tensors are on CUDA, the tape on the CPU), ``"cudagraph"``,
            ``"tape"``, or ``"eager"``.
        device: where to move fed tensors; without it they must be where the step computes.
        warmup_steps: number of eager calls before a feed signature is traced; at least 1. Once the step has had so
            many, a further signature that comes often takes one of its own.
        on_failure: ``"raise"`` (refusals before the first good replay raise, later ones go on eagerly with a warning)
            or ``"eager"`` (always go on).
        allow: paths (or patterns) of Python effects that replays may leave out, such as ``"model.calls"``.
        watch: installed packages (top-level names) whose globals, classes and closures are guarded as the user's own
            are, in the whole process; without it, what they hold there is trusted, and found by checks alone.
        eager_if: a predicate over the step's arguments, or n for every n-th call: these calls run eagerly.
        prepare_optimizers: whether optimizers may be made capturable (see :func:`prepare_optimizer`).
        fuse_optimizer: whether foreach optimizers are switched to torch's fused kernels if it has them on the device
            (Adam, AdamW, SGD): faster, with other rounding. On the CPU they are what makes an optimizer capturable.
        compile: ``True`` compiles the modules among ``owners`` with ``torch.compile`` before their first step: the
            captured kernels are compiled ones, and the numbers the compiler's. Or arguments of ``torch.compile`` by
            name; without them nothing is compiled on the CPU.
        max_graphs: number of programs that are kept. One that is no longer in use makes room for another. While all
            are used, or if signatures come that never come again, calls without a program are eager.
        memory_budget: bytes that all programs together may compute in; None: as many as the device has. The need of a
            program is estimated from its traces. A program that is too large is not captured: its steps are eager,
            with one warning and the reason in the report. Programs that were used least recently make room.
        verify: which replays are checked against the eager step: ``"geometric"`` (1, 2, 4, 8, … and then every 1000th,
            or so seldom that checks take 0.2 s in the first 64 replays, and then 1 % of the time; of all shapes
            together, and the first one of each), n for every n-th, or ``"off"``. A checked call runs the step eagerly
            besides, from the same state, and eager's outcome stands; it needs copies of parameters and state meanwhile.
        min_speedup: how many times as fast as eager steps the calls have to be, from the end of one to the end of the
            next (in inference: each by itself). The first seven calls (in inference: of each signature) are calls of
            ``fn`` alone, and five of them are timed. If replays are slower, or the device is busy all the time, the
            step stands down: programs go, optimizers are stock, and calls are calls of ``fn``. So they are after a
            refusal, unless that raises. 0 captures at once and keeps programs all the same. None: 1.0 on CUDA, 0 on the
            CPU.
        max_recaptures: number of captures in a row that may come to fewer than 16 replays each before the step is
            refused.
        debug: wait for the device after each capture and each first replay, and name the program in its errors; if
            torch can, also check before each replay that the memory that the recording reads was not freed.
        debug_eager: run the step itself where a program would be replayed, on the program's own inputs: tells a fault
            of the recording from one of everything around it. Nothing is replayed, and so nothing is checked.
        prefetch: with ``device=``, whether inputs of 4 MiB and more that are fed in pinned host memory are copied to
            the device while it is busy with the replay before, into buffers as large, one for each program. They
            have to be written when they are fed, not by work that the device still has to do.
        shapes: ``"exact"`` (a program for each shape), or ``"bucket"``: batches are padded to a capture size, and the
            step is trained on what they are padded to. That is right if padding has no effect: under a mask, with
            labels that the loss ignores. Before the first padded calls of each size (1, 2, 4, 8, …) and some later ones
            the step is rehearsed on the batch as it came and on the padded one, and both are undone: if something
            differs by more than rounding, the step is refused by its name, and the call has not happened; under
            ``on_failure="eager"`` this and all further batches are trained on as they came. Dropout is left out of the
            comparison; a step that draws other random numbers is refused. The first two calls, and batches beyond the
            largest size, are not padded. Results are cut to their true size.
        buckets: capture sizes of dimension 0, in elements, or by dimension; see :func:`graphplan.buckets.fit`.
        pad: what padding holds, a number or ``function(tensor, shape)``; or those by argument, by key of a dictionary
            that is fed (``"labels"``) or by path (``"batch[1]"``).
        mask: the argument that gets a boolean tensor which is true for what is not padding.
        dynamic: dimensions that may vary, by the same names; by default all but the last of an n-d tensor, all of a 1-d
            one.

    Returns:
        A callable with ``plan``, ``stats``, ``report()``, ``invalidate(why)`` and ``close()``. Tensors that the step
        returns come back as detached copies, so a replayed loss has no ``grad_fn``.

    Raises:
        OptionError: if an option has a value or a type that makes no sense.
        PolicyError: if a mode, role or policy does not exist.
        BackendError: if a backend does not exist.
        OwnersError: if ``owners`` is neither a mapping nor a sequence.
    """
    options = Options(
        mode=mode, policy=policy, backend=backend, device=device, warmup_steps=warmup_steps, on_failure=on_failure,
        allow=allow, watch=watch, eager_if=eager_if, prepare_optimizers=prepare_optimizers,
        fuse_optimizer=fuse_optimizer, compile=compile, max_graphs=max_graphs, memory_budget=memory_budget,
        verify=verify, min_speedup=min_speedup, max_recaptures=max_recaptures, debug=debug, debug_eager=debug_eager,
        prefetch=prefetch, shapes=shapes, buckets=buckets, pad=pad, mask=mask, dynamic=dynamic,
    )  # fmt: skip
    return GraphedStep(fn, owners, options)
