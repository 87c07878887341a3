"""What autograd adds gradients up with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from graphplan.compare.fast_compare import register_own
from graphplan.tensors.attributes import PLAIN_KINDS, has_memory


def renew_accumulators(params: Iterable[Tensor]) -> None:
    """Have the next forward pass make the ``AccumulateGrad`` nodes of ``params`` anew, on its own stream.

    A node remembers the stream on which it was made, and lives as long as any graph that has it: that of a loss which a
    metric keeps, say. A capture could not wait for that stream. torch lets go of the node where ``param.data`` is set
    to a tensor of another dtype (``VariableHooks::set_data``).

    Hooks of tensors stay. Those of the node itself would be lost: a node that has some stays, and so do all in a
    process group, since ``DistributedDataParallel`` has hooks in C++, which no Python code can ask for.
    """
    if distributed.is_available() and distributed.is_initialized():
        return
    for param in params:
        is_plain = param.requires_grad and param.is_leaf and not param.is_inference()
        if is_plain and type(param.data) in PLAIN_KINDS and has_memory(param) and not _has_hooks(param):
            data = param.data
            other = torch.float32 if data.dtype != torch.float32 else torch.float64
            param.data = torch.empty(0, dtype=other, device=data.device)
            param.data = data


def _has_hooks(param: Tensor) -> bool:
    # A dispatch mode of the caller's watches the step, and this is no part of it.
    with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableTorchDispatch():
        node: Any = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    for register in (node.register_hook, node.register_prehook):
        # A node shows its hooks to those alone that register one.
        handle = register_own(register, lambda *args: None)
        handle.remove()
        if handle.hooks_dict_ref():
            return True
    return False
