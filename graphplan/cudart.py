"""What CUDA's runtime can do with a graph and torch does not offer, where its Python bindings are installed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


def runtime() -> Any | None:
    """CUDA's runtime, or None without its bindings for Python."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    return runtime


def upload(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> bool:
    """Send the executable graph to the device now, so that the first replay does not pay for it; whether that was done.

    An upload that is not done costs the first replay some microseconds and nothing else.
    """
    cudart, handle = runtime(), getattr(graph, "raw_cuda_graph_exec", None)
    if cudart is None or handle is None:
        return False
    (error,) = cudart.cudaGraphUpload(cudart.cudaGraphExec_t(handle()), cudart.cudaStream_t(stream.cuda_stream))
    return bool(error == cudart.cudaError_t.cudaSuccess)


def count_nodes(graph: torch.cuda.CUDAGraph) -> dict[str, int]:
    """A kept graph's nodes by type; empty where CUDA's Python bindings are not installed."""
    cudart = runtime()
    if cudart is None:
        return {}
    handle = cudart.cudaGraph_t(graph.raw_cuda_graph())
    _, _, number = cudart.cudaGraphGetNodes(handle, 0)
    _, nodes, _ = cudart.cudaGraphGetNodes(handle, number)
    kinds = [cudart.cudaGraphNodeGetType(node)[1] for node in nodes[:number]]
    return dict(Counter(kind.name.removeprefix("cudaGraphNodeType") for kind in kinds))
