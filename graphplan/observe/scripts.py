"""Calls of scripted code: it makes tensors of Python's numbers where no dispatcher sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.tensors.storages import storage_id

_KINDS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)


class _Here(local):
    """What the scripted code that a thread runs was given, the innermost call last."""

    def __init__(self) -> None:
        self.given: list[set[int | None]] = []


_HERE = _Here()


def given_to_script() -> set[int | None] | None:
    """The storages of the tensors that scripted code which runs in this thread was given; None if none runs."""
    return _HERE.given[-1] if _HERE.given else None


def watched_calls() -> list[tuple[Any, str, Any]]:
    """Replacements that note calls of scripted code."""
    return [(kind, "__call__", _calling(kind.__call__)) for kind in _KINDS]


def _calling(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def calling(script: Any, /, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        _HERE.given.append({storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)})
        try:
            return call(script, *args, **kwargs)
        finally:
            _HERE.given.pop()

    return calling
