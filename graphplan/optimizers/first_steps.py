"""The step in which an optimizer makes its state, which it keeps for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graphplan.optimizers.preparation import with_closure
from graphplan.unchanged import register_own


@contextmanager
def within_first_steps(around: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter ``around()`` while an optimizer that has no state yet takes its own step in this thread, but not while the
    step's closure runs.
    """
    thread, entered = get_ident(), ExitStack()
    stepping: list[torch.optim.Optimizer] = []

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A step may call that of its base class, or another optimizer's.
        if get_ident() != thread or stepping or optimizer.state:
            return None
        stepping.append(optimizer)
        entered.enter_context(around())
        return with_closure(args, kwargs, outside)

    def outside(closure: Callable[[], Any]) -> Any:
        entered.close()
        loss = closure()
        entered.enter_context(around())
        return loss

    def after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() == thread and stepping == [optimizer]:
            stepping.clear()
            entered.close()

    with ExitStack() as stack:
        # A step that fails never comes to its end.
        stack.callback(entered.close)
        stack.callback(register_own(register_optimizer_step_pre_hook, before).remove)
        stack.callback(register_own(register_optimizer_step_post_hook, after).remove)
        yield
