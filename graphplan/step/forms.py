"""Functions that cannot be a step, whatever they compute: those that only begin when they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from graphplan.errors import OptionError

_FORMS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("a coroutine function (async def)", inspect.iscoroutinefunction),
    ("an asynchronous generator function (async def with yield)", inspect.isasyncgenfunction),
    ("a generator function (with yield)", inspect.isgeneratorfunction),
)


def check_form(fn: Callable[..., Any]) -> None:
    """Refuse a function whose call gives something that is yet to run, with which a replay has nothing to do.

    Raises:
        OptionError: naming it.
    """
    while isinstance(fn, partial):
        fn = fn.func
    # What runs when an object is called is a method of its class.
    call = fn.forward if isinstance(fn, nn.Module) else type(fn).__call__ if callable(fn) else None
    for form, asks in _FORMS:
        if asks(fn) or asks(call):
            name = getattr(fn, "__qualname__", type(fn).__qualname__)
            raise OptionError(
                f"{name} is {form}: a call of it computes nothing yet, and what it gives back can be run once only, so "
                "that there is nothing to replay. Expected a function that computes and returns: graph the synchronous "
                "one that does the computing, and await, or yield, around its calls"
            )
