"""What runs as one program, in pieces, or eagerly: what both forms of :func:`graphplan.piecewise` have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any

from graphplan.errors import OptionError, RefusalError
from graphplan.inference.graphed import Graphed
from graphplan.inference.graphed_options import ServeOptions
from graphplan.inference.shared_pool import Pool
from graphplan.program.leases import StaticOutput
from graphplan.program.program import Program
from graphplan.report.rendering import Reports
from graphplan.step.call_lock import runs_within_step
from graphplan.tensors.trees import map_result

SCOPES = ("full", "piecewise", "auto", "none")
Segment = Callable[..., Any]


class Chain:
    """Segments called one after the other, each with the results of the one before."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.__name__ = self.__qualname__ = " + ".join(name_of(segment) for segment in segments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call them. A tuple is handed on as arguments, anything else as one argument."""
        result = self.segments[0](*args, **kwargs)
        for segment in self.segments[1:]:
            result = segment(*result) if type(result) is tuple else segment(result)
        return result


def name_of(segment: Segment) -> str:
    """What a segment is called."""
    return getattr(segment, "__name__", type(segment).__name__)


class Pieces(Reports):
    """Common to both forms of :func:`graphplan.piecewise`: the whole in one program, in pieces, or eager.

    Attributes:
        scope: what is done now: ``"full"``, ``"piecewise"`` or ``"none"``.
        reasons: why segments, or the whole, are not captured, by name.
    """

    def __init__(self, whole: Segment, scope: str, options: ServeOptions) -> None:
        if scope not in SCOPES:
            raise OptionError(f"scope is {scope!r}; expected one of: {', '.join(SCOPES)}")
        if options.shapes == "bucket":
            raise OptionError("shapes is 'bucket', and pieces hand results on as they are; expected 'exact' or 'eager'")
        self.pool = options.pool or Pool()
        self.reasons: dict[str, str] = {}
        self.scope = "full" if scope == "auto" else scope
        # From the first piece to the last: a second thread would overwrite what is handed on.
        self._lock = RLock()
        self._downgrades = scope == "auto"
        self._whole = whole
        self._options = options
        inner = replace(options, on_failure="raise") if self._downgrades else options
        self._full = Graphed(whole, inner, self.pool) if self.scope == "full" else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call all of it. What is handed from piece to piece is not copied where both are programs."""
        if self.scope == "none" or runs_within_step():
            return self._whole(*args, **kwargs)
        with self._lock:
            if self._full is not None:
                try:
                    return self._full(*args, **kwargs)
                except RefusalError as error:
                    if not self._downgrades:
                        raise
                    self._downgrade(error)
            return _detached(self._call_pieces(args, kwargs), self._options.outputs)

    def _downgrade(self, error: RefusalError) -> None:
        """Go on in pieces; the call that was refused has not happened."""
        assert self._full is not None
        self.reasons[name_of(self._whole)] = str(error)
        self._full.close()
        self._full = None
        self.scope = "piecewise"

    @abstractmethod
    def _call_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the segments one after another."""

    @abstractmethod
    def _graphed(self) -> Iterator[Graphed]:
        """Those that are graphed."""

    @property
    def programs(self) -> list[Graphed]:
        """What is captured: one for each run of consecutive segments."""
        return [graphed for graphed in self._all() if graphed.num_graphs]

    def _all(self) -> list[Graphed]:
        return [self._full] if self._full is not None else list(self._graphed())

    @property
    def num_graphs(self) -> int:
        """How many recordings there are."""
        return sum(graphed.num_graphs for graphed in self.programs)

    def text(self) -> str:
        """The report as text."""
        lines = [f"graphplan: scope {self.scope}, {self.num_graphs} graphs"]
        lines += [f"  eager: {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join([*lines, *(graphed.text() for graphed in self.programs)])

    def data(self) -> dict[str, Any]:
        """The report as data."""
        pieces = [graphed.data() for graphed in self.programs]
        return {"scope": self.scope, "graphs": self.num_graphs, "reasons": dict(self.reasons), "pieces": pieces}

    def drawn(self) -> list[Program]:
        """The programs of all pieces."""
        return [program for graphed in self.programs for program in graphed.programs]

    def close(self) -> None:
        """Drop every program."""
        for graphed in self._all():
            graphed.close()


def _detached(result: Any, outputs: str) -> Any:
    """The results as the caller gets them: the programs' own memory only where that was asked for."""
    if outputs == "static":
        return result
    return map_result(lambda leaf: leaf.plain().clone() if isinstance(leaf, StaticOutput) else leaf, result)
