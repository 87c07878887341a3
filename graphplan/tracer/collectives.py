"""torch.distributed's operators: what they write, in which group they run, and waiting for them.

Their schemas do not say what they write, and they return before it is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.utils import _pytree as pytree

_IN_PLACE = "c10d."
_FUNCTIONAL = "_c10d_functional."
_CLASS = "__torch__.torch.classes.c10d."


def is_collective(name: str) -> bool:
    """Whether an operator of that name communicates."""
    return name.startswith((_IN_PLACE, _FUNCTIONAL))


def written_argument(name: str, args: Any) -> Any:
    """The argument that an in-place collective writes: its first one, of tensors or of results. None for others."""
    return args[0] if name.startswith(_IN_PLACE) and args else None


def name_object(value: torch.ScriptObject) -> tuple[str, str]:
    """What one of an operator's objects is: it is wrapped anew for each call, a process group has a name."""
    kind = str(value._type())
    if kind == f"{_CLASS}ProcessGroup":
        return "ProcessGroup", str(distributed.ProcessGroup.unbox(value).group_name)
    return "object", kind


def wait_for(name: str, out: Any) -> None:
    """Wait until a collective that was called as operator has written its results."""
    for value in pytree.tree_leaves(out):
        if isinstance(value, torch.ScriptObject) and str(value._type()) == f"{_CLASS}Work":
            distributed.Work.unbox(value).wait()
        elif isinstance(value, torch.Tensor) and name.startswith(_FUNCTIONAL):
            torch.ops._c10d_functional.wait_tensor(value)
