"""Renewal of the ``AccumulateGrad`` nodes with which autograd accumulates gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from graphplan.compare.fast_compare import register_own
from graphplan.tensors.attributes import PLAIN_KINDS, has_memory


def renew_accumulators(params: Iterable[Tensor]) -> None:
    """Drop the ``AccumulateGrad`` nodes of ``params``, so that the next forward pass makes new ones on its own stream.

    A node stores the stream on which it was made, and lives as long as any autograd graph that contains it, such as
    that of a loss that a metric keeps. A capture cannot wait for that stream. torch releases the node when
    ``param.data`` is set to a tensor of another dtype (``VariableHooks::set_data``).

    Tensor hooks survive. Hooks of the node would be lost, so a node with hooks stays. In a process group all nodes
    stay, since ``DistributedDataParallel`` has hooks in C++ that Python code cannot see.
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
    # Hide this from the caller's dispatch mode: it is not part of the step.
    with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableTorchDispatch():
        node: Any = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    for register in (node.register_hook, node.register_prehook):
        # Only the handle of a registered hook gives access to the node's other hooks.
        handle = register_own(register, lambda *args: None)
        handle.remove()
        if handle.hooks_dict_ref():
            return True
    return False
