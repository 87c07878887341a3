"""Functions one after the other, where not all of them can be captured: programs, with eager calls between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphplan.errors import OptionError, RefusalError
from graphplan.inference.graphed import Graphed
from graphplan.inference.graphed_options import ServeOptions
from graphplan.inference.pieces.scopes import Chain, Pieces, Segment, name_of


@dataclass(slots=True)
class _Trial:
    """A segment whose fate is open: it is captured alone first. ``reason`` says why it cannot be."""

    segment: Segment
    alone: Graphed | None
    reason: str | None = None

    @property
    def is_decided(self) -> bool:
        return self.alone is None or self.alone.num_graphs > 0


class Segments(Pieces):
    """See :func:`graphplan.piecewise`. An index gives a segment alone, for control flow of one's own between them."""

    def __init__(
        self,
        segments: Sequence[Segment],
        is_capturable: Callable[[Segment], bool] | Sequence[bool] | None,
        scope: str,
        options: ServeOptions,
    ) -> None:
        if not segments or not all(map(callable, segments)):
            raise OptionError(f"piecewise was given {segments!r}; expected functions or modules, at least one")
        super().__init__(Chain(segments), scope, options)
        self._trials = self._begin(segments, is_capturable)
        self._runs: list[Segment] | None = None
        self._alone: dict[int, _Trial] = {}

    def _begin(self, segments: Sequence[Segment], given: Any) -> list[_Trial]:
        if given is None:
            options = replace(self._options, on_failure="raise", outputs="clone", capture_after=1)
            return [_Trial(segment, Graphed(segment, options, self.pool)) for segment in segments]
        answers = [bool(given(segment)) for segment in segments] if callable(given) else list(given)
        if len(answers) != len(segments):
            raise OptionError(f"is_capturable has {len(answers)} answers; expected one for each of {len(segments)}")
        self.reasons |= {
            name_of(s): "is_capturable said no" for s, good in zip(segments, answers, strict=True) if not good
        }
        return [
            _Trial(segment, None, None if good else "is_capturable said no")
            for segment, good in zip(segments, answers, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, index: int) -> Segment:
        """One segment alone, graphed in the pool that all share, with results that need not be copied."""
        index = range(len(self._trials))[index]
        if index not in self._alone:
            trial = self._trials[index]
            eager = trial.reason is not None or self.scope == "none"
            options = replace(self._options, on_failure="raise", outputs="static")
            alone = None if eager else Graphed(trial.segment, options, self.pool)
            self._alone[index] = _Trial(trial.segment, alone, trial.reason)
        return self._try(self._alone[index])

    def _graphed(self) -> Iterator[Graphed]:
        yield from (trial.alone for trial in [*self._alone.values(), *self._trials] if trial.alone is not None)
        yield from (run for run in self._runs or () if isinstance(run, Graphed))

    def _call_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._runs is None and all(trial.is_decided for trial in self._trials):
            self._runs = list(self._join())
        return Chain(self._runs or [self._try(trial) for trial in self._trials])(*args, **kwargs)

    def _try(self, trial: _Trial) -> Segment:
        """A call of a segment that finds out whether it can be captured."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if trial.alone is not None:
                try:
                    return trial.alone(*args, **kwargs)
                except RefusalError as error:
                    self.reasons[name_of(trial.segment)] = trial.reason = str(error)
                    trial.alone.close()
                    trial.alone = None
            return trial.segment(*args, **kwargs)

        return call

    def _join(self) -> Iterator[Segment]:
        """Runs of consecutive segments that can be captured, and the others."""
        run: list[Segment] = []
        for trial in [*self._trials, None]:
            if trial is not None and trial.reason is None:
                run.append(trial.segment)
                continue
            if run:
                segment = run[0] if len(run) == 1 else Chain(run)
                yield Graphed(segment, replace(self._options, outputs="static"), self.pool)
                run = []
            if trial is not None:
                yield trial.segment
        for trial in self._trials:
            if trial.alone is not None:
                trial.alone.close()
                trial.alone = None
