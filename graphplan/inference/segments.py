"""Chains of functions, of which some are captured and others run eagerly."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from threading import RLock
from typing import Any

from graphplan.errors import OptionError, RefusalError
from graphplan.inference.graphed_functions import Graphed, Pool, ServeOptions
from graphplan.program.shared_buffers import StaticOutput
from graphplan.report.rendering import Reports
from graphplan.step.call_lock import runs_within_step
from graphplan.tensors.trees import map_result

SCOPES = ("full", "piecewise", "auto", "none")
Segment = Callable[..., Any]


class Chain:
    """Segments called one after the other, each with the results of the one before."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.__name__ = self.__qualname__ = " + ".join(map(name_of, segments))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the segments. Pass a tuple on as the next arguments, and any other result as one argument."""
        first, *others = self.segments
        result = first(*args, **kwargs)
        for segment in others:
            result = segment(*result) if type(result) is tuple else segment(result)
        return result


def name_of(segment: Segment) -> str:
    """Return the name of a function, or of a module's class."""
    return getattr(segment, "__name__", type(segment).__name__)


class Pieces(Reports):
    """The base class of both forms of :func:`graphplan.piecewise`.

    ``scope`` is the current scope. ``reasons`` say, by name, why segments, or the whole, are not captured.
    """

    def __init__(self, whole: Segment, scope: str, options: ServeOptions, eager: Sequence[str] = ()) -> None:
        """``eager`` are the names of modules that are in no piece."""
        if scope not in SCOPES:
            raise OptionError(f"scope is {scope!r}; expected one of: {', '.join(SCOPES)}")
        if options.shapes == "bucket":
            raise OptionError("shapes is 'bucket', but pieces pass on their results without padding; expected 'exact'")
        self.pool = options.pool or Pool()
        self.reasons: dict[str, str] = {}
        self.scope = "full" if scope == "auto" else scope
        self._eager = dict.fromkeys(eager, "named in at")
        if scope == "piecewise":
            self.reasons |= self._eager
        # Held from the first piece to the last: a second thread would overwrite the results in between.
        self._lock = RLock()
        self._downgrades = scope == "auto"
        self._whole = whole
        self._options = options
        self._pieces: list[Graphed] = []
        inner = replace(options, on_failure="raise") if self._downgrades else options
        self._full = self._graph(whole, inner) if self.scope == "full" else None

    def _graph(self, segment: Segment, options: ServeOptions) -> Graphed:
        """Return a graphed piece, which :meth:`close` closes."""
        self._pieces.append(Graphed(segment, options, self.pool))
        return self._pieces[-1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call all segments. Results are not copied between two pieces that are both programs."""
        if self.scope == "none" or runs_within_step():
            return self._whole(*args, **kwargs)
        with self._lock:
            if self._full is not None:
                try:
                    return self._full(*args, **kwargs)
                except RefusalError as error:
                    # The refused call has had no effect.
                    self._downgrade(error, "piecewise")
            result = self._call_pieces(args, kwargs)
            if self._options.outputs == "static":
                return result
            return map_result(lambda leaf: leaf.plain().clone() if isinstance(leaf, StaticOutput) else leaf, result)

    def _downgrade(self, error: RefusalError, scope: str) -> None:
        """Capture less from now on, or raise ``error`` if the user's scope is not ``"auto"``."""
        if not self._downgrades:
            raise error
        self._fall_back(error, scope)

    def _fall_back(self, error: Exception, scope: str) -> None:
        self.reasons |= {name_of(self._whole): str(error), **self._eager}
        self.close()
        self._full = None
        self.scope = scope

    @abstractmethod
    def _call_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the segments one after another."""

    @property
    def programs(self) -> list[Graphed]:
        """The captured pieces, one for each run of consecutive segments."""
        return [piece for piece in self._pieces if piece.num_graphs]

    @property
    def num_graphs(self) -> int:
        """The number of recordings."""
        return sum(graphed.num_graphs for graphed in self.programs)

    def text(self) -> str:
        """Return the report as text."""
        lines = [f"graphplan: scope {self.scope}, {self.num_graphs} graphs"]
        lines += [f"  eager: {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join([*lines, *(graphed.text() for graphed in self.programs)])

    def data(self) -> dict[str, Any]:
        """Return the report as data."""
        pieces = [graphed.data() for graphed in self.programs]
        return {"scope": self.scope, "graphs": self.num_graphs, "reasons": dict(self.reasons), "pieces": pieces}

    def close(self) -> None:
        """Drop every program."""
        for piece in self._pieces:
            piece.close()
        self._pieces.clear()


class Segments(Pieces):
    """A chain for :func:`graphplan.piecewise`. Each segment is first captured alone, to find out whether it can be."""

    def __init__(self, segments: Sequence[Segment], scope: str, options: ServeOptions) -> None:
        if not segments or not all(map(callable, segments)):
            raise OptionError(f"piecewise was given {segments!r}; expected functions or modules, at least one")
        super().__init__(Chain(segments), scope, options)
        self._segments = tuple(segments)
        self._trials: list[Graphed | None] = []  # Each segment graphed alone; None for one that cannot be captured.
        self._each = Chain([partial(self._try, at) for at in range(len(segments))])
        self._runs: Chain | None = None

    def _call_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._trials:
            alone = replace(self._options, on_failure="raise", outputs="clone", capture_after=1)
            self._trials = [self._graph(segment, alone) for segment in self._segments]
        if self._runs is None and all(trial is None or trial.num_graphs for trial in self._trials):
            self._runs = self._join()
        return (self._runs or self._each)(*args, **kwargs)

    def _try(self, at: int, *args: Any, **kwargs: Any) -> Any:
        """Call a segment. After a refusal, it is called eagerly from now on."""
        trial, segment = self._trials[at], self._segments[at]
        if trial is not None:
            try:
                return trial(*args, **kwargs)
            except RefusalError as error:
                self.reasons[name_of(segment)] = str(error)
                self._trials[at] = None
                trial.close()
        return segment(*args, **kwargs)

    def _join(self) -> Chain:
        """Return a chain of all segments, in which consecutive ones that can be captured are one graphed piece."""
        runs = list[Segment]()
        self.close()
        for can_be, pairs in groupby(zip(self._trials, self._segments, strict=True), lambda pair: pair[0] is not None):
            segments = [segment for _, segment in pairs]
            if can_be:
                run = segments[0] if len(segments) == 1 else Chain(segments)
                runs.append(self._graph(run, replace(self._options, outputs="static")))
            else:
                runs += segments
        return Chain(runs)
