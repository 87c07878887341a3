"""The instructions of code objects, in one form for all versions of Python."""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from dis import Instruction
from itertools import takewhile
from types import CodeType

_PADDING = frozenset({"NOP", "RESUME", "PRECALL", "PUSH_NULL", "NOT_TAKEN", "EXTENDED_ARG"})
_MARKED_SINCE = {"LOAD_GLOBAL": (3, 11), "LOAD_ATTR": (3, 12)}
"""Instructions whose argument's lowest bit marks a load of a callable, and the versions of Python that mark it."""


def plain_instructions(code: CodeType) -> list[Instruction]:
    """Return the instructions of ``code`` without padding. Each one loads or stores at most one local variable."""
    found: list[Instruction] = []
    for step in dis.get_instructions(code):
        if step.opname not in _PADDING:
            found += _plain_variables(step) if "_FAST" in step.opname else [step]
    return found


def loads_callee(step: Instruction) -> bool:
    """Return True if a global or attribute is loaded to be called next. Older Python versions do not mark this."""
    is_marked = sys.version_info >= _MARKED_SINCE.get(step.opname, (4,))
    return is_marked and bool((step.arg or 0) & 1)


def end_of_call(code: CodeType, start: int) -> Instruction | None:
    """Return the instruction that calls the callable loaded at ``start``; None if there is none, or after a jump."""
    depth = 0
    for step in dis.get_instructions(code):
        if step.offset < start:
            continue
        if "JUMP" in step.opname:
            break
        depth += dis.stack_effect(step.opcode, step.arg)
        if step.offset > start and depth <= 1:
            return step if depth == 1 and step.opname.startswith("CALL") else None
    return None


def _plain_variables(step: Instruction) -> list[Instruction]:
    """Split an instruction on local variables into plain ``LOAD_FAST`` and ``STORE_FAST`` instructions."""
    if type(step.argval) is tuple:
        acts = [part for part in step.opname.split("_") if part in ("LOAD", "STORE")]
        pairs = zip(acts, step.argval, strict=True)
        return [step._replace(opname=f"{act}_FAST", argval=variable) for act, variable in pairs]
    return [step._replace(opname="LOAD_FAST") if step.opname.startswith("LOAD_FAST") else step]


def loaded_path(steps: Sequence[Instruction], loads: Sequence[str]) -> tuple[str, ...]:
    """Return the name that the first instruction loads, if it is one of ``loads``, and the attributes that follow."""
    if not steps or steps[0].opname not in loads:
        return ()
    attributes = takewhile(lambda step: step.opname == "LOAD_ATTR", steps[1:])
    return (str(steps[0].argval), *(str(step.argval) for step in attributes))
