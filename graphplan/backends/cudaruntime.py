"""What CUDA is asked for beside torch: to send graphs to the device early, and to forget workspaces."""

from __future__ import annotations

import ctypes
import sys

import torch


def upload(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> bool:
    """Send the executable graph to the device now. If not (False), the first replay takes microseconds more."""
    driver, handle = _driver_library(), getattr(graph, "raw_cuda_graph_exec", None)
    if driver is None or handle is None:
        return False
    # The runtime's executable graphs and streams are the driver's.
    error: int = driver.cuGraphUpload(ctypes.c_void_p(handle()), ctypes.c_void_p(stream.cuda_stream))
    return error == 0


def _driver_library() -> ctypes.CDLL | None:
    """CUDA's driver, which the process has loaded. Its Python bindings take 60 ms to import."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def forget_workspaces() -> None:
    """Have torch free each stream's cuBLAS workspace, and make a new one when it is next needed.

    A graph has its address, and newer releases free it with the first graph of that stream that is destroyed, while
    others still replay. What is made anew in a capture lies in that capture's own memory, which stays for as long as
    the graph.
    """
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if forget is not None:
        forget()
