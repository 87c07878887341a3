"""What code does with the containers that it loads: appends to them alone, or looks at them.

The bytecode is followed with what each instruction finds on the stack: containers by the name that they were loaded by,
and how many items deep within that. Where instructions are not known here, whatever they get is looked at.

Longer than most rooms: the acts of the instructions share one stack, and mean nothing apart from each other.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import CodeType

from graphplan.observe.names import catches

_DEEPEST = 8
"""Items within items are told apart so far; a loop may go on without end."""


@dataclass(frozen=True, slots=True)
class Look:
    """Code does something else with a container than to append to it.

    ``name`` is the attribute (with a leading dot) or variable that the container, or one around it, is loaded by;
    ``depth`` how many items deep it lies there. ``whole``: what lies in it may be looked at, too. ``own``: the
    attribute is one of ``self``.
    """

    name: str
    depth: int
    whole: bool
    own: bool
    line: int


@dataclass(frozen=True, slots=True)
class _Value:
    """Something on the stack: what was loaded by a ``name`` (kind ``held``), an iterator over that, or a method of it
    that gives what is in it (``method``); ``self``, a literal string (``literal``), or a ``slice``.
    """

    kind: str
    name: str = ""
    depth: int = 0
    own: bool = False

    def deeper(self, by: int = 1) -> _Value:
        return replace(self, kind="held", depth=max(min(self.depth + by, _DEEPEST), -1))


_Entry = frozenset[_Value]
_Stack = tuple[_Entry, ...]
_NOTHING: _Entry = frozenset()
_SELF = frozenset({_Value("self")})

_GOING = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD_NO_INTERRUPT"}
_ENDING = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_IDLE = {"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS", "DELETE_FAST"}
_IDLE |= {"DELETE_DEREF", "DELETE_GLOBAL", "SETUP_ANNOTATIONS", "POP_BLOCK", "RETURN_CONST", *_GOING}
_TURNS = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4, "DUP_TOP": 1, "DUP_TOP_TWO": 2}
_PAIRED = {"CALL", "CALL_KW", "CALL_METHOD", *(("CALL_FUNCTION_EX",) if sys.version_info >= (3, 11) else ())}
"""Calls that have a place for what a method is bound to."""

GROWING = frozenset({"append", "extend", "appendleft", "extendleft"})
_SILENT = GROWING | {"clear", "insert", "update", "keys", "rotate"}
"""Methods that tell nothing of what is in the lists that a container has."""
_INTO = {"get": 1, "setdefault": 1, "pop": 1, "popleft": 1, "__getitem__": 1, "values": 0, "items": -1}
"""Methods that lead to items, and how deep."""
_MEASURES = frozenset({"len", "bool"})
_HARMLESS = frozenset({"isinstance", "issubclass", "type", "id", "callable", "hasattr"})


def looks_of(code: CodeType) -> frozenset[Look]:
    """What ``code`` looks at."""
    return _Follower(code).follow()


class _Follower:
    """Follows the instructions of one code object along every way that they can go."""

    def __init__(self, code: CodeType) -> None:
        self._steps = list(dis.get_instructions(code))
        self._places = {step.offset: index for index, step in enumerate(self._steps)}
        self._locals: dict[str, _Entry] = {}
        self._looks: set[Look] = set()
        self._misses = catches(self._steps, (IndexError,))
        """Whether an item that is not there tells the code how many there are."""
        self._room = code.co_stacksize + 8
        self._line = code.co_firstlineno
        self._lines: list[int] = []
        for step in self._steps:
            # Since Python 3.13 ``starts_line`` says whether a line begins, not which.
            begun = getattr(step, "line_number", step.starts_line)
            self._lines.append(begun or (self._lines[-1] if self._lines else self._line))

    def follow(self) -> frozenset[Look]:
        """What is looked at: as often as variables turn out to hold more."""
        known = None
        while known != self._locals:
            known = dict(self._locals)
            self._pass()
        return frozenset(self._looks)

    def _pass(self) -> None:
        stacks: dict[int, _Stack] = {}
        for start in range(len(self._steps)):
            # Nothing leads to handlers of exceptions: what lies on the stack there is not used any more.
            left: list[tuple[int, _Stack]] = [] if start in stacks else [(start, ())]
            while left:
                index, stack = left.pop()
                new = _merged(stacks.get(index, ()), stack)[-self._room :]
                if stacks.get(index) != new:
                    stacks[index] = new
                    left += self._ways(index, new)

    def _ways(self, index: int, stack: _Stack) -> Iterator[tuple[int, _Stack]]:
        """Where it goes on after an instruction, and with what."""
        step = self._steps[index]
        self._line = self._lines[index]
        target = self._places.get(step.argval) if step.opcode in _JUMPS else None
        after = self._after(step, stack)
        if target is not None:
            yield target, after if step.opname in _GOING else self._jumped(step, stack)
        if index + 1 < len(self._steps) and step.opname not in _GOING | _ENDING:
            yield index + 1, after

    def _jumped(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        effect = _effect(step, jump=True)
        return _taken(stack, -effect)[0] if effect < 0 else stack + (_NOTHING,) * effect

    def _look(self, entries: Iterable[_Entry], *, whole: bool = True) -> None:
        for entry in entries:
            for value in entry:
                if value.kind in ("held", "iterator"):
                    self._looks.add(Look(value.name, value.depth, whole, value.own, self._line))

    def _look_within(self, entries: Iterable[_Entry]) -> None:
        """Note what only shows something of an item, but not of a list that it might be."""
        for entry in entries:
            self._look([frozenset(value.deeper() for value in entry if value.kind == "held" and value.depth > 0)])

    def _after(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        """The stack after an instruction that does not jump."""
        return stack if step.opname in _IDLE else _ACTS.get(step.opname, _Follower._unknown)(self, step, stack)

    def _unknown(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        """What takes something gives one thing for it; what only gives has looked at nothing."""
        effect = _effect(step)
        taken = 1 - effect if effect <= 0 else 0
        rest, got = _taken(stack, taken)
        self._look(got)
        return rest + (_NOTHING,) * (effect + taken)

    def _load(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        name = str(step.argval)
        value = _Value("self") if name == "self" else _Value("held", name)
        # Before what is to be called there may be a place for what that is bound to.
        return stack + (_NOTHING,) * (_effect(step) - 1) + (frozenset({value}),)

    def _local(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        kinds = [part for part in step.opname.split("_") if part in ("LOAD", "STORE")]
        for kind, name in zip(kinds, names, strict=True):
            if kind == "LOAD":
                stack = (*stack, _SELF if name == "self" else self._locals.get(name, _NOTHING))
            else:
                stack, (value,) = _taken(stack, 1)
                self._locals[name] = self._locals.get(name, _NOTHING) | value
        return stack

    def _constant(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        if isinstance(step.argval, slice):  # Since Python 3.14 slices of constants are constants.
            return (*stack, frozenset({_Value("slice")}))
        literal = isinstance(step.argval, str)
        return (*stack, frozenset({_Value("literal", step.argval)}) if literal else _NOTHING)

    def _attribute(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        above = step.opname.startswith("LOAD_SUPER")
        rest, got = _taken(stack, 3 if above else 1)
        name = str(step.argval)
        called = step.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and bool((step.arg or 0) & 1))
        if called:
            return (*rest, self._method(name, got[-1]), _NOTHING)
        if name not in GROWING:
            self._look(got[-1:], whole=name.startswith("__"))
        return (*rest, frozenset({_Value("held", f".{name}", own=above or _is_self(got[-1]))}))

    def _method(self, name: str, receiver: _Entry) -> _Entry:
        if name in _INTO:
            held = [value for value in receiver if value.kind == "held"]
            return frozenset(replace(value.deeper(_INTO[name]), kind="method") for value in held)
        if name not in _SILENT:
            self._look([receiver])
        return _NOTHING

    def _call(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        heads, count = 2 if step.opname in _PAIRED else 1, step.arg or 0
        if step.opname == "CALL_FUNCTION_EX":
            count = 1 + (count & 1)
        elif step.opname.endswith("_KW"):
            count += 1
        rest, got = _taken(stack, heads + count)
        called, arguments = _NOTHING.union(*got[:heads]), got[heads:]
        names = {value.name for value in called if value.kind == "held"}
        result = frozenset(replace(value, kind="held") for value in called if value.kind == "method")
        if names & _MEASURES:
            self._look(arguments, whole=False)
        elif "getattr" in names and len(arguments) > 1:
            own = _is_self(arguments[0])
            literals = [value.name for value in arguments[1] if value.kind == "literal"]
            result = frozenset(_Value("held", f".{name}", own=own) for name in literals)
        elif names & _HARMLESS:
            self._look_within(arguments)
        else:
            self._look(arguments)
            self._look_within([called])
            # What a comprehension goes over takes the place of what a method is bound to.
            self._look([frozenset(value for value in called if value.kind == "iterator")])
        return (*rest, result)

    def _subscript(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        rest, (holder, key) = _taken(stack, 2)
        if any(value.kind == "slice" for value in key):
            self._look([holder])
            return (*rest, _NOTHING)
        if self._misses:
            self._look([holder], whole=False)
        self._look_within([key])
        return (*rest, _within(holder))

    def _slice(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        rest, got = _taken(stack, {"BUILD_SLICE": step.arg or 0, "STORE_SLICE": 4}.get(step.opname, 3))
        if step.opname == "BUILD_SLICE":
            return (*rest, frozenset({_Value("slice")}))
        self._look(got[:2] if step.opname == "STORE_SLICE" else got[:1])
        return rest if step.opname == "STORE_SLICE" else (*rest, _NOTHING)

    def _delete(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        rest, (holder, key) = _taken(stack, 2)
        if any(value.kind == "slice" for value in key):
            # What that leaves depends on how much there was.
            self._look([holder])
        return rest

    def _store(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        """What is stored where it came from was added to."""
        if step.opname == "STORE_SUBSCR":
            rest, (value, holder, key) = _taken(stack, 3)
            homes = {held.name for held in holder}
            if any(part.kind == "slice" for part in key):
                self._look([holder])
        elif step.opname == "STORE_ATTR":
            rest, (value, _) = _taken(stack, 2)
            homes = {f".{step.argval}"}
        else:
            rest, (value,) = _taken(stack, 1)
            homes = {str(step.argval)}
        self._look([frozenset(held for held in value if held.name not in homes)])
        return rest

    def _add(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        rest, (left, right) = _taken(stack, 2)
        if step.opname == "INPLACE_ADD" or step.argrepr == "+=":
            self._look([right])
            return (*rest, left)
        self._look([left, right])
        return (*rest, _NOTHING)

    def _compare(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        rest, (left, right) = _taken(stack, 2)
        if step.opname == "CONTAINS_OP":
            self._look([left])
            self._look([right], whole=False)
        self._look_within([left, right])
        return (*rest, _NOTHING)

    def _iterate(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        if step.opname == "FOR_ITER":
            return (*stack, _within(stack[-1] if stack else _NOTHING))
        rest, (items,) = _taken(stack, 1)
        self._look([items], whole=False)
        return (*rest, frozenset(replace(value, kind="iterator") for value in items if value.kind == "held"))

    def _unpack(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        rest, (items,) = _taken(stack, 1)
        self._look([items], whole=False)
        return rest + (_within(items),) * (step.arg or 0)

    def _truth(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        rest, got = _taken(stack, 1)
        self._look_within(got)
        if "NONE" not in step.opname:
            self._look(got, whole=False)
        return (*rest, _NOTHING) if step.opname in ("TO_BOOL", "UNARY_NOT") else rest

    def _drop(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        return _taken(stack, -_effect(step))[0]

    def _keep(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        rest, got = _taken(stack, -_effect(step))
        self._look(got)
        return rest

    def _move(self, step: dis.Instruction, stack: _Stack) -> _Stack:
        rest, got = _taken(stack, _TURNS.get(step.opname, step.arg or 1))
        if step.opname.startswith("DUP"):
            return (*rest, *got, *got)
        if step.opname == "COPY":
            return (*rest, *got, got[0])
        if step.opname == "SWAP":
            return (*rest, got[-1], *got[1:-1], got[0])
        return (*rest, got[-1], *got[:-1])


def _effect(step: dis.Instruction, *, jump: bool = False) -> int:
    """By how much the stack grows."""
    return dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None, jump=jump)


def _taken(stack: _Stack, count: int) -> tuple[_Stack, _Stack]:
    """The stack without its top, and the ``count`` entries there."""
    if count > len(stack):
        stack = (_NOTHING,) * (count - len(stack)) + stack
    return stack[: len(stack) - count], stack[len(stack) - count :]


def _merged(old: _Stack, new: _Stack) -> _Stack:
    """What the stack may have where two ways meet."""
    count = max(len(old), len(new))
    return tuple(one | other for one, other in zip(_taken(old, count)[1], _taken(new, count)[1], strict=True))


def _within(entry: _Entry) -> _Entry:
    """An item of what is there."""
    return frozenset(value.deeper() for value in entry if value.kind in ("held", "iterator"))


def _is_self(entry: _Entry) -> bool:
    return any(value.kind == "self" for value in entry)


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_Act = Callable[[_Follower, dis.Instruction, _Stack], _Stack]
_FAMILIES: tuple[tuple[_Act, tuple[str, ...]], ...] = (
    (_Follower._unknown, ("CALL_INTRINSIC",)),
    (_Follower._local, ("LOAD_FAST", "STORE_FAST")),
    (_Follower._truth, ("POP_JUMP_", "JUMP_IF_FALSE_", "JUMP_IF_TRUE_", "TO_BOOL", "UNARY_NOT")),
    (_Follower._load, ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")),
    (_Follower._attribute, ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")),
    (_Follower._constant, ("LOAD_CONST",)),
    (_Follower._call, (*_PAIRED, "CALL_FUNCTION")),
    (_Follower._slice, ("BUILD_SLICE", "BINARY_SLICE", "STORE_SLICE")),
    (_Follower._subscript, ("BINARY_SUBSCR",)),
    (_Follower._add, ("BINARY_OP", "INPLACE_ADD")),
    (_Follower._compare, ("CONTAINS_OP", "IS_OP")),
    (_Follower._iterate, ("GET_ITER", "FOR_ITER")),
    (_Follower._unpack, ("UNPACK_SEQUENCE",)),
    (_Follower._store, ("STORE_",)),
    (_Follower._delete, ("DELETE_SUBSCR",)),
    (_Follower._drop, ("POP_TOP", "DELETE_ATTR", "END_FOR")),
    (_Follower._keep, ("LIST_APPEND", "SET_ADD", "MAP_ADD", "LIST_EXTEND", "SET_UPDATE", "DICT_", "RETURN_VALUE")),
    (_Follower._move, ("COPY", "SWAP", "ROT_", "DUP_TOP")),
)
_ACTS: dict[str, _Act] = {
    name: next(act for act, starts in _FAMILIES if name.startswith(starts))
    for name in dis.opmap
    if any(name.startswith(starts) for _, starts in _FAMILIES)
}
