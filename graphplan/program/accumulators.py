"""What autograd adds gradients up with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed

from graphplan.compare.fast_compare import accumulator_hooks
from graphplan.tensors.attributes import PLAIN_KINDS


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
        if not (param.requires_grad and param.is_leaf and type(param.data) in PLAIN_KINDS) or accumulator_hooks(
            [("", param)]
        ):
            continue
        data = param.data
        other = torch.float32 if data.dtype != torch.float32 else torch.float64
        param.data = torch.empty(0, dtype=other, device=data.device)
        param.data = data
