"""What code does with a value that one of its instructions reads: assert it, return it, or compute with it.

A value is asserted if nothing but branches depends on it, and one side of each of them only raises: ``assert``, or
``if bad: raise``, with the message that the raising side puts together. The bytecode is followed from the instruction
on, along all ways that it can go, with which items of the stack and which variables depend on the value. Where an
instruction is not known here, the code computes with the value.

Needs no torch.
"""

from __future__ import annotations

import builtins
import dis
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from types import BuiltinFunctionType, CodeType
from typing import Any, NamedTuple

_Item = bool | str
"""On the stack: whether it depends on the value, or the name that it was loaded by: ``module.name`` of a global, and
``.name`` of what is in another thing.
"""
_Stack = tuple[_Item, ...]


class Use(Enum):
    """What code does with a value."""

    ASSERTED = "asserted"
    RETURNED = "returned"
    """Or yielded: the caller decides."""
    OTHER = "other"


class _State(NamedTuple):
    """Before the instruction number ``place``. ``names``: the variables that depend on the value."""

    place: int
    stack: _Stack
    names: frozenset[str]


class _ComputedWith(Exception):
    """The code does something else with the value than to assert or return it."""


_GOING = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_NO_INTERRUPT", "JUMP")
_RAISING = ("RAISE_VARARGS", "RERAISE")
_RETURNING = ("RETURN_VALUE", "RETURN_CONST")
_WITHIN_BLOCKS = ("SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_IDLE = (
    "NOP", "CACHE", "EXTENDED_ARG", "RESUME", "PRECALL", "KW_NAMES", "POP_BLOCK", "SETUP_FINALLY", "MAKE_CELL",
    "COPY_FREE_VARS", "NOT_TAKEN", *_GOING,
)  # fmt: skip
_LOOKING = (
    "LOAD_FAST", "LOAD_GLOBAL", "LOAD_CONST", "LOAD_DEREF", "LOAD_ATTR", "COMPARE_OP", "IS_OP", "CONTAINS_OP",
    "LOAD_METHOD", "PUSH_NULL", "POP_", "COPY", "SWAP", "DUP_TOP", "ROT_", "JUMP_", "NOP",
)  # fmt: skip
"""Instructions that change nothing, beside :data:`_PURE` ones."""
_PURE: dict[str, Callable[[int], int]] = {
    **dict.fromkeys(("TO_BOOL", "GET_ITER", "LIST_TO_TUPLE", "CALL_INTRINSIC_1"), lambda arg: 1),
    **dict.fromkeys(("CONVERT_VALUE", "FORMAT_SIMPLE"), lambda arg: 1),
    **dict.fromkeys(("COMPARE_OP", "IS_OP", "CONTAINS_OP", "FORMAT_WITH_SPEC", "IMPORT_NAME"), lambda arg: 2),
    **dict.fromkeys(("BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_STRING", "BUILD_SLICE"), lambda arg: arg),
    "BINARY_SLICE": lambda arg: 3,
    "BUILD_MAP": lambda arg: 2 * arg,
    "BUILD_CONST_KEY_MAP": lambda arg: arg + 1,
    "FORMAT_VALUE": lambda arg: 2 if arg & 4 else 1,
}
"""How many items instructions take that make one of them, and do nothing else."""
_MAKING = ("BINARY_", "UNARY_", "INPLACE_", "MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE")
"""Others, which the interpreter counts for us."""
_STORES = {"STORE_GLOBAL": 1, "STORE_NAME": 1, "STORE_DEREF": 1, "STORE_ATTR": 2, "STORE_SUBSCR": 3, "STORE_SLICE": 4}
_STORES |= {"DELETE_ATTR": 1, "DELETE_SUBSCR": 2}
_INTO = {"LIST_APPEND": 1, "SET_ADD": 1, "LIST_EXTEND": 1, "SET_UPDATE": 1, "MAP_ADD": 2}
_TURNS = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}
_HEADS = 2 if sys.version_info >= (3, 11) else 1
"""Places on the stack of which one has what is called."""
_MANY = 10_000
"""States of one analysis. Code with more of them is taken to compute with the value."""
_PURE_CALLS: frozenset[Any] = frozenset(
    {bool, int, float, complex, str, abs, len, min, max, sum, any, all, round, repr, isinstance, type}
) | {thing for thing in vars(math).values() if isinstance(thing, BuiltinFunctionType)}
_PURE_METHODS = (
    "abs", "all", "allclose", "amax", "amin", "any", "bool", "cpu", "detach", "dim", "eq", "equal", "float",
    "ge", "gt", "int", "is_complex", "is_floating_point", "isclose", "isfinite", "isin", "isinf", "isnan",
    "item", "le", "logical_and", "logical_not", "logical_or", "long", "lt", "max", "mean", "min", "ndimension",
    "ne", "norm", "numel", "size", "sum", "tolist",
)  # fmt: skip
"""What arrays and tensors compute under these names, and the modules that are for them, changes nothing."""


def _is_pure(function: Any) -> bool:
    """Whether calling it does no more than to compute a result."""
    if f"{type(function).__module__}.{type(function).__name__}" == "numpy.ufunc":
        return True
    try:
        return function in _PURE_CALLS
    except TypeError:
        return False


class Branches:
    """The branches of one code object. ``space`` has its globals; ``asserting`` are functions that raise unless their
    arguments allow them to go on, and do nothing else.
    """

    def __init__(self, code: CodeType, space: Mapping[str, Any], asserting: Collection[Any] = ()) -> None:
        self._code = code
        self._space = space
        self._asserting = asserting
        self._steps = list(dis.get_instructions(code))
        self._offsets = [step.offset for step in self._steps]
        self._places = {step.offset: index for index, step in enumerate(self._steps)}
        self._handlers = dict(_handlers(code, self._steps, self._places))
        self._room = code.co_stacksize + 8
        self._empty: _Stack = (False,) * self._room
        self._known_to_raise: dict[int, bool] = {}

    def use_at(self, offset: int) -> tuple[Use, frozenset[Any]]:
        """What is done with the value that the instruction at ``offset`` reads, and the classes of exceptions that the
        branches on it raise; empty where these are not known.
        """
        index, raised = self._index_at(offset), set[Any]()
        found: set[Use] = set()
        left: list[_State] = []
        seen: set[_State] = set()
        try:
            left += self._read(index, found, raised)
            while left and len(seen) < _MANY:
                state = left.pop()
                state = state._replace(stack=_taken(state.stack, self._room)[1])
                if state not in seen and (state.names or True in state.stack):
                    seen.add(state)
                    left += self._follow(state, found, raised)
        except _ComputedWith:
            left = []
            found = set()
        if left:
            found = set()
        use = Use.RETURNED if Use.RETURNED in found else Use.ASSERTED if Use.ASSERTED in found else Use.OTHER
        return use, frozenset() if None in raised else frozenset(raised)

    def lets_out(self, offset: int, raised: frozenset[Any]) -> tuple[bool, frozenset[Any]]:
        """Whether an exception leaves the code if one of the classes ``raised`` comes out of the instruction at
        ``offset``, or one of any class if there are none; and the classes of what leaves it. A ``with`` statement lets
        it out, but for ``contextlib.suppress``.
        """
        index, kinds = self._index_at(offset), set[Any]()
        handler = self._handlers.get(index)
        lets_out = handler is None or self._only_raises(handler, kinds, raised)
        return lets_out, raised | kinds if raised else raised

    def _index_at(self, offset: int) -> int:
        """The number of the instruction at ``offset``, or in whose cache that is, as in the middle of some calls."""
        return bisect_right(self._offsets, offset) - 1

    @cached_property
    def _stacks(self) -> dict[int, _Stack]:
        """What is on the stack before each instruction: the names of globals, where all ways there agree."""
        stacks: dict[int, _Stack] = {}
        left = [_State(index, self._empty, frozenset()) for index in (0, *self._handlers.values())]
        while left:
            index, stack, _ = left.pop()
            if index >= len(self._steps):
                continue
            stack = _taken(stack, self._room)[1]
            known = stacks.get(index, stack)
            merged = tuple(one if one == other else False for one, other in zip(known, stack, strict=True))
            if stacks.get(index) != merged:
                stacks[index] = merged
                left += self._follow(_State(index, merged, frozenset()), set(), set())
        return stacks

    def _read(self, index: int, found: set[Use], raised: set[Any]) -> Iterable[_State]:
        """The states after the instruction that reads the value."""
        step = self._steps[index]
        state = _State(index, self._stacks.get(index, self._empty), frozenset())
        if _is_test(step):
            return self._test(state._replace(stack=(*state.stack[:-1], True)), found, raised)
        if step.opname in (*_STORES, *_INTO, "POP_TOP", *_RETURNING) or _is_in_place(step):
            raise _ComputedWith
        if step.opname.startswith(("BINARY", "UNARY", "COMPARE", "CONTAINS", "CALL", "LOAD_", "FOR_ITER", "TO_BOOL")):
            # Of the items below it nothing is known: there are enough of them.
            *_, after = self._follow(state, found, raised)
            return [after._replace(stack=(*after.stack[:-1], True))]
        raise _ComputedWith

    def _follow(self, state: _State, found: set[Use], raised: set[Any]) -> Iterator[_State]:
        """The states that may come after one."""
        index, stack, names = state
        if index >= len(self._steps):
            raise _ComputedWith
        step = self._steps[index]
        if _is_test(step) and stack[-1] is True:
            yield from self._test(state, found, raised)
            return
        if step.opname in _RAISING:
            return
        if step.opname in _RETURNING:
            if step.opname == "RETURN_VALUE" and stack[-1] is True:
                found.add(Use.RETURNED)
            return
        if names and index in self._handlers:
            yield _State(self._handlers[index], self._empty, names)
        if step.opname == "YIELD_VALUE" and stack[-1] is True:
            found.add(Use.RETURNED)
            stack = (*stack[:-1], False)
        target = self._places.get(step.argval) if step.opcode in _JUMPS else None
        if target is not None and step.opname not in _WITHIN_BLOCKS:
            if step.opname == "FOR_ITER" and stack[-1] is True:
                raise _ComputedWith
            effect = 0 if step.opname in _GOING else _effect(step, jump=True)
            yield _State(target, stack[:effect] if effect < 0 else stack + (False,) * effect, names)
        if step.opname not in _GOING:
            yield _State(index + 1, *self._after(step, stack, names, found))

    def _test(self, state: _State, found: set[Use], raised: set[Any]) -> Iterable[_State]:
        """A branch on the value: one of its sides has to raise."""
        step, target = self._steps[state.place], self._places[self._steps[state.place].argval]
        keeps = step.opname.endswith("_OR_POP")
        sides = [(target, state.stack if keeps else state.stack[:-1]), (state.place + 1, state.stack[:-1])]
        others = []
        for start, stack in sides:
            kinds: set[Any] = set()
            if self._only_raises(start, kinds):
                raised |= kinds or {None}
            else:
                others.append(_State(start, stack, state.names))
        if len(others) > 1:
            joined = None if keeps else self._join(*others)
            if joined is None:
                raise _ComputedWith
            others = [joined]
        found.add(Use.ASSERTED)
        return others

    def _join(self, one: _State, other: _State) -> _State | None:
        """Where two ways come together again, if nothing happens on them before that."""
        places = sorted({state.place for state in self._looks(one) if len(state.stack) == len(one.stack)})
        joins = (one._replace(place=place) for place in places)
        return next((end for end in joins if self._lead(one, end) and self._lead(other, end)), None)

    def _lead(self, start: _State, end: _State) -> bool:
        """Whether every way from one state on does no more than to look at things until it raises, or comes to another
        one, which is further on.
        """
        return all(self._is_at(state, end) or self._onwards(state, start) for state in self._looks(start, end))

    def _looks(self, start: _State, end: _State | None = None) -> Iterator[_State]:
        """The states that ways go through from one on, as far as they only look at things; up to and with ``end``."""
        left, seen = [start._replace(stack=_marked(start.stack))], set[_State]()
        while left:
            state = left.pop()._replace(names=frozenset())
            if state in seen or state.place >= len(self._steps) or self._always_raises(state.place):
                continue
            seen.add(state)
            yield state
            if end is None or not self._is_at(state, end):
                left += self._onwards(state, start)

    def _onwards(self, state: _State, start: _State) -> list[_State]:
        """The states after one, if nothing is changed on the way there, not even what was on the stack at the start,
        and it leads further down in the code; else none.
        """
        step = self._steps[state.place]
        if step.opname.startswith("CALL"):
            is_pure = self._is_pure_call(step, state.stack) and not self._may_miss(step)
        elif step.opname in _PURE or step.opname.startswith(_MAKING):
            is_pure = not _is_in_place(step) and step.opname != "IMPORT_NAME" and not self._may_miss(step)
        else:
            is_pure = step.opname in _IDLE or step.opname.startswith(_LOOKING)
        after = list(self._follow(state, set(), set())) if is_pure else []
        marks = _marked(start.stack)
        are_good = all(one.place > state.place and one.stack[: len(marks)] == marks for one in after)
        return after if are_good else []

    def _is_at(self, state: _State, end: _State) -> bool:
        return len(state.stack) == len(end.stack) and self._is_same(state.place, end.place)

    def _is_pure_call(self, step: dis.Instruction, stack: _Stack) -> bool:
        """Whether a call does no more than to compute a result, as far as its name tells."""
        called = [item for item in self._arguments(step, stack)[:_HEADS] if isinstance(item, str)]
        holder, _, name = called[0].rpartition(".") if called else ("", "", "")
        if "." not in (called or [""])[0]:
            return bool(called) and _is_pure(self._global(name))
        return name in _PURE_METHODS or _is_pure(self._global(f"{holder}.{name}"))

    def _is_same(self, one: int, other: int) -> bool:
        """Whether the same goes on from two instructions: a compiler copies what is short."""
        return self._settled(one) == self._settled(other) or self._both_return(one, other)

    def _settled(self, index: int) -> int:
        """The instruction that jumps lead to from one on."""
        for _ in self._steps:
            step = self._steps[index]
            if step.opname not in (*_GOING, "NOP"):
                break
            index = index + 1 if step.opname == "NOP" else self._places[step.argval]
        return index

    def _both_return(self, *starts: int) -> bool:
        """Whether nothing but ``return None`` begins at each of the instructions: a compiler copies it."""
        for start in starts:
            first, *others = self._steps[start : start + 2]
            names = [first.opname, *(step.opname for step in others)]
            if first.argval is not None or (names[0] != "RETURN_CONST" and names != ["LOAD_CONST", "RETURN_VALUE"]):
                return False
        return True

    def _always_raises(self, start: int) -> bool:
        """:meth:`_only_raises` without the classes, remembered: many ways lead through the same instructions."""
        known = self._known_to_raise.get(start)
        if known is None:
            known = self._known_to_raise[start] = self._only_raises(start, set())
        return known

    def _only_raises(self, start: int, kinds: set[Any], raised: Collection[Any] | None = None) -> bool:
        """Whether every way from an instruction on ends with an exception that leaves the code. ``kinds`` gets the
        exceptions' classes that are named on the way; ``raised`` are those of one that is on its way already.
        """
        left, seen = [start], set[int]()
        raises = False
        while left:
            index = left.pop()
            if index in seen:
                continue
            if index >= len(self._steps):
                return False
            seen.add(index)
            step = self._steps[index]
            raises |= step.opname in _RAISING
            if step.opname in _RETURNING or step.opname in ("YIELD_VALUE", "SEND"):
                return False
            kind = self._named(index)
            if isinstance(kind, type) and issubclass(kind, BaseException) and not self._is_caught_here(index):
                kinds.add(kind)
            if step.opname in _RAISING:
                left += [self._handlers[index]] if index in self._handlers else []
            else:
                left += self._ways(index, kinds if raised is None else raised)
        return raises

    def _ways(self, index: int, raised: Collection[Any]) -> Iterator[int]:
        """The instructions that may come after one while an exception is on its way, or is being made."""
        step = self._steps[index]
        target = self._places.get(step.argval) if step.opcode in _JUMPS else None
        if step.opname in _GOING:
            assert target is not None
            yield target
            return
        before = [earlier.opname for earlier in self._steps[max(index - 2, 0) : index]]
        leaves_with = "WITH_EXCEPT_START" in before and "suppress" not in self._code.co_names
        if target is not None and step.opname not in _WITHIN_BLOCKS and not leaves_with:
            yield target
        is_match = step.opname == "JUMP_IF_NOT_EXC_MATCH" or before[-1:] == ["CHECK_EXC_MATCH"]
        if not (target is not None and is_match and self._cannot_match(index, raised)):
            yield index + 1

    def _cannot_match(self, index: int, raised: Collection[Any]) -> bool:
        """Whether the ``except`` clause that decides at an instruction is for none of ``raised``."""
        loaded = index - (1 if self._steps[index].opname == "JUMP_IF_NOT_EXC_MATCH" else 2)
        kind = self._named(loaded)
        is_class = isinstance(kind, type) and issubclass(kind, BaseException)
        return is_class and bool(raised) and not any(issubclass(one, kind) or issubclass(kind, one) for one in raised)

    def _is_caught_here(self, index: int) -> bool:
        """Whether the class that an instruction loads is one that an ``except`` clause is for."""
        return any("EXC_MATCH" in step.opname for step in self._steps[index + 1 : index + 2])

    def _named(self, index: int) -> Any:
        """The global or builtin that an instruction loads, or None."""
        step = self._steps[index]
        if step.opname == "LOAD_ASSERTION_ERROR" or step.argval is AssertionError:
            return AssertionError
        return self._global(step.argval) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else None

    def _global(self, path: str) -> Any:
        first, *rest = path.split(".")
        thing = self._space.get(first, getattr(builtins, first, None))
        for name in rest:
            # Of modules only: to ask other objects could run code.
            thing = vars(thing).get(name) if isinstance(thing, type(sys)) else None
        return thing

    def _after(
        self, step: dis.Instruction, stack: _Stack, names: frozenset[str], found: set[Use]
    ) -> tuple[_Stack, frozenset[str]]:
        """The stack and the names after an instruction that does not jump."""
        opname, arg = step.opname, step.arg or 0
        if opname in _IDLE:
            return stack, names
        if "_FAST" in opname and opname.startswith(("LOAD", "STORE", "DELETE")):
            return _variables(step, stack, names)
        if opname in _PURE or opname.startswith(_MAKING):
            count = _PURE[opname](arg) if opname in _PURE else 1 - _effect(step)
            rest, taken = _taken(stack, count)
            if True in taken and ((_is_in_place(step) and taken[0] is not True) or self._may_miss(step)):
                raise _ComputedWith
            return (*rest, True in taken), names
        if opname.startswith(("CALL", "LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME")):
            return self._call_or_load(step, stack, found), names
        if opname in _STORES:
            rest, taken = _taken(stack, _STORES[opname])
            if True in taken:
                raise _ComputedWith
            return rest, names
        if opname in _INTO:
            rest, taken = _taken(stack, _INTO[opname])
            place = len(rest) - arg
            return (*rest[:place], rest[place] is True or True in taken, *rest[place + 1 :]), names
        return _moved(step, stack), names

    def _may_miss(self, step: dis.Instruction) -> bool:
        """Whether the code goes on where an instruction cannot do with the value what it is to do, as with a key that
        is not there.
        """
        handler = self._handlers.get(self._places[step.offset])
        looks_up = step.opname.startswith("CALL") or "SUBSCR" in step.opname or step.argrepr == "[]"
        return looks_up and handler is not None and not self._only_raises(handler, set())

    @staticmethod
    def _arguments(step: dis.Instruction, stack: _Stack) -> _Stack:
        """What a call takes from the stack."""
        # Python 3.11 counts the arguments as taken by the instruction before.
        return _taken(stack, (step.arg or 0) + 2 if step.opname == "CALL" else 1 - _effect(step))[1]

    def _call_or_load(self, step: dis.Instruction, stack: _Stack, found: set[Use]) -> _Stack:
        opname = step.opname
        if opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            # Beside what is to be called there may be a place for what that is bound to.
            return stack + (str(step.argval),) * max(_effect(step), 1)
        if opname in ("LOAD_ATTR", "LOAD_METHOD"):
            rest, (holder,) = _taken(stack, 1)
            item = holder if holder is True else f"{holder or ''}.{step.argval}"
            return rest + (item,) * (_effect(step) + 1)
        taken = self._arguments(step, stack)
        rest = stack[: max(len(stack) - len(taken), 0)]
        if True in taken:
            called = [item for item in taken[:_HEADS] if isinstance(item, str)]
            function = self._global(called[0]) if called else None
            if any(function is one for one in self._asserting):
                found.add(Use.ASSERTED)
                return (*rest, False)
            if taken[0] is True or not _is_pure(function) or self._may_miss(step):
                raise _ComputedWith
        return (*rest, True in taken)


def _is_test(step: dis.Instruction) -> bool:
    return step.opname.startswith(("POP_JUMP_", "JUMP_IF_")) and step.opname != "JUMP_IF_NOT_EXC_MATCH"


def _is_in_place(step: dis.Instruction) -> bool:
    return step.opname.startswith("INPLACE_") or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))


def _effect(step: dis.Instruction, *, jump: bool = False) -> int:
    """By how much the stack grows."""
    return dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None, jump=jump)


def _taken(stack: _Stack, count: int) -> tuple[_Stack, _Stack]:
    """The stack without its top, and the ``count`` items there."""
    if count > len(stack):
        stack = (False,) * (count - len(stack)) + stack
    return stack[: len(stack) - count], stack[len(stack) - count :]


def _marked(stack: _Stack) -> _Stack:
    """A stack of which each item is told from what is put in its place."""
    return tuple(f"{number}th" for number in range(len(stack)))


def _variables(step: dis.Instruction, stack: _Stack, names: frozenset[str]) -> tuple[_Stack, frozenset[str]]:
    """What loads, stores and deletes of variables do; since Python 3.13 two of them are one instruction."""
    given = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    acts = [part for part in step.opname.split("_") if part in ("LOAD", "STORE", "DELETE")]
    for act, name in zip(acts, given, strict=True):
        if act == "LOAD":
            stack = (*stack, name in names)
        if act == "STORE":
            stack, (item,) = _taken(stack, 1)
            names = names | {name} if item is True else names - {name}
        elif act == "DELETE" or step.opname == "LOAD_FAST_AND_CLEAR":
            names -= {name}
    return stack, names


def _moved(step: dis.Instruction, stack: _Stack) -> _Stack:
    """The stack after an instruction that moves items, or one that is not known."""
    opname, arg = step.opname, step.arg or 0
    if opname in ("COPY", "DUP_TOP", "DUP_TOP_TWO"):
        rest, taken = _taken(stack, {"DUP_TOP": 1, "DUP_TOP_TWO": 2}.get(opname, arg))
        return (*rest, *taken, *(taken[:1] if opname == "COPY" else taken))
    if opname == "SWAP":
        rest, taken = _taken(stack, arg)
        return (*rest, taken[-1], *taken[1:-1], taken[0])
    if opname in _TURNS or opname == "ROT_N":
        rest, taken = _taken(stack, _TURNS.get(opname, arg))
        return (*rest, taken[-1], *taken[:-1])
    if opname == "UNPACK_SEQUENCE":
        rest, taken = _taken(stack, 1)
        return rest + taken * arg
    effect = _effect(step)
    if opname in ("POP_TOP", "END_FOR", "END_SEND", "POP_ITER"):
        return stack[:effect]
    pushes = opname.startswith("LOAD_") and "SUPER" not in opname
    if True in stack and not (pushes or opname in ("PUSH_NULL", "FOR_ITER")):
        raise _ComputedWith
    return stack[:effect] if effect < 0 else stack + (False,) * effect


def _handlers(code: CodeType, steps: list[dis.Instruction], places: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """For instructions in a ``try`` or ``with`` statement: where an exception goes that comes out of them."""
    if sys.version_info >= (3, 11):
        for start, end, target in _exception_table(code.co_exceptiontable):
            yield from ((places[at], places[target]) for at in range(start, end, 2) if at in places)
        return
    left: list[tuple[int, tuple[int | None, ...]]] = [(0, ())]
    seen: set[int] = set()
    while left:
        index, blocks = left.pop()
        if index in seen or index >= len(steps):
            continue
        seen.add(index)
        step = steps[index]
        handler = next((block for block in reversed(blocks) if block is not None), None)
        if handler is not None:
            yield index, handler
        target = places.get(step.argval) if step.opcode in _JUMPS else None
        if step.opname in _WITHIN_BLOCKS:
            assert target is not None
            left += [(target, (*blocks, None)), (index + 1, (*blocks, target))]
            continue
        if step.opname in ("POP_BLOCK", "POP_EXCEPT"):
            blocks = blocks[:-1]
        left += [(target, blocks)] if target is not None else []
        left += [(index + 1, blocks)] if step.opname not in (*_GOING, *_RAISING, *_RETURNING) else []


def _exception_table(table: bytes) -> Iterator[tuple[int, int, int]]:
    """Start, end and target of what a code object of Python 3.11 and later has for exceptions, as offsets."""
    numbers = []
    value = 0
    for byte in table:
        # Six bits each; the next one says whether more belong to the number, the last one begins an entry.
        value = value << 6 | byte & 63
        if not byte & 64:
            numbers.append(value)
            value = 0
    for start, length, target, _ in zip(*[iter(numbers)] * 4, strict=True):
        yield 2 * start, 2 * (start + length), 2 * target
