"""Facts of a second step to compare with one trace: the operators that run, and their arguments beside tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from graphplan.observe.source import find_source
from graphplan.observe.watching import Unwatched
from graphplan.trace.batch_reads import Answer, BatchAnswers
from graphplan.trace.changes import same_value
from graphplan.trace.composites import OperatorMode
from graphplan.trace.mode import LIFTS
from graphplan.trace.operands import Operand
from graphplan.trace.operator_schemas import OperatorCall
from graphplan.trace.records import Operator
from graphplan.trace.symbolic_numbers import NumberTensor

_NUMBER = "other"
"""The name of the last argument of operators that take a number or a tensor there."""


class RepeatedOperators(OperatorMode):
    """A mode that records the operators of a step that should run those ``expected`` again: a small part of a trace.
    Callers compare the tensors that the step leaves. ``answers`` replaced reads in the traced step: this mode makes
    these reads, and records them as in the trace. ``numbers`` are operands that stand for numbers, which a replay of
    the same step has filled.
    """

    def __init__(
        self,
        expected: Sequence[Operator],
        answers: BatchAnswers | None = None,
        numbers: Mapping[Operand, NumberTensor] = MappingProxyType({}),
    ) -> None:
        super().__init__(answers)
        self._answer: Answer | None = None
        self._traced, self._numbers = expected, numbers
        self.expected = [operator for operator in expected if not operator.replaces_read]
        self._reads_more = len(self.expected) < len(expected)
        self.found: list[Operator] = []
        self._is_unlike = False

    def takes(self, answer: Answer, call: OperatorCall) -> bool:
        """Return False: the read is made here."""
        self._answer = answer
        return False

    def operate(self, unwatched: Unwatched, call: OperatorCall) -> Any:
        """Run an operator, and record its name and numbers, with the source of the expected operator if it is alike."""
        answer, self._answer = self._answer, None
        noted = call if answer is None else answer.call
        if noted is not None:
            self._note(noted)
        return unwatched.run(call.schema.call, call.args, call.kwargs, is_native=call.schema.is_native)

    def _note(self, call: OperatorCall) -> None:
        name, scalars = call.schema.name, tuple(call.tensors_and_others()[1])
        known = (self.expected or self._traced)[min(len(self.found), len(self.expected) - 1)]
        if self._reads_more and name != known.name and (call.reads_values() or name in LIFTS):
            # The traced step has deferred this read.
            return
        number = self._numbers.get(known.operands[-1]) if known.operands else None
        if number is not None:
            scalars = tuple(scalar for scalar in scalars if scalar != (_NUMBER, number.held))
        if name == known.name and known.constant is None and same_value(scalars, known.scalars):
            self.found.append(known)
            return
        source = known.source
        if name != known.name and not self._is_unlike:
            # Later operators differ, too, and only the first one is reported: look up its source alone.
            source, self._is_unlike = find_source(), True
        constant = call.args[0].detach().clone() if name in LIFTS else None
        self.found.append(
            Operator(name, known.operands, known.offsets, scalars, source, known.launches, constant,
                     known.random, known.threaded)
        )  # fmt: skip
