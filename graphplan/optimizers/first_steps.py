"""The step in which an optimizer makes its state, which it keeps for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graphplan.compare.fast_compare import register_own
from graphplan.errors import Faults
from graphplan.optimizers.preparation import around_closure

_SIZES = 16
"""Bytes that a first step may take for each of the parameters': three moments in double precision, and temporaries."""


@contextmanager
def within_first_steps(around: Callable[[int], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter ``around(nbytes)``, with more bytes than it will allocate, while an optimizer without state takes its own
    step in this thread, but not while the step's closure runs. A step that fails stays in it until the block ends.
    """
    thread, entered, faults = get_ident(), ExitStack(), Faults()
    stepping: list[torch.optim.Optimizer] = []

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A step may call that of its base class, or another optimizer's.
        if get_ident() != thread or stepping:
            return None
        with faults.noting():
            if not _has_state(optimizer):
                enter(optimizer)
                return around_closure(args, kwargs, leave, lambda: enter(optimizer))
        return None

    def enter(optimizer: torch.optim.Optimizer) -> None:
        entered.enter_context(around(_SIZES * _bytes_of(optimizer)))
        stepping.append(optimizer)

    def leave() -> None:
        stepping.clear()
        entered.close()

    def after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() == thread and stepping and stepping[0] is optimizer:
            leave()

    with ExitStack() as stack:
        stack.callback(leave)
        stack.callback(register_own(register_optimizer_step_pre_hook, before).remove)
        stack.callback(register_own(register_optimizer_step_post_hook, after).remove)
        yield
    faults.check()


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    # A look at the state of a parameter leaves an empty dictionary.
    return any(not isinstance(value, dict) or value for value in optimizer.state.values())


def _bytes_of(optimizer: torch.optim.Optimizer) -> int:
    return sum(param.nbytes for group in optimizer.param_groups for param in group["params"])
