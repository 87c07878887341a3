"""Keyword options: give a function the fields and the documentation of an options dataclass, and check their values."""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_type_hints

from graphplan.errors import GraphPlanError, OptionError

P = ParamSpec("P")
First = TypeVar("First")
Taken = TypeVar("Taken")
Result = TypeVar("Result")
_ARGS = re.compile(r"^Args:\n((?: .*\n?)+)", re.MULTILINE)
_END = re.compile(r"^( *)(?:Returns|Raises):$", re.MULTILINE)


def is_count(value: Any, least: int = 1, kind: Any = int) -> bool:
    """Return True if ``value`` is a ``kind``, no bool, and at least ``least``."""
    return isinstance(value, kind) and not isinstance(value, bool) and value >= least


def is_bool(value: object) -> bool:
    """Return True for True and False."""
    return isinstance(value, bool)


Checks = tuple[tuple[str, Callable[[Any], bool], str], ...]
"""For each option: its name, a predicate for valid values, and a description of these."""


def check_values(options: Any, checks: Checks) -> None:
    """Raise OptionError for an option that fails its check."""
    for name, is_good, expected in checks:
        value = getattr(options, name)
        if not is_good(value):
            raise OptionError(f"{name} is {value!r}; expected {expected}")


class TakesOptionalFirst(Protocol[P]):
    """A function of options and of an optional first argument, which is missing in ``@decorator(option=...)``."""

    def __call__(self, fn: Callable[..., Any] | None = None, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call it."""


def takes(
    options: Callable[P, Taken],
) -> Callable[[Callable[[First, Taken], Result]], Callable[Concatenate[First, P], Result]]:
    """Return a decorator that turns a function of ``(first, options)`` into one of ``(first, *, fields of options)``.

    Args:
        options: a dataclass with keyword-only fields. The ``Args:`` entries of its docstring, and of those of its
            bases, are added to the function's docstring.
    """
    return lambda function: _taking(function, options)


def takes_optionally(options: Callable[P, Taken]) -> Callable[[Callable[[Any, Taken], Any]], TakesOptionalFirst[P]]:
    """Like :func:`takes`, but the first argument may be missing: the function then gets None."""
    return lambda function: _taking(function, options, default=None)


def _taking(function: Callable[..., Any], options: Any, default: Any = inspect.Parameter.empty) -> Any:
    fields = inspect.signature(options).parameters
    own = inspect.signature(function)
    first = next(iter(own.parameters.values())).replace(default=default)
    called = function.__qualname__.removesuffix(".__init__")
    signature = own.replace(parameters=[first, *fields.values()])

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        wrong = [name for name in kwargs if name not in signature.parameters]
        if wrong:
            close = difflib.get_close_matches(wrong[0], fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"options are {', '.join(fields)}"
            raise TypeError(f"{called} has no option {wrong[0]!r}: {hint}")
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{called}: {error}; options are passed by keyword") from None
        try:
            return function(bound.pop(first.name, first.default), options(**bound))
        except GraphPlanError as error:
            raise error.briefly()  # noqa: B904

    call.__signature__ = signature  # type: ignore[attr-defined]
    # Set the types themselves: their names in the signature are not defined in the function's own module.
    types = {**get_type_hints(options), **get_type_hints(function)}
    call.__annotations__ = {name: types[name] for name in (*signature.parameters, "return") if name in types}
    call.__doc__ = function.__doc__ and with_arguments(function.__doc__, options)
    return call


def with_arguments(doc: str, options: type) -> str:
    """Return ``doc`` with the ``Args:`` entries of ``options`` and its bases, before ``Returns:`` or ``Raises:``."""
    docs = [kind.__dict__.get("__doc__") or "" for kind in reversed(options.__mro__)]
    entries = [found[1].rstrip() for found in map(_ARGS.search, map(inspect.cleandoc, docs)) if found]
    end = _END.search(doc)
    assert end is not None, f"neither Returns: nor Raises: in {doc!r}"
    indent, before, after = end[1], doc[: end.start()].rstrip(), doc[end.start() :]
    section = "" if f"\n{indent}Args:\n" in before else f"\n\n{indent}Args:"
    return before + section + "\n" + textwrap.indent("\n".join(entries), indent) + "\n\n" + after
