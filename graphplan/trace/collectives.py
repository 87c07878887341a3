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
_LATE = ("c10d._reduce_scatter_base_", "c10d.reduce_scatter_")
_CLASS = "__torch__.torch.classes.c10d."
_SILENT = {"fsdp.all_gather_copy_in.default": 1}
"""Operators around collectives that write an argument, by its position, without saying so."""


def is_collective(name: str) -> bool:
    """Whether an operator of that name communicates."""
    return name.startswith((_IN_PLACE, _FUNCTIONAL))


def written_positions(name: str) -> tuple[int, ...]:
    """Positions of the arguments that a collective, or an operator that prepares one, writes; none for others."""
    return (_SILENT[name],) if name in _SILENT else (0,) if name.startswith(_IN_PLACE) else ()


def finish(name: str, out: Any) -> Any:
    """A collective's results as its caller gets them. gloo copies late in a reduce_scatter, so that is awaited here."""
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
    """What identifies one of an operator's objects, which is wrapped anew for each call."""
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
