"""A model cut at some of its modules. These run eagerly, and the computation between them is captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from graphplan.compare.comparing import Checks, rows_of
from graphplan.errors import OptionError, RefusalError, SplitError, VerifyError
from graphplan.feed.signature import asks_for_gradients, flatten, no_keys
from graphplan.inference.graphed_functions import ServeOptions
from graphplan.inference.segments import Pieces, Segment, Segments, name_of
from graphplan.owners.walk import walk_owners
from graphplan.program.guards import holds
from graphplan.program.shared_buffers import plain
from graphplan.step.capture_sizes import tolerance
from graphplan.tensors.trees import flatten_result, named_leaves
from graphplan.trace.changes import same_value
from graphplan.verify.compare import Run, distances, fits
from graphplan.verify.schedule import next_check

_LITERALS = (bool, int, float, str, type(None))


def piecewise(
    segments: nn.Module | Sequence[Segment], *, at: Sequence[str] | None = None, scope: str = "auto", **options: Any
) -> Segments | SplitModel:
    """Capture the parts of a chain of functions, or of a model, that can be captured. Run the rest eagerly.

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
        segments: functions or modules, each called with the results of the one before; or one model, with ``at``. In
            the first calls each segment is traced and captured alone, to find out whether it can be captured.
            Consecutive segments that can be captured then become one program.
        at: names, or patterns of names (``"blocks.*.attention"``), of modules of the model that run eagerly.
        scope: ``"full"`` (one program), ``"piecewise"``, ``"none"`` (eager), or ``"auto"``: one program if possible,
            else pieces, else eager, with the reasons.
        **options: as for :func:`graphplan.graphed`, except buckets.

    Returns:
        A callable with ``scope``, ``reasons``, ``num_graphs``, ``report()`` and ``close()``.

    Raises:
        OptionError: if an argument has an invalid value or type.
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


class SplitModel(Pieces):
    """A model for :func:`graphplan.piecewise` whose modules named in ``at`` run eagerly."""

    def __init__(self, model: nn.Module, at: Sequence[str], scope: str, options: ServeOptions) -> None:
        self._names = _match_modules(model, at)
        super().__init__(model, scope, options, self._names)
        self._model = model
        self._facts: list[Any] = []
        self._values_hold: Callable[[], bool] = bool
        self._splits: dict[Hashable, fx.GraphModule] = {}
        self._calls = 0
        self._next_check = next_check(options.step.check_every, 0)

    def _call_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts = _facts_of(self._model)
        if facts != self._facts or not self._values_hold():
            # Modules, tensors, numbers or flags that the pieces were made from have changed.
            self.close()
            self._splits.clear()
            self._facts, self._values_hold = facts, _values_of(self._model)
        given = inspect.signature(self._model.forward).bind(*args, **kwargs)
        given.apply_defaults()
        bound = dict(given.arguments)
        try:
            pieces = self._split(bound)
        except RefusalError as error:
            self._downgrade(error, "none")
            return self._model(*args, **kwargs)
        self._calls += 1
        # torch.fx renames arguments with concrete values, but keeps their order.
        names = inspect.signature(pieces.forward).parameters
        result = pieces(**dict(zip(names, bound.values(), strict=True)))
        if self._calls == self._next_check and not any(map(asks_for_gradients, flatten_result(result)[0])):
            self._check(result, args, kwargs)
        return result

    def _split(self, bound: Mapping[str, Any]) -> fx.GraphModule:
        literals = {name: value for name, value in bound.items() if isinstance(value, _LITERALS)}
        key = (flatten((), bound, no_keys).structure, tuple(literals.items()))
        if key not in self._splits:
            pieces, between = _split(self._model, self._names, literals)
            options = replace(self._options, outputs="static", owners=None)
            for name, part in between.items():
                # A graphed piece is no module, and nn.Module does not let it replace one.
                delattr(pieces, name)
                setattr(pieces, name, self._graph(part, options))
            self._splits[key] = pieces
        return self._splits[key]

    def _check(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the result with the model's own: its code may do something that torch.fx does not see. After a
        difference, only the model itself is called.
        """
        self._next_check = next_check(self._options.step.check_every, self._calls)
        found = flatten_result(result)[0]
        for (name, wanted), leaf in zip(named_leaves(self._model(*args, **kwargs)), found, strict=True):
            if not _is_alike(wanted, plain(leaf)):
                error = VerifyError(
                    f"the pieces of {name_of(self._model)} do not give the result of the model itself: {name} "
                    "differs. The model's code does something that torch.fx does not trace. List the pieces yourself: "
                    "piecewise([…])",
                    result=wanted,
                )
                self._fall_back(error, "none")
                raise error


def _is_alike(wanted: Any, found: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return bool(wanted == found)
    if not fits(wanted, found):
        return False
    sides = {"": wanted}, {"": found}
    return Run.of(*sides).far.get("", float("inf")) <= tolerance(wanted.dtype) * distances([""], sides[0])[""]


def _match_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the modules that match the patterns. Raises OptionError if a pattern matches none."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"at is {patterns!r}; expected a list of names of modules, such as ['blocks.*.attention']")
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise OptionError(
                f"at names {pattern!r}, and the {type(model).__name__} has no such module; expected one of: "
                f"{', '.join(names[:12])}"
            )
    matched = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    # A matched module within another matched module is a part of that one.
    return [name for name in matched if not any(name.startswith(f"{other}.") for other in matched)]


class _Tracer(fx.Tracer):
    def __init__(self, leaves: Sequence[str]) -> None:
        super().__init__()
        self._leaves = set(leaves)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)


def _split(
    model: nn.Module, names: Sequence[str], literals: Mapping[str, Any]
) -> tuple[fx.GraphModule, dict[str, nn.Module]]:
    """Return the model as a module of pieces, and by name the pieces that run between the cuts. Raises SplitError."""
    tracer = _Tracer(names)
    try:
        graph = tracer.trace(model, concrete_args=dict(literals))
        whole = fx.GraphModule(tracer.root, graph)
    except Exception as error:
        raise SplitError(
            f"the {type(model).__name__} cannot be split: torch.fx could not follow its code ({error}). Expected code "
            "without branches on tensors' values or sizes; list the pieces yourself: piecewise([first, second, …])"
        ) from error
    number = 0
    parts: dict[fx.Node, int] = {}
    cuts: set[str] = set()
    for node in whole.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        is_cut = node.op == "call_module" and node.target in names
        number += is_cut
        parts[node] = number
        if is_cut:
            cuts.add(f"submod_{number}")
            number += 1
    pieces = split_module(whole, model, lambda node: parts.get(node, 0))
    children = pieces.named_children()
    return pieces, {name: part for name, part in children if name.startswith("submod_") and name not in cuts}


def _values_of(model: nn.Module) -> Callable[[], bool]:
    """Return a function that is True while the Python values in the model's objects and containers are unchanged."""
    scalars = walk_owners({"model": model}).scalars.values()
    rows = rows_of([row for scalar in scalars for row in scalar.rows(scalar.get())])
    return partial(holds, Checks([(*row, same_value) if row[0].startswith("equal") else row for row in rows]))


def _facts_of(model: nn.Module) -> list[Any]:
    """List the facts that the pieces depend on: modules, their tensors, attributes and hook counts."""
    facts: list[Any] = []
    for module in model.modules():
        facts.append(id(module))
        facts += map(id, module._parameters.values())
        facts += map(id, module._buffers.values())
        facts += [value if isinstance(value, _LITERALS) else id(value) for value in vars(module).values()]
        facts += map(len, (module._forward_hooks, module._forward_pre_hooks))
    return facts
