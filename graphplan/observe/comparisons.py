"""Numbers that code only compares: a replay is good for as long as the comparisons come out as they did.

``if self.current_epoch < 5`` and ``if self.global_step % 100 == 0`` depend on one answer, not on the number. The
bytecode is searched for each load of such an attribute. Where a load is followed by anything but a comparison with a
literal or with what the same object leads to, code computes with the number. If it does so only after one of
the comparisons has come out one way (``if self.global_step % 100 == 0: self.show(self.global_step)``), a replay is good
while that comes out the other way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from dis import Instruction
from functools import lru_cache
from types import CodeType
from typing import Any

from graphplan.observe.names import jumps_to, plain_steps

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "in": lambda number, others: number in others,
}  # fmt: skip
COMPUTING: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod, "//": operator.floordiv,
}  # fmt: skip
"""Operators whose results are compared as the numbers themselves are."""
_SYMBOLS = {"ADD": "+", "SUBTRACT": "-", "MULTIPLY": "*", "MODULO": "%", "FLOOR_DIVIDE": "//"}
"""What instructions of Python 3.10 are called behind ``BINARY_``."""
_NAMING = ("LOAD_ATTR", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR")
"""Instructions that name an attribute, but for those that call it: a number is not called."""
_OPERATIONS = ("BINARY_", "INPLACE_")
_Subject = tuple[str, ...] | None
_LITERALS = (int, float, bool, type(None))
NUMBERS = (int, float)
COMPARABLE = (*NUMBERS, bool)
_NAMESPACES = frozenset({"locals", "vars", "eval", "exec", "globals"})
"""What shows local variables to other code."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Another number, by the attributes and items that lead to it from the object whose method compares."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """The outcome of a comparison after which code computes with the number, so that each number is one of its own."""

    number: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """``OPERATOR other`` of what ``steps``, operators with their right operands, make of a number one after the other;
    without an operator whether that is not 0. ``computes``: the outcome after which code computes with the number.
    """

    operator: str = ""
    other: Any = 0
    steps: tuple[tuple[str, Any], ...] = ()
    computes: bool | None = None

    def outcome(self, number: Any) -> bool | Computed:
        """What it comes to for ``number``. A comparison that cannot be made raises, as in the step."""
        result = number
        for symbol, operand in self.steps:
            result = COMPUTING[symbol](result, operand)
        answer = bool(OPERATORS[self.operator](result, self.other) if self.operator else result)
        return Computed(number) if answer is self.computes else answer


class _ComputedWith(Exception):
    """Code does something else with the number."""


@lru_cache(4096)
def comparisons_in(code: CodeType, name: str, *, of_self: bool = False) -> frozenset[Comparison] | None:
    """All comparisons that ``code`` makes with attributes called ``name``, of its first argument alone if ``of_self``;
    None if it may do anything else with one, whatever they come to.
    """
    if name in code.co_consts or not _NAMESPACES.isdisjoint(code.co_names):
        return None
    steps = _steps_of(code)
    found: dict[int, Comparison] = {}
    subjects: dict[int, _Subject] = {}
    computing: list[tuple[int, _Subject]] = []
    try:
        for attribute in _loads_of_attribute(code, steps, name, of_self=of_self):
            subject = _subject_of(steps, attribute)
            for index in _through_variables(code, steps, attribute):
                try:
                    comparison, place = _comparison_at(code, steps, index + 1)
                    place += steps[place].opname == "TO_BOOL"
                    found[place], subjects[place] = comparison, subject
                except (_ComputedWith, IndexError):
                    computing.append((index, subject))
        for index, subject in computing:
            branches = [place for place in found if subject is not None and subjects[place] == subject]
            place, outcome = _branch_around(steps, index, subject or (), branches)
            found[place] = replace(found[place], computes=outcome)
    except (_ComputedWith, IndexError):
        return None
    return frozenset(found.values())


def _loads_of_attribute(code: CodeType, steps: Sequence[Instruction], name: str, *, of_self: bool) -> Iterator[int]:
    """The places of what loads the attribute. Code that does anything else to it computes with it."""
    for index, step in enumerate(steps):
        if step.argval != name or step.opname not in _NAMING or "NULL" in step.argrepr:
            continue
        if not of_self or (index and _is_first_argument(code, steps[index - 1])):
            _only(step.opname == "LOAD_ATTR")
            yield index


def _subject_of(steps: Sequence[Instruction], index: int) -> _Subject:
    """The names that lead to the object whose attribute is loaded at ``index``: ``("trainer", "self")``."""
    names = []
    while steps[index - 1].opname == "LOAD_ATTR" and index > 1:
        index -= 1
        names.append(steps[index].argval)
    before = steps[index - 1]
    return (*names, before.argval) if before.opname in ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL") else None


def _through_variables(code: CodeType, steps: Sequence[Instruction], index: int) -> Iterator[int]:
    """What loads the number that is loaded at ``index`` to use it: that, or loads of a variable which is given it."""
    following = steps[index + 1]
    if following.opname == "STORE_FAST" and not following.is_jump_target:
        for load in _loads_of(code, steps, following.argval):
            yield from _through_variables(code, steps, load)
    elif following.opname != "POP_TOP":
        yield index


def _branch_around(
    steps: Sequence[Instruction], load: int, subject: Sequence[str], branches: Iterable[int]
) -> tuple[int, bool]:
    """Which of the comparisons, the innermost one, has to come out in one way for ``load`` to be reached, and that
    outcome: the load lies between a jump and its target, where no other code jumps to, and the names of its object stay
    what they are.
    """
    for place in sorted(branches, reverse=True):
        jump = steps[place]
        if not jump.opname.startswith("POP_JUMP") or not jump.offset < steps[load].offset < jump.argval:
            continue
        body = range(jump.offset + 1, jump.argval)
        inside = [step for step in steps if step.offset in body]
        entered = {step.offset for step in inside if step.is_jump_target}
        jumped = {step.argval for step in inside if jumps_to(step.opname)}
        others = {step.argval for step in steps if step.offset not in body and jumps_to(step.opname)}
        stored = {step.argval for step in inside if step.opname.startswith("STORE_")}
        if entered <= jumped and others.isdisjoint(body) and stored.isdisjoint(subject):
            return place, "FALSE" in jump.opname
    raise _ComputedWith


_steps_of = lru_cache(512)(plain_steps)


def _only(condition: bool) -> None:
    if not condition:
        raise _ComputedWith


def _loads_of(code: CodeType, steps: Sequence[Instruction], variable: str) -> list[int]:
    """What loads a variable, which nothing else may be stored in."""
    _only(variable not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    naming = [index for index, step in enumerate(steps) if step.argval == variable and "_FAST" in step.opname]
    _only(sum(steps[index].opname != "LOAD_FAST" for index in naming) == 1)
    return [index for index in naming if steps[index].opname == "LOAD_FAST"]


def _asks_for_truth(step: Instruction) -> bool:
    is_jump = step.opname.startswith("POP_JUMP") and "NONE" not in step.opname
    return is_jump or step.opname in ("TO_BOOL", "UNARY_NOT")


def is_only_compared(code: CodeType, offset: int) -> bool:
    """Whether the instruction at ``offset`` is an operator, and code does no more with its result than to ask for its
    truth, to compare it, or to compute with it, as the left operand: there Python asks the number first.
    """
    steps = _steps_of(code)
    index = next((index for index, step in enumerate(steps) if step.offset == offset), 0)
    try:
        _only(steps[index].opname.startswith(_OPERATIONS) and _NAMESPACES.isdisjoint(code.co_names))
        for load in _through_variables(code, steps, index):
            _check_left_operand(steps, load + 1)
    except (_ComputedWith, IndexError):
        return False
    return True


def _check_left_operand(steps: Sequence[Instruction], index: int) -> None:
    """Accept a question for the truth, or an operator with what is loaded at ``index``, perhaps through attributes."""
    _only(not steps[index].is_jump_target)
    if _asks_for_truth(steps[index]):
        return
    _only(steps[index].opname.startswith("LOAD_") and steps[index].opname != "LOAD_ATTR")
    end = index + 1
    while steps[end].opname == "LOAD_ATTR":
        end += 1
    _only(steps[end].opname.startswith((*_OPERATIONS, "COMPARE_OP", "CONTAINS_OP")))
    _only(not any("NULL" in step.argrepr or step.is_jump_target for step in steps[index : end + 1]))


def _comparison_at(code: CodeType, steps: Sequence[Instruction], index: int) -> tuple[Comparison, int]:
    """The comparison of the number that begins at ``index``, and the place of what comes after it."""
    made: tuple[tuple[str, Any], ...] = ()
    end = index
    _only(not steps[index].is_jump_target)
    while not _asks_for_truth(steps[end]):
        other, end = _other_at(code, steps, end)
        _only(not any(step.is_jump_target for step in steps[index : end + 1]))
        symbol, compared = _symbol_of(steps[end]), str(steps[end].argval)
        if symbol in COMPUTING:
            _only(isinstance(other, (*NUMBERS, Reference)) and not (symbol in ("%", "//") and other == 0))
            made, end = (*made, (symbol, other)), end + 1
        elif steps[end].opname == "CONTAINS_OP":
            _only(isinstance(other, tuple | frozenset) and all(isinstance(item, _LITERALS) for item in other))
            return Comparison("in", other, made), end + 1
        else:
            _only(steps[end].opname == "COMPARE_OP" and compared in OPERATORS)
            _only(isinstance(other, (*_LITERALS, Reference)))
            return Comparison(compared, other, made), end + 1
    return Comparison(steps=made), end


def _symbol_of(step: Instruction) -> str:
    """The symbol of the operator that an instruction is."""
    return step.argrepr if step.opname == "BINARY_OP" else _SYMBOLS.get(step.opname.removeprefix("BINARY_"), "")


def _other_at(code: CodeType, steps: Sequence[Instruction], index: int) -> tuple[Any, int]:
    """The literal, or what the method's object leads to, that is loaded at ``index``; and what comes after it."""
    step = steps[index]
    if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return step.argval, index + 1
    _only(_is_first_argument(code, step))
    names, end = list[str](), index + 1
    while True:
        if steps[end].opname == "LOAD_ATTR" and "NULL" not in steps[end].argrepr:
            names.append(str(steps[end].argval))
            end += 1
        elif names and steps[end].opname == "LOAD_CONST" and _is_subscript(steps[end + 1]):
            _only(isinstance(steps[end].argval, str))
            names.append(steps[end].argval)
            end += 2
        else:
            break
    _only(bool(names))
    return Reference(tuple(names)), end


def _is_subscript(step: Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _is_first_argument(code: CodeType, step: Instruction) -> bool:
    return step.opname == "LOAD_FAST" and code.co_argcount > 0 and step.argval == code.co_varnames[0]


def come_out_alike(comparisons: Iterable[Comparison] | None, one: Any, other: Any) -> bool:
    """Return True if all comparisons have the same outcome for two numbers; False if none are given."""
    if comparisons is None or type(one) not in COMPARABLE or type(other) not in COMPARABLE:
        return False
    return all(comparison.outcome(one) == comparison.outcome(other) for comparison in comparisons)
