"""CUDA graphs beyond what every torch shows: their nodes, sending them to the device early, the workspaces that they
use, options of a capture.

Nodes are read through CUDA's Python bindings (the package ``cuda-bindings``, which newer builds of torch bring along),
from a graph that torch was told to keep. A replay needs neither: what cannot be found out is said.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from graphplan.backends.backend import Node, Nodes

_TYPE = "CU_GRAPH_NODE_TYPE_"
_KERNEL = "Kernel"
_NO_BINDINGS = (
    "the graph's nodes are not known: CUDA's Python bindings are not installed, or this torch keeps no graphs; "
    "pip install cuda-bindings"
)


def bindings(part: str) -> ModuleType | None:
    """A part of CUDA's Python bindings, or None where these are not installed."""
    try:
        return import_module(f"cuda.bindings.{part}")
    except ImportError:
        return None


def new_graph() -> tuple[torch.cuda.CUDAGraph, bool]:
    """A graph to capture into, and whether its description is kept: then its nodes can be read, and it is instantiated
    later. A replay launches the same executable graph either way.
    """
    kept = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph") and _has_bindings()
    return (torch.cuda.CUDAGraph(keep_graph=True) if kept else torch.cuda.CUDAGraph()), kept


def _has_bindings() -> bool:
    """Whether CUDA's Python bindings are installed; to import them takes 20 ms and more."""
    try:
        return find_spec("cuda.bindings.driver") is not None
    except (ImportError, ValueError):
        # No package of that name, or another one.
        return False


def capture_options(begin: Callable[..., None], *, watched: bool) -> dict[str, Any]:
    """How a capture begins: with torch's watch over the tensors that it reads if that is wanted and ``begin`` can."""
    options: dict[str, Any] = {"capture_error_mode": "thread_local"}
    if watched and _takes(begin, "check_input_liveness"):
        options["check_input_liveness"] = True
    return options


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    try:
        return keyword in inspect.signature(function).parameters
    except ValueError:
        # Compiled functions may not tell.
        return False


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


def read_nodes(graph: torch.cuda.CUDAGraph, *, kept: bool) -> Nodes:
    """The nodes of a graph, if it was ``kept``."""
    driver = bindings("driver") if kept else None
    if driver is None:
        return Nodes(missing=_NO_BINDINGS)
    try:
        return _walk(driver, driver.CUgraph(graph.raw_cuda_graph()))
    except (_AskError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        # Another release of the bindings than is known here: a report goes on without them.
        return Nodes(missing=f"the graph's nodes are not known: CUDA's Python bindings could not tell ({error})")


class _AskError(Exception):
    """CUDA's answer was an error."""


def _ask(call: Any, *args: Any) -> Sequence[Any]:
    error, *answers = call(*args)
    if int(error) != 0:
        raise _AskError(f"{call.__name__}: {error}")
    return answers


def _walk(driver: Any, graph: Any) -> Nodes:
    number = int(_ask(driver.cuGraphGetNodes, graph, 0)[-1])
    handles = list(_ask(driver.cuGraphGetNodes, graph, number)[0])[:number] if number else []
    nodes = []
    for handle in handles:
        kind = _ask(driver.cuGraphNodeGetType, handle)[0].name
        words = kind.removeprefix(_TYPE).split("_")
        name = "".join(word.capitalize() for word in words)
        nodes.append(Node(name, _kernel_name(driver, handle) if name == _KERNEL else ""))
    named = not any(node.type == _KERNEL for node in nodes) or any(node.name for node in nodes)
    return Nodes(tuple(nodes), "" if named else "the kernels' names are not known: this driver does not tell them")


def _kernel_name(driver: Any, handle: Any) -> str:
    """A kernel's name as its source has it; empty where the driver does not tell."""
    try:
        params = _ask(driver.cuGraphKernelNodeGetParams, handle)[0]
        by_function = bool(int(params.func))
        call, kernel = (driver.cuFuncGetName, params.func) if by_function else (driver.cuKernelGetName, params.kern)
        found = _ask(call, kernel)[0]
    except (_AskError, AttributeError, TypeError, ValueError, RuntimeError):
        return ""
    name = found.decode() if isinstance(found, bytes) else str(found)
    demangle = getattr(torch._C, "_demangle", None)
    return str(demangle(name)) if demangle is not None else name
