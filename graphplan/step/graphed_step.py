"""A graphed step: the callable around a state machine, its statistics and its report."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from typing_extensions import override

from graphplan.compare import building as native
from graphplan.compare.comparing import Tensors
from graphplan.errors import GraphPlanError, OptionError, SkipReason
from graphplan.plan.plan import Plan
from graphplan.program.program import Program
from graphplan.report.figures import Figures, describe_program
from graphplan.report.rendering import Reports
from graphplan.report.stats import Stats
from graphplan.specs.options import takes
from graphplan.step.call_lock import CallLock
from graphplan.step.capture_sizes import ShapeStats
from graphplan.step.gate import Gate
from graphplan.step.options import Options, StepOptions
from graphplan.step.padded_batches import PaddedBatches
from graphplan.step.peers import Peers
from graphplan.step.runner import Backends
from graphplan.step.state_machine import StateMachine

_KEY = "_graphed_methods"


class GraphedStep(CallLock, Reports):
    """A step that replays itself. Made by :func:`graph_step`.

    In a class it is a method: each instance has a step, and programs, of its own. Steps with the same ``backends``
    share memory. ``peers`` are the other ranks: all ranks capture, or none. A ``gate`` that knows the eager time
    decides whether replays pay off. Without one, a step that ``is_alone`` times its first calls if its options require
    that, and compiles its modules. Otherwise, the caller does both.

    Examples:
        >>> import torch
        >>> from graphplan import graph_step
        >>> step = graph_step(lambda x: x * 2)
        >>> for _ in range(10):
        ...     y = step(torch.ones(3))
        >>> print(step.report().splitlines()[0])
        graphplan: 1 plan; 5 of 10 steps replayed; ...

    Attributes:
        machine: the state machine that runs the calls, with its parts.
        shapes: counts of shapes, capture sizes and elements, for ``shapes="bucket"``.

    Raises:
        OptionError: if ``fn`` cannot be called, or if a call does not run its body (a coroutine, a generator).
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        owners: Mapping[str, Any] | Sequence[Any] | None,
        options: Options,
        backends: Backends | None = None,
        peers: Peers | None = None,
        *,
        gate: Gate | None = None,
        is_alone: bool = True,
    ) -> None:
        super().__init__()
        if not callable(fn):
            raise OptionError(f"the step is a {type(fn).__name__}; expected a function or another callable")
        check_form(fn)
        self._fn, self._owners, self._options = fn, owners, options
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self.machine = StateMachine(
            fn, owners, options, backends, peers, gate=gate, is_alone=is_alone, serve=self._call
        )
        self.shapes = ShapeStats()
        self._padded = PaddedBatches(self.machine, self.shapes) if options.shapes == "bucket" else None
        self._serve = self.machine.serve if self._padded is None else self._padded.serve

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step: eagerly, traced, captured or replayed. The results are the same in each case.

        Raises:
            ClosedError: after :meth:`close`.
            BusyError: during another call, in another thread or around this one.
            RefusalError: if the step cannot be replayed correctly (see ``on_failure``); the call is undone.
            PaddingError: if padding changes the state or the results (``shapes="bucket"``); the call is undone.
        """
        handler = self.machine.timing.handler
        return self._call(args, kwargs) if handler is None else handler(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._take_turn()
        try:
            return self._serve(args, kwargs)
        except Exception as error:
            refusal = self.machine.refusal_of(error)
            if refusal is not None:
                return self.machine.recover(refusal, args, kwargs)
            if isinstance(error, GraphPlanError):
                raise error.briefly()  # noqa: B904
            raise
        finally:
            self._end_turn()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the graphed method of one instance, or, under ``@classmethod``, of one class."""
        if instance is None or not isinstance(self._fn, FunctionType):
            return self
        made = Methods.of(instance, self._name).made
        if self not in made:
            made[self] = self._bound_to(instance)
        return made[self]

    def _bound_to(self, instance: Any) -> GraphedStep:
        method = MethodType(self._fn, instance)
        return type(self)(method, owners_of(method, self._owners), self._options)

    def invalidate(self, why: str) -> None:
        """Drop every program; the next calls trace and capture again. ``why`` appears in the report.

        Raises:
            BusyError: during a call.
        """
        with self._alone():
            self.stats.note(f"invalidated: {why}", "guards")
            self.machine.forget()

    def close(self) -> None:
        """Drop every program and restore the optimizers' flags. The step cannot be called again.

        Raises:
            BusyError: during a call.
        """
        with self._alone():
            self.machine.close()

    @property
    def is_down(self) -> bool:
        """Whether the step has stood down: calls run the step's function alone."""
        return self.down_because is not None

    @property
    def down_because(self) -> tuple[SkipReason, str] | None:
        """The reason and its text if the step has stood down; else None."""
        return self.machine.timing.down_because

    @property
    def plan(self) -> Plan | None:
        """The latest plan; None before the first one."""
        return self.machine.runner.plan

    @property
    def stats(self) -> Stats:
        """The statistics of the calls so far."""
        return self.machine.timing.take_counts()

    @property
    def programs(self) -> list[Program]:
        """Every program that is ready."""
        return self.machine.programs.all()

    @override
    def text(self) -> str:
        return self._figures().text()

    @override
    def data(self) -> dict[str, Any]:
        data = self._figures(programs=list(map(describe_program, self.programs))).data()
        return data if self._padded is None else {**data, "shapes": self.shapes.data()}

    def _figures(self, programs: Sequence[Any] = ()) -> Figures:
        notes = [*self.facts, *self.machine.compiled.notes]
        if Tensors is None:
            notes.append(f"guards: {native.state()}")
        return Figures(self.stats, notes, programs=programs)

    @property
    def facts(self) -> list[str]:
        """The facts in the report: the changes that made optimizers capturable, and the counts of padding."""
        padded = [] if self._padded is None else [f"{self.shapes} ({self._padded.padding.ladders})"]
        return [*(f"prepared: {change}" for change in self.machine.managed.changes), *padded]


@takes(StepOptions)
def graph_step(fn: Callable[..., Any], options: StepOptions) -> GraphedStep:  # noqa: D417
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
        (3, 1, 1, 5)

    Args:
        fn: the step: forward, backward, optimizer, or a part of these. It takes pytrees of tensors and literals, of any
            shape and dtype.

    Returns:
        A callable with ``plan``, ``stats``, ``report()``, ``invalidate(why)`` and ``close()``. It returns detached
        copies of the step's tensors, so a replayed loss has no ``grad_fn``.

    Raises:
        OptionError: if an option has an invalid value or type.
        PolicyError: if a mode, role or policy does not exist.
        BackendError: if a backend does not exist.
        OwnersError: if ``owners`` is neither a mapping nor a sequence.
    """
    return GraphedStep(fn, options.owners, Options(**options.shared()))


class Methods:
    """The graphed methods of one instance or class, by the class attribute. A copy of the instance has none."""

    def __init__(self, instance: int = 0) -> None:
        self._instance = instance
        self.made: dict[Any, Any] = {}

    @classmethod
    def of(cls, instance: Any, name: str) -> Methods:
        """The methods of ``instance``. Raises OptionError if it has no ``__dict__`` to keep the one called ``name``."""
        try:
            inner = vars(instance)
        except TypeError:
            raise OptionError(
                f"{name} is graphed on a {type(instance).__name__}, which has no __dict__ to keep its programs in; "
                f"expected one: add '__dict__' to its __slots__, or graph the bound method: graphed(thing.{name})"
            ) from None
        if _KEY not in inner or inner[_KEY]._instance != id(instance):
            if isinstance(instance, type):
                # A class's `__dict__` is read-only. A subclass that inherits the method has an attribute of its own.
                type.__setattr__(instance, _KEY, cls(id(instance)))
            else:
                # A shallow copy shares the items of the original's `__dict__`, so replace the original's methods.
                inner[_KEY] = cls(id(instance))
        return inner[_KEY]

    def __reduce__(self) -> tuple[Any, ...]:
        return Methods, ()


def owners_of(fn: Callable[..., Any], owners: Mapping[str, Any] | Sequence[Any] | None) -> Any:
    """The ``owners``, and in addition the module that is called, or the object whose method is called."""
    own: Any = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if own is None or inspect.ismodule(own) or isinstance(own, type):
        return owners
    name = "model" if isinstance(fn, nn.Module) else "self"
    if owners is None:
        return {name: own}
    if isinstance(owners, Mapping):
        return owners if any(owner is own for owner in owners.values()) else {name: own, **owners}
    return owners if any(owner is own for owner in owners) else [own, *owners]


def check_form(fn: Callable[..., Any]) -> None:
    """Raise OptionError for a function whose call does not run its body, such as a coroutine function."""
    while isinstance(fn, partial):
        fn = fn.func
    # Calling an object runs a method of its class.
    call = fn.forward if isinstance(fn, nn.Module) else type(fn).__call__ if callable(fn) else None
    asks = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(ask(each) for ask in asks for each in (fn, call)):
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        raise OptionError(
            f"{name} is a coroutine or generator function (async def, yield): a call computes nothing yet, and its "
            "result can run only once, so there is nothing to replay. Expected a function that computes and returns: "
            "graph the function that does the computation, and await or yield around its calls"
        )
