"""The argument of the user's that has an installed package do what a trace refuses.

Where a package's code reads a tensor, or does anything else that cannot be replayed, it often does so under conditions
that an argument decides: ``momentum=None``, ``validate_args=True``. Such an argument is named if the line would not be
reached with another value of it, and if the user passes it: to the package's function that the user's line calls, from
where it is handed on by name, or to the constructor of the object that holds it.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

from graphplan.environment.origin import is_familiar, is_ours, is_users_file
from graphplan.observe.source import runs_steps
from graphplan.trace.conditions import (
    Condition,
    attribute_of,
    comparisons_at,
    conditions_of,
    is_plain,
    leaves_of,
    names_in,
    outcome,
    path_to,
    same,
    space_of,
    truth_in,
    value_of,
)
from graphplan.trace.host_reads import is_machinery

_RECEIVERS = ("self", "cls", "ctx")
_EQUAL = (ast.Is, ast.Eq, ast.LtE, ast.GtE)
_UNEQUAL = (ast.IsNot, ast.NotEq, ast.Lt, ast.Gt)
"""Comparisons that hold, or do not, where both sides are equal."""
_OPTIONAL = {"typing", "Optional", "Union", "None", "NoneType", "class"}
_BOTH = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class _Parameter(NamedTuple):
    name: str
    of: str
    """The function or class that it is passed to."""
    annotation: str

    @property
    def is_switch(self) -> bool:
        """It is declared to be a number, a string or a bool, or None."""
        words = set(re.findall(r"\w+", self.annotation)) - _OPTIONAL
        return bool(words) and words <= {"bool", "int", "float", "str"}


def explain(*, is_drawn: bool = False) -> str:
    """A sentence about why a package's code has come here, and the argument that decides it; empty where none does.
    ``is_drawn``: it reads how a random number compares with another one.
    """
    chain = _Chain(sys._getframe(1))
    for number, frame in enumerate(chain.frames):
        path = path_to(frame)
        said = [_explain_draw(chain, compare) for compare in (comparisons_at(path) if is_drawn and not number else [])]
        said += [_explain_condition(chain, number, condition) for condition in conditions_of(path) if not any(said)]
        if any(said):
            place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return f" {place} does so because {next(filter(None, said))}."
    return ""


def _explain_condition(chain: _Chain, number: int, condition: Condition) -> str:
    frame = chain.frames[number]
    truth = truth_in(frame)
    if outcome(condition.test, truth) is (not condition.outcome):
        return ""  # A variable has changed since.
    for leaf in leaves_of(condition.test):
        holds = truth(leaf)
        other = outcome(condition.test, lambda each: not holds if each is leaf else truth(each))  # noqa: B023
        if holds is not None and other is (not condition.outcome):
            for name in names_in(leaf):
                parameter = chain.parameter_of(number, name)
                said = "" if parameter is None else _say(leaf, holds, name, value_of(name, frame), parameter)
                if said:
                    return said
    return ""


def _explain_draw(chain: _Chain, compare: ast.Compare) -> str:
    """A number that random ones from 0 to 1 are below by chance is one that none is below if it is 0."""
    bound = compare.comparators[0] if isinstance(compare.ops[0], ast.Lt) else compare.left
    parameter = chain.parameter_of(0, bound) if isinstance(compare.ops[0], (ast.Lt, ast.Gt)) else None
    if parameter is None:
        return ""
    text, value = ast.unparse(bound), value_of(bound, chain.frames[0])
    return f"`{ast.unparse(compare)}` is drawn ({text} is {value!r}): pass `{parameter.name}=0.0` to {parameter.of}"


def _say(leaf: ast.expr, holds: bool, name: ast.expr, value: Any, parameter: _Parameter) -> str:
    wanted = _wanted(leaf, holds, name, value)
    if wanted is None and value is None and not parameter.is_switch:
        return ""  # An argument of another kind, which is missing.
    text = f"`{ast.unparse(leaf)}`"
    if leaf is name:
        text += f" is {value!r}"
    elif not holds:
        text = f"{text} is false ({ast.unparse(name)} is {value!r})"
    other = f"`{parameter.name}` other than None" if value is None else f"another `{parameter.name}`"
    return f"{text}: pass {other if wanted is None else f'`{parameter.name}={wanted}`'} to {parameter.of}"


def _wanted(leaf: ast.expr, holds: bool, name: ast.expr, value: Any) -> str | None:
    """A value that has ``leaf`` come out otherwise, where that is known."""
    if isinstance(leaf, ast.Compare) and leaf.left is name and isinstance(leaf.comparators[0], ast.Constant):
        decided = _EQUAL if not holds else _UNEQUAL
        if isinstance(leaf.ops[0], decided):
            return repr(leaf.comparators[0].value)
    if isinstance(value, bool):
        return repr(not value)
    return repr(type(value)(0)) if leaf is name and holds and isinstance(value, int | float) else None


class _Chain:
    """The frames of packages between the user's own and ``frame``, innermost first."""

    def __init__(self, frame: FrameType) -> None:
        self.frames: list[FrameType] = []
        around: FrameType | None = frame
        while around is not None and not runs_steps(around.f_code) and not is_users_file(around.f_code.co_filename):
            if not (is_ours(around.f_code.co_filename) or is_machinery(around)):
                self.frames.append(around)
            around = around.f_back
        self._is_users = around is not None and is_users_file(around.f_code.co_filename)

    def parameter_of(self, number: int, name: ast.expr) -> _Parameter | None:
        """The parameter by which the user passes what ``name`` is in the frame of that number."""
        frame = self.frames[number]
        value = value_of(name, frame)
        if not is_plain(value):
            return None
        if isinstance(name, ast.Name):
            return self._passed(number, name.id)
        if not isinstance(name, ast.Attribute):
            return None
        owner = value_of(name.value, frame)
        made_by = [at for at in range(number, len(self.frames)) if self._makes(at, owner)]
        names = dict.fromkeys((name.attr, name.attr.lstrip("_")))
        if made_by:
            return next(filter(None, (self._passed(at, each) for at in made_by for each in names)), None)
        # A configuration may have it under the same name.
        held = [thing for thing in space_of(owner).values() if same(attribute_of(thing, name.attr), value)]
        return next(filter(None, (_constructed_with(thing, each) for thing in (owner, *held) for each in names)), None)

    def _makes(self, number: int, owner: Any) -> bool:
        frame = self.frames[number]
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        return frame.f_code.co_name == "__init__" and bool(names) and frame.f_locals.get(names[0]) is owner

    def _passed(self, number: int, parameter: str) -> _Parameter | None:
        """What the user passes for a parameter of the function in the frame of that number, or hands on to it."""
        frame = self.frames[number]
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if parameter not in names and parameter not in _further(frame):
            return None
        around = number + 1
        # What takes any arguments hands them on as they are.
        while around < len(self.frames) and self.frames[around].f_code.co_flags & _BOTH == _BOTH:
            around += 1
        if around == len(self.frames):
            is_users = self._is_users or not is_familiar(code.co_filename)
            return _Parameter(parameter, _name_of(frame), _annotation(frame, parameter)) if is_users else None
        caller = self.frames[around]
        call = next(iter(path_to(caller)[::-1]), None)
        if not isinstance(call, ast.Call):
            return None
        given = _argument(call, code, parameter)
        if isinstance(given, (ast.Name, ast.Attribute)):
            value, handed = frame.f_locals.get(parameter), value_of(given, caller)
            return self.parameter_of(around, given) if same(value, handed) else None
        if given is None and any(keyword.arg is None for keyword in call.keywords) and parameter in _further(caller):
            return self._passed(around, parameter)
        return None


def _further(frame: FrameType) -> dict[str, Any]:
    """What a function was given by names that it does not spell out."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return {}
    last = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    found = frame.f_locals.get(code.co_varnames[last])
    return found if type(found) is dict else {}


def _argument(call: ast.Call, code: CodeType, parameter: str) -> ast.expr | None:
    """What ``call`` passes as a parameter of ``code``; None where it does not say."""
    for keyword in call.keywords:
        if keyword.arg == parameter:
            return keyword.value
    names = list(code.co_varnames[: code.co_argcount])
    if parameter not in names:
        return None
    place = names.index(parameter) - (names[0] in _RECEIVERS)
    before = call.args[: place + 1]
    return before[place] if len(before) > place and not any(isinstance(arg, ast.Starred) for arg in before) else None


def _annotation(frame: FrameType, parameter: str) -> str:
    functions = [node for node in path_to(frame) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in ast.walk(functions[-1].args) if functions else ():
        if isinstance(node, ast.arg) and node.arg == parameter and node.annotation is not None:
            return ast.unparse(node.annotation)
    return ""


def _constructed_with(owner: Any, parameter: str) -> _Parameter | None:
    """A parameter of the constructor of ``owner``, or of one that it hands on to what it does not know."""
    for base in type(owner).__mro__:
        init = inspect.unwrap(base.__dict__.get("__init__"))  # type: ignore[arg-type]
        code = getattr(init, "__code__", None)
        if code is None:
            continue
        if parameter in code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]:
            annotation = getattr(init, "__annotations__", {}).get(parameter, "")
            return _Parameter(parameter, type(owner).__name__, str(annotation))
        if not code.co_flags & inspect.CO_VARKEYWORDS:
            break
    return None


def _name_of(frame: FrameType) -> str:
    """What the user calls, or makes, the function in ``frame`` by."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] not in _RECEIVERS:
        return code.co_name
    receiver = frame.f_locals.get(code.co_varnames[0])
    kind = (receiver if isinstance(receiver, type) else type(receiver)).__name__
    if code.co_name in ("__call__", "forward"):
        return f"the call of {kind}"
    return kind if code.co_name == "__init__" else f"{kind}.{code.co_name}"
