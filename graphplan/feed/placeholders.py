"""Placeholders, which a trace passes instead of fed Python values (file names, arrays) that the step may not read.

A placeholder may be passed on, unpacked and kept in containers, and ``isinstance`` takes it for the value. Any other
use raises :class:`ReadSignal`; the call is then undone and run again with the values.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from inspect import getattr_static
from itertools import pairwise, takewhile
from types import CodeType, FrameType
from typing import Any, NamedTuple

from graphplan.environment.origin import is_users_file
from graphplan.tensors.deferred import HostCopy, is_deferred

_RAISE = "RAISE_VARARGS"


class ReadSignal(BaseException):
    """Leaves at ``indices`` or ``symbolic`` numbers were read. No ``Exception``: the step's handlers let it pass."""

    def __init__(self, indices: Iterable[int] = (), *, symbolic: Iterable[str] | None = None) -> None:
        super().__init__()
        self.indices = tuple(indices)
        self.symbolic = None if symbolic is None else frozenset(symbolic)


class Placeholder:
    """Stands for the leaf at ``index``, of class ``kind``. ``on_read()`` is called when it is used, and raises."""

    __slots__ = ("_index", "_kind", "_on_read")

    def __init__(self, index: int, kind: type, on_read: Callable[[], Any]) -> None:
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_on_read", on_read)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "_kind") if name == "__class__" else _read(self)


def _read(placeholder: Placeholder, *_: Any, **__: Any) -> Any:
    return object.__getattribute__(placeholder, "_on_read")()


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_OTHERS = (
    "abs neg pos invert index int float complex round trunc floor ceil bool len length_hint iter next reversed "
    "contains getitem setitem delitem setattr delattr call hash eq ne lt le gt ge str repr format bytes fspath enter "
    "exit aenter aexit aiter anext await dir sizeof reduce reduce_ex copy deepcopy get set buffer torch_function"
)
_SPECIAL = [*_OTHERS.split(), *(prefix + name for name in _BINARY.split() for prefix in ("", "r", "i"))]
for _name in _SPECIAL:
    # The interpreter looks these up on the class.
    setattr(Placeholder, f"__{_name}__", _read)


def index_of(placeholder: Placeholder) -> int:
    """Return the index of the leaf that it stands for, without a use of it."""
    index: int = object.__getattribute__(placeholder, "_index")
    return index


def is_placeholder(value: Any) -> bool:
    """Return True for a placeholder, without a use of it."""
    return type(value) is Placeholder


def is_stand_in(value: Any) -> bool:
    """Return True for a placeholder, a deferred number, and a deferred copy, without a use of it."""
    return is_placeholder(value) or is_deferred(value) or type(value) is HostCopy


class Asked(NamedTuple):
    """What code calls ``type`` on, which no stand-in notices: its own arguments and what lies in them (``paths``), what
    it compares with certain classes (the ``names`` of these, each with its attributes), and whether on anything else;
    ``in_errors``: only where it raises one then (``raise TypeError(f"expected a tensor, got {type(x)}")``).
    """

    paths: frozenset[tuple[str, ...]] = frozenset()
    names: frozenset[tuple[str, ...]] = frozenset()
    others: bool = False
    in_errors: bool = False

    def are_stand_ins(self, frame: FrameType) -> bool:
        """Whether one lies at a path now, as the code begins, or may be what a property there gives."""
        there = (_found(frame.f_locals.get(first), inner) for first, *inner in self.paths)
        return any(is_stand_in(value) or hasattr(type(value), "__get__") for value in there)

    def classes(self, frame: FrameType) -> list[Any]:
        """The classes at the ``names``; None for one that is not found."""
        spaces = (frame.f_globals, frame.f_builtins)
        firsts = ((next((s[first] for s in spaces if first in s), None), inner) for first, *inner in self.names)
        return [found if isinstance(found := _found(*names), type) else None for names in firsts]


_NOTHING = Asked()


def _found(value: Any, attributes: Iterable[str]) -> Any:
    """What ``attributes`` lead to from ``value`` without code of its own; None if that does not tell."""
    for name in attributes:
        value = getattr_static(value, name, None)
    return value


@lru_cache(4096)
def asked_classes(code: CodeType) -> Asked:
    """What the user's ``code`` calls ``type`` on."""
    if "type" not in code.co_names or not is_users_file(code.co_filename):
        return _NOTHING
    steps = list(dis.get_instructions(code))
    bound = [step.argval for step in steps if "STORE_FAST" in step.opname or "DELETE_FAST" in step.opname]
    own = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]).difference(*map(_each, bound))
    stored = {step.argval for step in steps if step.opname == "STORE_ATTR"}
    paths: set[tuple[str, ...]] = set()
    names: set[tuple[str, ...]] = set()
    elsewhere = set()
    for at in (at for at, step in enumerate(steps) if step.opname == "LOAD_GLOBAL" and step.argval == "type"):
        end = _end_of_call(steps, at)
        given, *rest = [[], []] if end is None else [_plain(steps[at + 1 : end]), _plain(steps[end + 1 :])]
        path = _attributes(given, "LOAD_FAST")
        if end is None or not given:
            elsewhere.add(_ends_in_raise(steps[at:]))
        elif path is not None and path[0] in own and stored.isdisjoint(path[1:]) and len(path) == len(given):
            paths.add(path)
        elif [step.opname for step in given] != ["LOAD_CONST"]:
            compared = _compared(*rest)
            names.update(compared)
            if not compared:
                elsewhere.add(_ends_in_raise(steps[at:]))
    return Asked(frozenset(paths), frozenset(names), False in elsewhere, True in elsewhere)


def _plain(steps: Iterable[dis.Instruction]) -> list[dis.Instruction]:
    return [step for step in steps if step.opname not in ("CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG")]


def _end_of_call(steps: Sequence[dis.Instruction], at: int) -> int | None:
    """The instruction that calls what the one ``at`` loads, with one argument; None if there is none, or a branch."""
    depth = 0
    for index, step in enumerate(steps[at:], at):
        if "JUMP" in step.opname:
            return None
        depth += dis.stack_effect(step.opcode, step.arg)
        if index > at and depth <= 1:
            return index if depth == 1 and step.opname.startswith("CALL") and step.arg == 1 else None
    return None


def _attributes(steps: Sequence[dis.Instruction], load: str) -> tuple[str, ...] | None:
    """The name that is loaded first, and its attributes as far as they follow."""
    if not steps or not steps[0].opname.startswith(load) or not isinstance(steps[0].argval, str):
        return None
    attributes = takewhile(lambda step: step.opname == "LOAD_ATTR", steps[1:])
    return (steps[0].argval, *(step.argval for step in attributes))


def _compared(steps: Sequence[dis.Instruction]) -> list[tuple[str, ...]]:
    """The names of what a value is compared with next: ``is C``, ``== pkg.C``, ``in (A, B)``; none if it is not."""
    names, at = [], 0
    while (path := _attributes(steps[at:], "LOAD_GLOBAL")) is not None:
        names.append(path)
        at += len(path)
    following = [step.opname for step in steps[at : at + 2]]
    is_one = len(names) == 1 and following[:1] in (["IS_OP"], ["COMPARE_OP"])
    is_among = following in (["BUILD_TUPLE", "CONTAINS_OP"], ["BUILD_LIST", "CONTAINS_OP"])
    return names if is_one or (is_among and steps[at].arg == len(names)) else []


def asks_classes(code: CodeType) -> bool:
    """Return True if the user's ``code`` calls ``type`` on anything."""
    return asked_classes(code) != _NOTHING


@lru_cache(4096)
def handles_errors(code: CodeType) -> bool:
    """Return True if ``code`` may go on after an error: what it has raised, or a function that it calls."""
    names = [step.opname for step in dis.get_instructions(code)]
    handlers = (pair for pair in pairwise(names) if pair[0] == "PUSH_EXC_INFO" and pair[1] != "WITH_EXCEPT_START")
    return "SETUP_FINALLY" in names or "suppress" in code.co_names or any(handlers)


def _ends_in_raise(steps: Iterable[dis.Instruction]) -> bool:
    ends = (
        name
        for name in (step.opname for step in steps)
        if name.startswith("RETURN") or "JUMP" in name or name == _RAISE
    )
    return next(ends, None) == _RAISE


def _each(names: str | tuple[str, ...]) -> tuple[str, ...]:
    # One instruction may name two variables.
    return (names,) if isinstance(names, str) else names
