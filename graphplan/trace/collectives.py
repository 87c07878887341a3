"""torch.distributed's operators: the arguments that they write, their process groups, and waiting for them.

Their schemas do not declare the writes, and the operators return before the writes are done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.utils import _pytree as pytree

_IN_PLACE = "c10d."
_FUNCTIONAL = "_c10d_functional."
_LATE = ("c10d._reduce_scatter_base_", "c10d.reduce_scatter_")
_CLASS = "__torch__.torch.classes.c10d."
_SILENT = {"fsdp.all_gather_copy_in.default": 1}
"""Operators around collectives that write an argument, by its position, which their schemas do not declare."""


def is_collective(name: str) -> bool:
    """Return True if the operator of that name communicates between processes."""
    return name.startswith((_IN_PLACE, _FUNCTIONAL))


def written_positions(name: str) -> tuple[int, ...]:
    """Return the positions of the arguments that a collective, or an operator that prepares one, writes."""
    return (_SILENT[name],) if name in _SILENT else (0,) if name.startswith(_IN_PLACE) else ()


def finish(name: str, out: Any) -> Any:
    """Return a collective's results for its caller. On a CPU, wait for reduce_scatter: gloo copies its result late."""
    if not name.startswith(_LATE):
        return out
    results = [value for value in pytree.tree_leaves(out) if isinstance(value, torch.Tensor)]
    if any(result.device.type != "cpu" for result in results):
        return out
    wait_for(name, out)
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(results)
    work = torch._C._distributed_c10d._create_work_from_future(done).boxed()  # type: ignore[attr-defined]
    return pytree.tree_map_only(torch.ScriptObject, lambda value: work, out)


def name_object(value: torch.ScriptObject) -> tuple[str, str]:
    """Return a comparable name for an object argument: torch wraps the object anew in each call."""
    kind = str(value._type())
    if kind == f"{_CLASS}ProcessGroup":
        return "ProcessGroup", str(distributed.ProcessGroup.unbox(value).group_name)
    return "object", kind


def wait_for(name: str, out: Any) -> None:
    """Wait until the collective operator ``name``, which returned ``out``, has written its results."""
    for value in pytree.tree_leaves(out):
        if isinstance(value, torch.ScriptObject) and str(value._type()) == f"{_CLASS}Work":
            distributed.Work.unbox(value).wait()
        elif isinstance(value, torch.Tensor) and name.startswith(_FUNCTIONAL):
            torch.ops._c10d_functional.wait_tensor(value)
