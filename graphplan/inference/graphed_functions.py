"""Functions, methods and modules whose calls are replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial, update_wrapper
from itertools import product
from math import prod
from threading import Lock, get_ident
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from graphplan.environment.devices import current_stream, is_accelerator
from graphplan.errors import BusyError, NotCapturedError, OptionError, SkipReason
from graphplan.feed.signature import Feed, flatten
from graphplan.program.shared_buffers import plain
from graphplan.specs.options import Checks, check_values, is_count, takes_optionally
from graphplan.specs.policy import Policy
from graphplan.specs.roles import Role
from graphplan.step.buckets import Ladders
from graphplan.step.call_lock import runs_within_step
from graphplan.step.graphed_step import GraphedStep, owners_of
from graphplan.step.options import Options, PlainOptions
from graphplan.step.padding import Dynamic, outer_first
from graphplan.step.runner import Backends
from graphplan.tensors.trees import map_result

_MIB = 2**20
_CALLS = 64  # Maximum number of calls of one size. If no capture has come by then, none will come.
_LOOKS = 4  # Maximum lookups of a program: it is captured, checked, captured again if the check fails, and replayed.


class Pool:
    """A memory pool for the programs of several graphed functions.

    Programs of one pool use the same memory for their intermediates, so they take turns. Calls from several threads
    wait for each other, and a stream waits for the earlier work of another stream.

    Examples:
        >>> import torch
        >>> from graphplan import Pool, graphed
        >>> pool = Pool()
        >>> first = graphed(torch.nn.Linear(4, 2), pool=pool)
        >>> second = graphed(torch.nn.Linear(2, 1), pool=pool)
        >>> with torch.inference_mode():
        ...     second(first(torch.randn(8, 4))).shape
        torch.Size([8, 1])
    """

    def __init__(self) -> None:
        self.backends = Backends()
        self._lock = Lock()
        self._thread: int | None = None
        self._last: torch.Stream | None = None

    def take(self, device: torch.device | None) -> None:
        """Hold the pool until :meth:`give_back`, to compute on ``device``. Raises BusyError if this thread holds it."""
        if self._thread == get_ident():
            raise BusyError(
                "a graphed function was called, closed or invalidated from within a call of the same pool; expected "
                "one call at a time, because all calls of a pool use the same memory. In the function, call the "
                "original functions instead of the graphed ones"
            )
        self._lock.acquire()
        self._thread = get_ident()
        try:
            # This thread's stream waits for the work of the last call, if it was on another stream.
            if device is not None and is_accelerator(device):
                current = current_stream(device)
                if self._last is not None and self._last != current:
                    current.wait_stream(self._last)
                self._last = current
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Release the pool to other threads."""
        self._thread = None
        self._lock.release()


_CHECKS: Checks = (
    ("pool", lambda value: value is None or isinstance(value, Pool), "a Pool, or None for one of the function's own"),
    ("capture_after", is_count, "an int >= 1"),
)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(PlainOptions):
    """Options of :func:`graphplan.graphed`.

    Args:
        static_roles: roles with fixed addresses. With ``"state"``, the function may change state that it owns.
        copy_roles: roles that are copied in. With ``"param"``, :meth:`Graphed.replay` takes other weights.
        outputs: ``"clone"``, or ``"static"``: results are the program's own memory, and raise when they are used
            after its next replay. Another graphed function does not copy them, if it was captured on them.
        capture_after: number of calls of a shape before it is traced and captured. Traces take one or two more calls.
        pool: the pool that shares a stream and memory with others; by default each use of ``graphed`` has its own.

    Raises:
        OptionError, PolicyError, BackendError: for invalid values.
    """

    static_roles: Iterable[Role | str] = ("input", "param")
    copy_roles: Iterable[Role | str] = ("input",)
    outputs: str = "clone"
    capture_after: int = 1
    max_graphs: int = 64
    pool: Pool | None = None
    step: Options = field(init=False)
    """The options of the underlying graphed step."""

    def __post_init__(self) -> None:
        check_values(self, _CHECKS)
        policy = Policy("inference", static_roles=self.static_roles, copy_roles=self.copy_roles)
        own = {"mode": "inference", "policy": policy, "warmup_steps": self.capture_after, "autograd": True}
        object.__setattr__(self, "step", Options(**{**self.shared(), **own}))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of ``input`` buffers, parameters used or copied, ``state``, lent ``output``, and the programs' ``pool``."""

    input: int
    param: int
    state: int
    output: int
    pool: int


class Graphed(GraphedStep):
    """A :class:`graphplan.GraphedStep` that replays the calls of a function. Made by :func:`graphplan.graphed`.

    On a class, it is a method. Each instance, or each class under ``@classmethod``, gets its own buffers and programs
    over one pool.

    Examples:
        >>> import torch
        >>> from graphplan import graphed
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> predict = graphed(model)
        >>> with torch.no_grad():
        ...     for _ in range(8):
        ...         y = predict(torch.ones(3, 4))
        >>> predict.num_graphs
        1

    Raises:
        OptionError: if ``fn`` is not callable, or is a coroutine or generator function.
    """

    def __init__(self, fn: Callable[..., Any], options: ServeOptions, pool: Pool | None = None) -> None:
        if not callable(fn):
            raise OptionError(f"graphed was given a {type(fn).__name__}; expected a function, a method or a module")
        self.pool = pool or options.pool or Pool()
        super().__init__(fn, owners_of(fn, options.owners), options.step, self.pool.backends)
        self._end_turn = self.pool.give_back
        self._serving = options
        serve = self._serve
        self._serve = lambda args, kwargs: serve(
            tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}
        )
        self._dynamic = Dynamic(fn, options.dynamic)
        if isinstance(fn, nn.Module):
            self.__wrapped__ = fn
        else:
            update_wrapper(self, fn)

    @override
    def _bound_to(self, instance: Any) -> Graphed:
        return Graphed(MethodType(self._fn, instance), self._serving, self.pool)

    @override
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call. Raises StaleError if a later replay has overwritten an argument (``outputs="static"``)."""
        # Within another step, run the function: it becomes part of that step's recording.
        return self._fn(*args, **kwargs) if runs_within_step() else super()._call(args, kwargs)

    @override
    def _take_turn(self) -> None:
        """Wait for the pool. Raises BusyError within a call of the same pool."""
        self.pool.take(self.machine.runner.device)

    def replay(self, args: tuple[Any, ...], *, params: Mapping[str, Tensor] | None = None) -> Any:
        """Call with other weights, under ``copy_roles=("input", "param")``. One program serves any number of sets.

        If there is no program for such arguments, first call the function with copies of them until there is one.

        Args:
            args: positional arguments.
            params: values for all parameters by name, such as a module's ``state_dict``; by default the owners' own.

        Raises:
            OptionError: with ``shapes="bucket"``, which pads the arguments.
            NotCapturedError: if the call was not captured, with the reason.
            FeedError: if a value is missing, unknown, or of another shape, dtype or device.
            OutcomeError: if the function branches on a value that differs from the one in the program.
        """
        if self._padded is not None:
            raise OptionError(
                "replay() needs shapes='exact'; with shapes='bucket', call the function itself, which pads its "
                "arguments first"
            )
        for _ in range(_LOOKS):
            with self._alone():
                found = self.machine.find_program(tuple(map(plain, args)))
                # A program made of one trace has to be checked by a call first.
                if found is not None and not found[0].needs_first_check:
                    program, feed = found
                    result = program.run(feed.leaves, {Role.PARAM: params or {}})
                    program.replays += 1
                    self.stats.replayed += 1
                    return result
            if _capture(self, map_result(lambda tensor: tensor.clone(), args), {}) is not None and found is None:
                break
        why = ", ".join(self.stats.reasons) or "nothing was refused"
        raise NotCapturedError(f"{self._name} has no program for these arguments: {why}; expected one to replay")

    def prewarm(
        self,
        sizes: Sequence[int | Mapping[int, int]] | None = None,
        *,
        example: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Capture before the first request, the largest size first, so that smaller ones fit into its memory.

        Args:
            sizes: sizes of dimension 0, or sizes by dimension; by default all sizes of ``buckets``.
            example: positional arguments of one call, of any size.
            kwargs: keyword arguments of that call.

        Returns:
            The number of captured programs.

        Raises:
            OptionError: for invalid sizes, or if a size is not captured, such as when gradients are wanted.
        """
        given, before = flatten(tuple(example), kwargs or {}), self.stats.captured
        for dims in _parse_sizes(sizes, None if self._padded is None else self._padded.padding.ladders):
            why = _capture(self, *_zeros(given, self._dynamic, dims))
            if why is not None:
                expected = "expected calls that can be replayed"
                raise OptionError(f"nothing is captured for the size {dims}: {why}; {expected}")
        return self.stats.captured - before

    @property
    def num_graphs(self) -> int:
        """The number of programs that are ready."""
        return len(self.programs)

    @property
    def memory(self) -> Memory:
        """Bytes by purpose."""
        programs = self.programs

        def bytes_of(role: Role) -> int:
            return sum({e.name: e.spec.nbytes for each in programs for e in each.plan.by_role(role)}.values())

        return Memory(
            input=self.machine.buffers.nbytes,
            param=bytes_of(Role.PARAM),
            state=bytes_of(Role.STATE),
            output=sum(program.outputs.shared_bytes for program in programs),
            pool=sum(program.nbytes for program in programs),
        )

    @override
    def text(self) -> str:
        lines = [super().text()]
        roles = asdict(self.memory)
        pool = f"the pool of {self.num_graphs} programs {roles.pop('pool') / _MIB:.1f} MiB"
        sizes = ", ".join(f"{name} {size / _MIB:.1f} MiB" for name, size in roles.items() if size)
        lines.append(f"  memory: {sizes or 'nothing'}; {pool}")
        for program in sorted(self.programs, key=lambda program: -program.nbytes):
            inputs = ", ".join(f"{external.name} {external.spec}" for external in program.plan.inputs)
            lines.append(
                f"  program: {inputs or 'no inputs'}: {program.replays} replays, {program.plan.launches} operators, "
                f"{program.nbytes / _MIB:.1f} MiB"
            )
        return "\n".join(lines)

    @override
    def data(self) -> dict[str, Any]:
        return {**super().data(), "shapes": self.shapes.data(), "memory": asdict(self.memory)}


@takes_optionally(ServeOptions)
def graphed(fn: Callable[..., Any] | None, options: ServeOptions) -> Any:  # noqa: D417
    """Replay the calls of a function, method or module.

    A call is eager while gradients are wanted: use ``torch.no_grad()`` or ``torch.inference_mode()``. These are part of
    a program's key, as are training flags and everything else that a graphed step reads.

    Examples:
        >>> import torch
        >>> from graphplan import graphed
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> fast = graphed(model)
        >>> with torch.inference_mode():
        ...     for _ in range(6):
        ...         y = fast(torch.randn(8, 4))
        >>> fast.stats.eager, fast.stats.traced, fast.stats.captured, fast.stats.replayed
        (1, 1, 1, 3)
        >>> @graphed(shapes="bucket", buckets=[1, 2, 4, 8])
        ... def classify(x):
        ...     return model(x).softmax(-1)
        >>> with torch.inference_mode():
        ...     classify(torch.randn(5, 4)).shape
        torch.Size([5, 2])

    Args:
        fn: the function, method or module. Without it, ``graphed`` returns a decorator.

    Returns:
        A callable with ``stats``, ``shapes``, ``memory``, ``report()``, ``prewarm(example=)``,
        ``replay(args, params=)``, ``invalidate(why)`` and ``close()``; on a class, a method that has them for each
        instance.

    Raises:
        OptionError: if an option has an invalid value or type.
        PolicyError: if a role does not exist, or is copied and not static.
        BackendError: if a backend does not exist.
        OwnersError: if ``owners`` is neither a mapping nor a sequence.
    """
    return partial(Graphed, options=options) if fn is None else Graphed(fn, options)


def _zeros(example: Feed, dynamic: Dynamic, dims: Mapping[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with zeros for tensors, with the sizes ``dims`` in the dynamic dimensions."""
    places = dynamic.of(example)
    leaves = list(example.leaves)
    for index, leaf in example.tensors():
        own = {dim: dims[dim] for position, dim in places if position == index and dim in dims}
        shape = [own.get(dim, size) for dim, size in enumerate(leaf.shape)]
        leaves[index] = torch.empty_permuted(shape, outer_first(leaf), dtype=leaf.dtype, device=leaf.device).zero_()
    return example.rebuild(leaves)


def _parse_sizes(sizes: Sequence[int | Mapping[int, int]] | None, ladders: Ladders | None) -> list[dict[int, int]]:
    """Return sizes by dimension, the largest first; by default all sizes of the ladders. Raises OptionError."""
    if sizes is None and ladders is not None:
        choices = product(*(ladders.sizes(dim) for dim in ladders.dims))
        parsed = [dict(zip(ladders.dims, choice, strict=True)) for choice in choices]
    else:
        parsed = [dict(size) if isinstance(size, Mapping) else {0: size} for size in sizes or ()]
    for dims in parsed:
        for dim, size in dims.items():
            if not (is_count(size) and is_count(dim, 0)):
                raise OptionError(f"prewarm has the size {size!r} in dimension {dim!r}; expected integers from 1 on")
    if not parsed:
        raise OptionError("prewarm has no sizes; expected some, such as [1, 2, 4, 8], or shapes='bucket'")
    return sorted(parsed, key=lambda dims: prod(dims.values()), reverse=True)


def _capture(step: GraphedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Repeat a call until it is captured or replayed. Return None, or the reason if it is not."""
    done = step.stats.captured + step.stats.replayed
    before, timing = step.stats.skipped.copy(), step.machine.timing
    opens, timing.opens = timing.opens, False
    try:
        for _ in range(_CALLS):
            step(*args, **kwargs)
            if step.stats.captured + step.stats.replayed > done:
                return None
            why = next((reason for reason in step.stats.skipped - before if reason is not SkipReason.SHAPE), None)
            if why is not None:
                return why.value
        return "no capture came"
    finally:
        timing.opens = opens
