"""Placeholders, which a trace passes instead of fed Python values (file names, arrays) that the step may not read.

A placeholder may be passed on, unpacked and kept in containers, and ``isinstance`` takes it for the value. Any other
use raises :class:`ReadSignal`; the call is then undone and run again with the values.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from types import CodeType
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
    """What code calls ``type`` on, which no stand-in notices: ``arguments`` of its own, and whether on anything else;
    ``in_errors``: only where it raises one then (``raise TypeError(f"expected a tensor, got {type(x)}")``).
    """

    arguments: frozenset[str] = frozenset()
    others: bool = False
    in_errors: bool = False


_NOTHING = Asked()


@lru_cache(4096)
def asked_classes(code: CodeType) -> Asked:
    """What the user's ``code`` calls ``type`` on."""
    if "type" not in code.co_names or not is_users_file(code.co_filename):
        return _NOTHING
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL", "PRECALL")]
    bound = [step.argval for step in steps if "STORE_FAST" in step.opname or "DELETE_FAST" in step.opname]
    own = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]).difference(*map(_each, bound))
    arguments, elsewhere = set(), set()
    for at, (step, argument, call) in enumerate(zip(steps, steps[1:], [*steps[2:], steps[-1]], strict=False)):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval == "type":
            is_argument = argument.opname.startswith("LOAD_FAST") and argument.argval in own
            if is_argument and call.opname.startswith("CALL") and call.arg == 1:
                arguments.add(argument.argval)
            else:
                elsewhere.add(_ends_in_raise(steps[at:]))
    return Asked(frozenset(arguments), False in elsewhere, True in elsewhere)


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
