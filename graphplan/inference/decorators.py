"""The public verbs: one function graphed, or several in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from graphplan.errors import OptionError
from graphplan.inference.graphed import Graphed, ServeOptions
from graphplan.inference.segments import Segment, Segments
from graphplan.inference.split_models import SplitModel
from graphplan.specs.options import takes_optionally


@takes_optionally(ServeOptions)
def graphed(fn: Callable[..., Any] | None, options: ServeOptions) -> Any:  # noqa: D417
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

    Returns:
        A callable with ``stats``, ``shapes``, ``memory``, ``report()``, ``prewarm(example=)``,
        ``replay(args, params=)``, ``invalidate(why)`` and ``close()``; on a class, a method that has them for each
        instance.

    Raises:
        OptionError: if an option has a value or a type that makes no sense.
        PolicyError: if a role does not exist, or is copied and not static.
        BackendError: if a backend does not exist.
        OwnersError: if ``owners`` is neither a mapping nor a sequence.
    """
    return partial(Graphed, options=options) if fn is None else Graphed(fn, options)


def piecewise(
    segments: nn.Module | Sequence[Segment], *, at: Sequence[str] | None = None, scope: str = "auto", **options: Any
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
        segments: functions or modules, each called with the results of the one before; or one model, with ``at``. Which
            can be captured is found out: each is traced and captured alone in the first calls. Consecutive ones then
            become one program.
        at: names, or patterns of names (``"blocks.*.attention"``), of modules of the model that run eagerly.
        scope: ``"full"`` (one program), ``"piecewise"``, ``"none"`` (eager), or ``"auto"``: one program if that can be,
            else pieces, else eager, with the reasons.
        **options: as for :func:`graphplan.graphed`, but for buckets.

    Returns:
        A callable with ``scope``, ``reasons``, ``num_graphs``, ``report()`` and ``close()``.

    Raises:
        OptionError: if an argument has a value or a type that makes no sense.
    """
    serve = ServeOptions(**options)
    if isinstance(segments, nn.Module):
        if at is None:
            raise OptionError(
                "piecewise was given a module without at=; expected names of modules to cut at, or a list"
            )
        return SplitModel(segments, at, scope, serve)
    if at is not None:
        raise OptionError("at is given with a list of segments, which are cut already; expected a module with it")
    return Segments(segments, scope, serve)
