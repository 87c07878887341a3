"""Memory that work of one CUDA stream has filled, and that another one reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphplan.environment.surroundings import surroundings
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.dtensors import local
from graphplan.tensors.trees import flatten_result


def lend(result: Any, stream: Any, device: torch.device) -> None:
    """Keep the memory of ``result`` on ``device`` from being used again before ``stream`` is done with it.

    An eager call's result is the capture stream's, whose next step waits for its own caller alone. Under a mode or a
    transform of the caller's it is left alone: that would see this, or fail.
    """
    if surroundings() is not None:
        return
    for tensor in (local(leaf) for leaf in flatten_result(result)[0] if isinstance(leaf, Tensor)):
        if type(tensor) in PLAIN_KINDS and tensor.device == device and tensor.layout is torch.strided:
            # Not the tensor itself: of one that is marked as conjugated torch would record a copy.
            memory = torch.empty(0, dtype=torch.uint8, device=device)
            memory.set_(tensor.untyped_storage()).record_stream(stream)
