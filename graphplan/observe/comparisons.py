"""Numbers that code only compares: a replay is good for as long as the comparisons come out as they did.

``if self.current_epoch < 5`` and ``if self.global_step % 100 == 0`` depend on one answer, not on the number. The
bytecode is searched for each load of such an attribute. Where a load is followed by anything but a comparison with a
literal or with another attribute of the same object, code computes with the number. If it does so only after one of
the comparisons has come out one way (``if self.global_step % 100 == 0: self.show(self.global_step)``), a replay is good
while that comes out the other way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
_NAMESPACES = frozenset({"locals", "vars", "eval", "exec", "globals"})
"""What shows local variables to other code."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """Another attribute of the object whose method compares."""

    name: str


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


@dataclass(frozen=True, slots=True)
class _Step:
    opname: str
    argval: Any
    argrepr: str
    is_target: bool
    offset: int


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
                    found |= (made := dict(_uses(code, steps, index)))
                    subjects |= dict.fromkeys(made, subject)
                except (_ComputedWith, IndexError):
                    computing.append((index, subject))
        for index, subject in computing:
            branches = [place for place in found if subject is not None and subjects[place] == subject]
            place, outcome = _branch_around(steps, index, subject or (), branches)
            found[place] = replace(found[place], computes=outcome)
    except (_ComputedWith, IndexError):
        return None
    return frozenset(found.values())


def _loads_of_attribute(code: CodeType, steps: Sequence[_Step], name: str, *, of_self: bool) -> Iterator[int]:
    """The places of what loads the attribute. Code that does anything else to it computes with it."""
    for index, step in enumerate(steps):
        if step.argval != name or step.opname not in _NAMING or "NULL" in step.argrepr:
            continue
        if not of_self or (index and _is_first_argument(code, steps[index - 1])):
            _only(step.opname == "LOAD_ATTR")
            yield index


def _subject_of(steps: Sequence[_Step], index: int) -> _Subject:
    """The names that lead to the object whose attribute is loaded at ``index``: ``("trainer", "self")``."""
    names = []
    while steps[index - 1].opname == "LOAD_ATTR" and index > 1:
        index -= 1
        names.append(steps[index].argval)
    before = steps[index - 1]
    return (*names, before.argval) if before.opname in ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL") else None


def _through_variables(code: CodeType, steps: Sequence[_Step], index: int) -> Iterator[int]:
    """What loads the number that is loaded at ``index``: that, or what loads a variable which is given it."""
    following = steps[index + 1]
    if following.opname != "STORE_FAST" or following.is_target:
        yield index
        return
    for load in _loads_of(code, steps, following.argval):
        yield from _through_variables(code, steps, load)


def _branch_around(
    steps: Sequence[_Step], load: int, subject: Sequence[str], branches: Iterable[int]
) -> tuple[int, bool]:
    """Which of the comparisons has to come out in one way for ``load`` to be reached, and that outcome: the load lies
    between a jump and its target, where no other code jumps to, and the names of its object stay what they are.
    """
    for place in branches:
        jump = steps[place]
        if not jump.opname.startswith("POP_JUMP") or not jump.offset < steps[load].offset < jump.argval:
            continue
        body = range(jump.offset + 1, jump.argval)
        inside = [step for step in steps if step.offset in body]
        entered = {step.offset for step in inside if step.is_target}
        jumped = {step.argval for step in inside if jumps_to(step.opname)}
        others = {step.argval for step in steps if step.offset not in body and jumps_to(step.opname)}
        stored = {step.argval for step in inside if step.opname.startswith("STORE_")}
        if entered <= jumped and others.isdisjoint(body) and stored.isdisjoint(subject):
            return place, "FALSE" in jump.opname
    raise _ComputedWith


@lru_cache(512)
def _steps_of(code: CodeType) -> Sequence[_Step]:
    """The instructions, those that Python 3.13 joins taken apart."""
    found = []
    for step in plain_steps(code):
        if "_FAST" in step.opname and isinstance(step.argval, tuple):
            acts = [part for part in step.opname.split("_") if part in ("LOAD", "STORE")]
            pairs = zip(acts, step.argval, strict=True)
            place = step.is_jump_target, step.offset
            found += [_Step(f"{act}_FAST", variable, variable, *place) for act, variable in pairs]
        else:
            kind = "LOAD_FAST" if step.opname.startswith("LOAD_FAST") else step.opname
            found.append(_Step(kind, step.argval, step.argrepr, step.is_jump_target, step.offset))
    return found


def _only(condition: bool) -> None:
    if not condition:
        raise _ComputedWith


def _uses(code: CodeType, steps: Sequence[_Step], index: int) -> Iterator[tuple[int, Comparison]]:
    """The comparison with the number that the instruction at ``index`` loads, if any, by the place of what is next."""
    following = steps[index + 1]
    _only(not following.is_target)
    if _asks_for_truth(following):
        yield _after_truth(steps, index + 1), Comparison()
    elif following.opname != "POP_TOP":
        comparison, end = _comparison_after(code, steps, index + 1)
        yield _after_truth(steps, end), comparison


def _after_truth(steps: Sequence[_Step], index: int) -> int:
    """The place of what decides by a truth value, for which the instruction at ``index`` may ask."""
    return index + (steps[index].opname == "TO_BOOL")


def _loads_of(code: CodeType, steps: Sequence[_Step], variable: str) -> list[int]:
    """What loads a variable, which nothing else may be stored in."""
    _only(variable not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    naming = [index for index, step in enumerate(steps) if step.argval == variable and "_FAST" in step.opname]
    _only(sum(steps[index].opname != "LOAD_FAST" for index in naming) == 1)
    return [index for index in naming if steps[index].opname == "LOAD_FAST"]


def _asks_for_truth(step: _Step) -> bool:
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
        _only_left_operand(code, steps, index)
    except (_ComputedWith, IndexError):
        return False
    return True


def _only_left_operand(code: CodeType, steps: Sequence[_Step], index: int) -> None:
    following = steps[index + 1]
    _only(not following.is_target)
    if following.opname == "STORE_FAST":
        for load in _loads_of(code, steps, following.argval):
            _only_left_operand(code, steps, load)
    elif not _asks_for_truth(following):
        end, others = index + 1, 0
        while steps[end].opname.startswith("LOAD_"):
            _only("NULL" not in steps[end].argrepr and (others > 0 or steps[end].opname != "LOAD_ATTR"))
            others += steps[end].opname != "LOAD_ATTR"
            end += 1
        _only(others == 1 and steps[end].opname.startswith((*_OPERATIONS, "COMPARE_OP", "CONTAINS_OP")))
        _only(not any(step.is_target for step in steps[index + 1 : end + 1]))


def _comparison_after(code: CodeType, steps: Sequence[_Step], index: int) -> tuple[Comparison, int]:
    """The comparison with what is loaded from ``index`` on, and the place of what comes after it."""
    made: tuple[tuple[str, Any], ...] = ()
    other, end = _other_at(code, steps, index)
    while (symbol := _symbol_of(steps[end])) in COMPUTING:
        _only(isinstance(other, NUMBERS) and not (symbol in ("%", "//") and other == 0))
        made = (*made, (symbol, other))
        if _asks_for_truth(steps[end + 1]):
            _only(not any(step.is_target for step in steps[index : end + 1]))
            return Comparison(steps=made), end + 1
        other, end = _other_at(code, steps, end + 1)
    _only(not any(step.is_target for step in steps[index : end + 1]))
    if steps[end].opname == "CONTAINS_OP":
        _only(isinstance(other, tuple | frozenset) and all(isinstance(item, _LITERALS) for item in other))
        return Comparison("in", other, made), end + 1
    compared = str(steps[end].argval)
    _only(steps[end].opname == "COMPARE_OP" and compared in OPERATORS and isinstance(other, (*_LITERALS, Attribute)))
    return Comparison(compared, other, made), end + 1


def _symbol_of(step: _Step) -> str:
    """The symbol of the operator that an instruction is."""
    return step.argrepr if step.opname == "BINARY_OP" else _SYMBOLS.get(step.opname.removeprefix("BINARY_"), "")


def _other_at(code: CodeType, steps: Sequence[_Step], index: int) -> tuple[Any, int]:
    """The literal, or the attribute of the method's object, that is loaded at ``index``; and what comes after it."""
    step, after = steps[index], steps[index + 1]
    if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return step.argval, index + 1
    _only(_is_first_argument(code, step) and after.opname == "LOAD_ATTR" and "NULL" not in after.argrepr)
    return Attribute(str(after.argval)), index + 2


def _is_first_argument(code: CodeType, step: _Step) -> bool:
    return step.opname == "LOAD_FAST" and code.co_argcount > 0 and step.argval == code.co_varnames[0]


def come_out_alike(comparisons: Iterable[Comparison] | None, one: Any, other: Any) -> bool:
    """Return True if all comparisons have the same outcome for two numbers; False if none are given."""
    if comparisons is None or type(one) not in NUMBERS or type(other) not in NUMBERS:
        return False
    return all(comparison.outcome(one) == comparison.outcome(other) for comparison in comparisons)
