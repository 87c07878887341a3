"""Decode the instructions of code objects, in one form for all versions of Python.

``dis.get_instructions`` takes two to six times as long, because it also finds positions, labels and texts. For the code
of a model on an H200 host, that was as long as an eager step.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from types import CodeType
from typing import Any, NamedTuple

_PADDING = ("NOP", "RESUME", "PRECALL", "PUSH_NULL", "NOT_TAKEN")
_CACHE = dis.opmap.get("CACHE")
_PREFIX = dis.opmap["EXTENDED_ARG"]
_FLAGS = {
    "LOAD_GLOBAL": 1 if sys.version_info >= (3, 11) else 0,
    "LOAD_ATTR": 1 if sys.version_info >= (3, 12) else 0,
    "LOAD_SUPER_ATTR": 2,
}
"""The number of low bits of an instruction's argument that are flags, not part of the name's index."""
_WITH_ARGUMENT = frozenset(getattr(dis, "hasarg", range(dis.HAVE_ARGUMENT, 256)))


class Instruction(NamedTuple):
    """An instruction. ``argval`` is the name, constant, offset or number that ``arg`` encodes."""

    opname: str
    opcode: int
    arg: int | None
    argval: Any
    offset: int


def _kind_of(opcode: int) -> str:
    """Return the kind of an instruction's argument."""
    if opcode in dis.haslocal:
        return "pair" if dis.opname[opcode].count("_FAST") > 1 else "local"
    kinds = {"name": dis.hasname, "constant": dis.hasconst, "cell": dis.hasfree, "absolute": dis.hasjabs}
    named = next((kind for kind, opcodes in kinds.items() if opcode in opcodes), "")
    return named or ("relative" if opcode in dis.hasjrel else "number" if opcode in _WITH_ARGUMENT else "nothing")


_SKIPPED = frozenset(opcode for name, opcode in dis.opmap.items() if name in _PADDING)
_KINDS = [(_kind_of(opcode), _FLAGS.get(dis.opname[opcode], 0)) for opcode in range(256)]


def _spaces_of(code: CodeType) -> dict[str, Sequence[Any]]:
    """Return the sequences that arguments index, by kind."""
    own, around = code.co_varnames, code.co_freevars
    if sys.version_info >= (3, 11):
        # Since Python 3.11, all variables share one numbering.
        own = cells = (*own, *(cell for cell in code.co_cellvars if cell not in own), *around)
    else:
        cells = (*code.co_cellvars, *around)
    return {"name": code.co_names, "constant": code.co_consts, "local": own, "cell": cells}


def instructions_of(code: CodeType) -> Iterator[Instruction]:
    """Yield the instructions of ``code``, without ``EXTENDED_ARG`` and ``CACHE``."""
    raw, spaces, opnames, prefix = code.co_code, _spaces_of(code), dis.opname, 0
    for offset in range(0, len(raw), 2):
        opcode, arg = raw[offset], raw[offset + 1] | prefix
        prefix = arg << 8 if opcode == _PREFIX else 0
        if opcode in (_PREFIX, _CACHE):
            continue
        kind, flags = _KINDS[opcode]
        opname = opnames[opcode]
        if kind in spaces:
            yield Instruction(opname, opcode, arg, spaces[kind][arg >> flags], offset)
        elif kind == "nothing":
            yield Instruction(opname, opcode, None, None, offset)
        elif kind == "pair":
            yield Instruction(opname, opcode, arg, (spaces["local"][arg >> 4], spaces["local"][arg & 15]), offset)
        else:
            target = 2 * arg if kind == "absolute" else _target(raw, opname, arg, offset)
            yield Instruction(opname, opcode, arg, arg if kind == "number" else target, offset)


def plain_instructions(code: CodeType) -> list[Instruction]:
    """Return the instructions of ``code`` without padding. Each one loads or stores at most one local variable."""
    found: list[Instruction] = []
    for step in instructions_of(code):
        if step.opcode in _SKIPPED:
            continue
        if "_FAST" in step.opname:
            found += _plain_variables(step)
        else:
            found.append(step)
    return found


def loads_callee(step: Instruction) -> bool:
    """Return True if a global or attribute is loaded to be called next. Older Python versions do not mark this."""
    return step.opname in ("LOAD_GLOBAL", "LOAD_ATTR") and bool(_FLAGS[step.opname] and (step.arg or 0) & 1)


def _target(raw: bytes, opname: str, arg: int, offset: int) -> int:
    """Return the target of a relative jump, which counts from the next instruction."""
    offset += 2
    while offset < len(raw) and raw[offset] == _CACHE:
        offset += 2
    return offset + 2 * (-arg if "BACKWARD" in opname or opname == "END_ASYNC_FOR" else arg)


def end_of_call(code: CodeType, start: int) -> Instruction | None:
    """Return the instruction that calls the callable loaded at ``start``; None if there is none, or after a jump."""
    depth = 0
    for step in instructions_of(code):
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
