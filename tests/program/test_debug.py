"""``debug=True`` has torch watch what a CUDA graph reads, where torch can; found out from what torch's own code says.

What it finds on a device is in tests/gpu/test_debug.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphplan import DeviceFault
from graphplan.backends.cudagraph import GraphRecording
from graphplan.backends.cudaruntime import capture_options

BEGIN = torch.cuda.CUDAGraph.capture_begin
PLAIN = {"capture_error_mode": "thread_local"}
WATCHED = PLAIN | {"check_input_liveness": True}


def _without(pool: Any = None, capture_error_mode: str = "global") -> None: ...


def _with(pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("begin", "expected"),
    # The last one is compiled, and has no signature that Python could read.
    [(_without, PLAIN), (_with, WATCHED), (torch.add, PLAIN)],
)
def test_the_keyword_goes_only_to_who_takes_it(begin: Callable[..., Any], expected: dict[str, Any]) -> None:
    """A torch without the parameter is called as ever."""
    assert capture_options(begin, watched=True) == expected
    assert capture_options(begin, watched=False) == PLAIN


def test_a_function_without_a_signature_is_one() -> None:
    """The case above is what it says."""
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(torch.add)


def test_this_torch_takes_what_it_is_given() -> None:
    """The probe agrees with torch's code, and torch's method can be called with its answer."""
    code = BEGIN.__code__
    takes = "check_input_liveness" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    options = capture_options(BEGIN, watched=True)
    assert options == (WATCHED if takes else PLAIN)
    bound = inspect.signature(BEGIN).bind(None, pool=None, **options)
    assert bound.arguments["capture_error_mode"] == "thread_local"


def _after(check: Callable[[], None], watched: str | None) -> GraphRecording:
    """A recording of a graph that does nothing but ``check`` before a launch."""
    graph: Any = SimpleNamespace(replay=check)
    return GraphRecording(graph, torch.device("cpu"), 0, watched)


def _dead_tensor() -> Callable[[], None]:
    """torch's own check of a tensor that was freed."""
    debug = pytest.importorskip("torch.utils._cuda_debug", reason="this torch watches no inputs")
    tracker = debug._CUDAGraphInputLivenessTracker()
    tensor = torch.ones(4)
    tracker.track_external_input(tensor)
    tracker.check_alive((0, 0))
    return lambda: tracker.check_alive((0, 0))


def test_a_dead_tensor_names_the_program() -> None:
    """torch's own error, for a tensor that was freed, becomes ours; its tracebacks stay with it."""
    match = (
        r"a replay of the program of f \(fed x\) would read memory that was freed: .*1 dead tensor\(s\)\. Expected "
        r"every tensor.*live as long as its program.*Hold it on an owner, or feed it"
    )
    with pytest.raises(DeviceFault, match=match) as caught:
        _after(_dead_tensor(), "the program of f (fed x)").replay()
    assert "Deletion Traceback" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="dead tensor") as plain:
        _after(_dead_tensor(), None).replay()
    assert not isinstance(plain.value, DeviceFault)


def test_other_errors_of_a_launch_come_out_as_they_are() -> None:
    """A device that failed elsewhere is not blamed on the program."""

    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        _after(fail, "the program of f").replay()
    assert not isinstance(caught.value, DeviceFault)
