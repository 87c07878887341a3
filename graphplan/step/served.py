"""A graphed step with what a server of predictions asks of it besides calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import override

from graphplan.environment.surroundings import surroundings
from graphplan.errors import GraphPlanError, RefusalError, SkipReason
from graphplan.feed.signature import Feed, flatten
from graphplan.program.program import Program
from graphplan.step.call_lock import running_step
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.runner import brought_to


class _BeforeError(GraphPlanError):
    """Holds what came up before a call was made."""


class ServedStep(GraphedStep):
    """A step whose programs can be looked at and picked, and whose calls can be left out."""

    _before: Callable[[Program | None, SkipReason | None, str], None] | None = None
    takers = (*GraphedStep.takers, "find_program", "skip")

    @property
    def programs(self) -> list[Program]:
        """Every program that is ready."""
        return self.drawn()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the static inputs that the programs share."""
        return self._buffers.nbytes

    @property
    def owners(self) -> Mapping[str, Any]:
        """The owners that were named or found so far."""
        return self._managed.owners

    @property
    def device(self) -> torch.device | None:
        """Where the step computes, once a call has shown it."""
        return self._runner.device

    def refuse(self, error: RefusalError) -> None:
        """Raise ``error`` or warn of it, as a refusal of the step's own."""
        self._refusals.refuse(error)

    def skip(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: SkipReason, detail: str = "") -> Any:
        """An eager call for a reason of the caller's, on arguments of any kind, through which gradients may flow."""
        with self._alone(), running_step():
            result = self._runner.outside(brought_to(self._options.feed_device, args, kwargs), reason, detail)
        self._runner.outcome = None
        return result

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        before: Callable[[Program | None, SkipReason | None, str], None],
    ) -> Any:
        """A call that tells ``before`` what is about to run: a program, or Python (None), and if that is not on the way
        to a program, why. What ``before`` raises comes out, and nothing has run.
        """
        self._before = before
        try:
            return self(*args, **kwargs)
        except _BeforeError as error:
            raise error.args[0] from None
        finally:
            self._before = None

    @override
    def _tell(self, program: Program | None, reason: SkipReason | None = None, detail: str = "") -> None:
        try:
            if self._before is not None:
                self._before(program, reason, detail)
        except Exception as error:
            raise _BeforeError(error) from error

    def recover(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End a call in which ``error`` came up around the step's own call. The caller's errors are raised again."""
        refusal = self._refusal_of(error)
        if refusal is None:
            raise error
        with self._alone():
            return self._recover(refusal, args, kwargs)

    def find_program(self, args: tuple[Any, ...]) -> tuple[Program, Feed] | None:
        """The program that a call with ``args`` would replay now, and its feed; None if it would not replay one.

        Raises:
            RefusalError: for arguments that no program could take.
        """
        with self._alone():
            if surroundings() is not None:
                return None
            feed = flatten(args, {})
            entry, program = self._lookup.find(feed)
            if program is None or entry.refusal is not None or program.misfit(feed) is not None:
                return None
            return program, self._lookup.moved(feed)
