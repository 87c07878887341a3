"""The public verbs: one function graphed, or several in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from graphplan.errors import OptionError
from graphplan.inference.graphed import Graphed
from graphplan.inference.graphed_options import ServeOptions
from graphplan.inference.pieces.models import SplitModel
from graphplan.inference.pieces.scopes import Segment
from graphplan.inference.pieces.segments import Segments
from graphplan.inference.shared_pool import Pool
from graphplan.specs.roles import Role
from graphplan.step.buckets import Buckets
from graphplan.step.dimensions import Dims
from graphplan.step.padding import PadValue


def graphed(
    fn: Callable[..., Any] | None = None,
    *,
    enable_if: Callable[[], bool] | None = None,
    shapes: str = "exact",
    outputs: str = "clone",
    buckets: Buckets | None = None,
    pad: PadValue | Mapping[str, PadValue] = 0,
    mask: str | None = None,
    dynamic: Mapping[str, Dims] | None = None,
    owners: Mapping[str, Any] | Sequence[Any] | None = None,
    static_roles: Iterable[Role | str] = ("input", "param"),
    copy_roles: Iterable[Role | str] = ("input",),
    backend: str = "auto",
    device: str | torch.device | None = None,
    capture_after: int = 1,
    max_graphs: int = 64,
    memory_budget: int | None = None,
    on_failure: str = "raise",
    verify: str | int | None = "geometric",
    min_speedup: float | None = None,
    allow: Sequence[str] = (),
    watch: Sequence[str] = (),
    compile: bool | Mapping[str, Any] = False,
    pool: Pool | None = None,
) -> Any:
    """Have calls of a function, method or module replayed.

    A call is eager while gradients are wanted: use ``torch.no_grad()`` or ``torch.inference_mode()``, which are part of
    a program's key, as are training flags and everything else that a graphed step looks at.

    Examples:
        >>> import torch
        >>> from graphplan import graphed
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> fast = graphed(model)
        >>> with torch.inference_mode():
        ...     for _ in range(6):
        ...         y = fast(torch.randn(8, 4))
        >>> fast.stats.eager, fast.stats.traced, fast.stats.captured, fast.stats.replayed
        (1, 2, 1, 2)
        >>> @graphed(shapes="bucket", buckets=[1, 2, 4, 8])
        ... def classify(x):
        ...     return model(x).softmax(-1)
        >>> with torch.inference_mode():
        ...     classify(torch.randn(5, 4)).shape
        torch.Size([5, 2])

    Args:
        fn: what to call. Without it, the arguments are those of a decorator.
        enable_if: asked before each call; if it says no, the call is eager.
        shapes: ``"exact"`` (a program for each shape), ``"eager"`` (the first shape has one, others are eager) or
            ``"bucket"`` (inputs are padded to a capture size, results cut).
        outputs: ``"clone"``, or ``"static"``: results are the program's own memory, and raise when they are used
            after its next replay. Fed to another graphed function they are not copied, if it was captured on them.
        buckets: capture sizes of dimension 0, in elements, or by dimension; see :func:`graphplan.buckets.fit`.
        pad: what padding holds, a number or ``function(tensor, shape)``; or those by argument.
        mask: the argument that gets a boolean tensor which is true for what is not padding.
        dynamic: dimensions that may vary, by argument; by default all but the last of an n-d tensor, all of a 1-d one.
            Only those are padded, and only they may differ from the first shape's.
        owners: objects whose tensors the function uses, by name or as a sequence. The module or ``self`` is one, and
            modules that run are found.
        static_roles: roles that keep fixed addresses; with ``"state"`` the function may change what it owns.
        copy_roles: roles that are copied in; with ``"param"``, :meth:`Graphed.replay` takes other weights.
        backend: ``"auto"``, ``"cudagraph"``, ``"tape"`` or ``"eager"``.
        device: where to move fed tensors; without it they must be where the function computes.
        capture_after: number of calls of a shape before it is traced, which takes two calls more, and captured.
        max_graphs: number of programs that are kept. One that is no longer in use makes room for another; while all
            are used, calls without a program are eager.
        memory_budget: bytes that all programs together may compute in; those used least recently go first.
        on_failure: ``"raise"`` (refusals before the first good replay raise) or ``"eager"``.
        verify: which replays, and which padded calls, are compared with eager ones.
        min_speedup: how many times as fast as an eager call a replay has to be; see :func:`graphplan.graph_step`.
        allow: paths of Python effects that replays may leave out.
        watch: installed packages (top-level names) whose globals, classes and closures are guarded as the user's own
            are, in the whole process.
        compile: whether the modules among the owners are compiled by ``torch.compile``, or its arguments; the captured
            kernels are compiled ones then.
        pool: what shares stream and memory with others; by default each use of ``graphed`` has its own.

    Returns:
        A callable with ``stats``, ``shapes``, ``memory``, ``report()``, ``prewarm(sizes)``, ``replay(args, params=)``,
        ``invalidate(why)`` and ``close()``; on a class, a method that has them for each instance.

    Raises:
        OptionError: if an option has a value or a type that makes no sense.
        PolicyError: if a role does not exist, or is copied and not static.
        BackendError: if a backend does not exist.
        OwnersError: if ``owners`` is neither a mapping nor a sequence.
    """
    options = ServeOptions(
        enable_if=enable_if,
        shapes=shapes,
        outputs=outputs,
        buckets=buckets,
        pad=pad,
        mask=mask,
        dynamic=dynamic,
        owners=owners,
        static_roles=static_roles,
        copy_roles=copy_roles,
        backend=backend,
        device=device,
        capture_after=capture_after,
        max_graphs=max_graphs,
        memory_budget=memory_budget,
        on_failure=on_failure,
        verify=verify,
        min_speedup=min_speedup,
        allow=allow,
        watch=watch,
        compile=compile,
        pool=pool,
    )
    return partial(Graphed, options=options) if fn is None else Graphed(fn, options)


def piecewise(
    segments: nn.Module | Sequence[Segment],
    is_capturable: Callable[[Segment], bool] | Sequence[bool] | None = None,
    *,
    at: Sequence[str] | None = None,
    scope: str = "auto",
    **options: Any,
) -> Segments | SplitModel:
    """Capture what can be captured of a chain of functions, or of a model, and run the rest eagerly in between.

    Examples:
        >>> import torch
        >>> from graphplan import piecewise
        >>> run = piecewise([torch.nn.Linear(4, 8), torch.relu, torch.nn.Linear(8, 2)])
        >>> with torch.no_grad():
        ...     for _ in range(6):
        ...         y = run(torch.randn(3, 4))
        >>> run.scope, run.num_graphs
        ('full', 1)

    Args:
        segments: functions or modules, each called with the results of the one before; or one model, with ``at``.
        is_capturable: tells of each segment whether it can be captured. By default that is found out: each is traced
            and captured alone in the first calls. Consecutive ones then become one program.
        at: names, or patterns of names (``"blocks.*.attention"``), of modules of the model that run eagerly.
        scope: ``"full"`` (one program), ``"piecewise"``, ``"none"`` (eager), or ``"auto"``: one program if that can be,
            else pieces, else eager, with the reasons.
        **options: as for :func:`graphplan.graphed`, but for buckets.

    Returns:
        A callable with ``scope``, ``reasons``, ``num_graphs``, ``report()`` and ``close()``. Of functions, an index
        gives one alone: call them as your own code decides, they share memory all the same.

    Raises:
        OptionError: if an argument has a value or a type that makes no sense.
    """
    serve = ServeOptions(**options)
    if isinstance(segments, nn.Module):
        if at is None:
            raise OptionError(
                "piecewise was given a module without at=; expected names of modules to cut at, or a list"
            )
        if is_capturable is not None:
            raise OptionError("is_capturable is given with at=, which says what runs eagerly; expected one of the two")
        return SplitModel(segments, at, scope, serve)
    if at is not None:
        raise OptionError("at is given with a list of segments, which are cut already; expected a module with it")
    return Segments(segments, is_capturable, scope, serve)
