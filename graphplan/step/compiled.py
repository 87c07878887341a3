"""Steps that run code which ``torch.compile`` compiled.

Under a dispatch mode such code runs uncompiled: with other roundings, and from some compilers other random numbers. So
a trace of it is a rehearsal, which is undone before the step is taken as it is. A CUDA graph records the compiled
kernels; the tape can only record the uncompiled operators, which is right where both come to the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphplan.compiler import is_allowed
from graphplan.errors import CaptureError
from graphplan.owners import Walk
from graphplan.verify.compare import differing
from graphplan.verify.state import State, collect

_HOOKED = "Using `torch.compile.module.` when there are global hooks on modules"
"""There are, to discover what a traced step uses, and nothing is compiled meanwhile."""


def runs_compiled(walk: Walk) -> bool:
    """Whether the owners hold a compiled module or function."""
    return any(map(_is_compiled_module, walk.modules)) or any(
        _is_compiled_function(scalar.get()) for scalar in walk.scalars.values()
    )


def _is_compiled_module(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or "dynamo_ctx" in vars(module)


def _is_compiled_function(value: Any) -> bool:
    # Functions that are exempt from compilation are wrapped alike.
    inner = getattr(value, "__dict__", None)
    return isinstance(inner, dict) and "_torchdynamo_orig_callable" in inner and not inner.get("_torchdynamo_disable")


@contextmanager
def uncompiled(walk: Walk) -> Iterator[None]:
    """Run compiled code as it was written: a compiler would look into the code that observes it."""
    if not runs_compiled(walk):
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", message=_HOOKED)
        yield


class Rehearsal:
    """What a step left that ran uncompiled, to compare with what it leaves compiled.

    Args:
        walk: the owners now.
        allow: paths that a replay may leave out.
    """

    def __init__(self, walk: Callable[[], Walk], result: Any, allow: Sequence[str]) -> None:
        self._walk = walk
        self._allow = allow
        self._left = self._state(result, copy=True)

    def _state(self, result: Any, *, copy: bool) -> State:
        return collect(self._walk(), result, {}, (), lambda path: is_allowed(path, self._allow), copy=copy)

    def check(self, result: Any) -> None:
        """Compare with what the step has left now.

        Raises:
            CaptureError: naming the first tensor that is not the same.
        """
        paths = differing(self._left.tensors, self._state(result, copy=False).tensors)
        if paths:
            raise CaptureError(
                f"the step runs code that torch.compile compiled, and the tape records what it is made of: that leaves "
                f"another {paths[0]} than the compiled code does. On the CPU, compile with backend='aot_eager' or not "
                "at all, or pass backend='eager'"
            )
