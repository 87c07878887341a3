"""Find calls of ``type`` in user code: they tell a stand-in from a real value, and the stand-in cannot notice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from inspect import getattr_static
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

from graphplan.environment.origin import is_users_file
from graphplan.feed.placeholders import is_stand_in
from graphplan.observe.bytecode import Instruction, end_of_call, instructions_of, loaded_path, plain_instructions

_RAISE = "RAISE_VARARGS"


class TypeCalls(NamedTuple):
    """The calls of ``type`` in one code object. ``paths``: arguments, or their attributes, that are passed to it.
    ``names``: dotted names of the classes that a result is compared with. ``others``: whether there are other calls.
    ``in_errors``: whether some calls only make the text of an error (``raise TypeError(f"got {type(x)}")``).
    """

    paths: frozenset[tuple[str, ...]] = frozenset()
    names: frozenset[tuple[str, ...]] = frozenset()
    others: bool = False
    in_errors: bool = False

    def are_stand_ins(self, frame: FrameType) -> bool:
        """Return True if a path holds a stand-in as the code starts, or a property that may return one."""
        there = (_found(frame.f_locals.get(first), inner) for first, *inner in self.paths)
        return any(is_stand_in(value) or hasattr(type(value), "__get__") for value in there)

    def classes(self, frame: FrameType) -> list[Any]:
        """Return the classes at ``names``; None for each name that leads to no class."""
        spaces = (frame.f_globals, frame.f_builtins)
        firsts = ((next((s[first] for s in spaces if first in s), None), inner) for first, *inner in self.names)
        return [found if isinstance(found := _found(*names), type) else None for names in firsts]


_NOTHING = TypeCalls()


def _found(value: Any, attributes: Iterable[str]) -> Any:
    """Follow ``attributes`` from ``value`` without running its code; None if an attribute is not found that way."""
    for name in attributes:
        value = getattr_static(value, name, None)
    return value


@lru_cache(4096)
def type_calls(code: CodeType) -> TypeCalls:
    """Return the calls of ``type`` in the user's ``code``."""
    if "type" not in code.co_names or not is_users_file(code.co_filename):
        return _NOTHING
    steps = plain_instructions(code)
    bound = {step.argval for step in steps if step.opname in ("STORE_FAST", "DELETE_FAST")}
    own = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - bound
    stored = {step.argval for step in steps if step.opname == "STORE_ATTR"}
    paths: set[tuple[str, ...]] = set()
    names: set[tuple[str, ...]] = set()
    elsewhere = set()
    for at, step in enumerate(steps):
        if step.opname != "LOAD_GLOBAL" or step.argval != "type":
            continue
        call = end_of_call(code, step.offset)
        end = call.offset if call is not None and call.arg == 1 else -1
        given = [inner for inner in steps[at + 1 :] if inner.offset < end]
        path = loaded_path(given, ("LOAD_FAST",))
        if path and path[0] in own and stored.isdisjoint(path[1:]) and len(path) == len(given):
            paths.add(path)
        elif [inner.opname for inner in given] != ["LOAD_CONST"]:
            compared = _compared([inner for inner in steps[at + 1 :] if inner.offset > end]) if given else []
            names.update(compared)
            if not compared:
                elsewhere.add(_ends_in_raise(steps[at:]))
    return TypeCalls(frozenset(paths), frozenset(names), False in elsewhere, True in elsewhere)


def _compared(steps: Sequence[Instruction]) -> list[tuple[str, ...]]:
    """Return the names in the comparison that follows (``is C``, ``== pkg.C``, ``in (A, B)``); none if none follows."""
    names, at = [], 0
    while path := loaded_path(steps[at:], ("LOAD_GLOBAL",)):
        names.append(path)
        at += len(path)
    following = [step.opname for step in steps[at : at + 2]]
    is_one = len(names) == 1 and following[:1] in (["IS_OP"], ["COMPARE_OP"])
    is_among = following in (["BUILD_TUPLE", "CONTAINS_OP"], ["BUILD_LIST", "CONTAINS_OP"])
    return names if is_one or (is_among and steps[at].arg == len(names)) else []


def calls_type(code: CodeType) -> bool:
    """Return True if the user's ``code`` calls ``type`` on anything."""
    return type_calls(code) != _NOTHING


@lru_cache(4096)
def handles_errors(code: CodeType) -> bool:
    """Return True if ``code`` may catch an exception that it, or a function that it calls, has raised."""
    names = [step.opname for step in instructions_of(code)]
    handlers = (pair for pair in pairwise(names) if pair[0] == "PUSH_EXC_INFO" and pair[1] != "WITH_EXCEPT_START")
    return "SETUP_FINALLY" in names or "suppress" in code.co_names or any(handlers)


def _ends_in_raise(steps: Iterable[Instruction]) -> bool:
    ends = (
        name
        for name in (step.opname for step in steps)
        if name.startswith("RETURN") or "JUMP" in name or name == _RAISE
    )
    return next(ends, None) == _RAISE
