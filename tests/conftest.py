"""Settings that every test runs under, and the check that no test leaves anything installed."""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from graphplan.step import planner, programs
from graphplan.step.options import Options
from graphplan.verify import schedule
from tests import devices
from tests.addresses import insist
from tests.twins import assert_equals_eager

# Builds of the guards that the first capture begins would take the time of the tests.
os.environ.setdefault("GRAPHPLAN_NATIVE", "found")
_MONITORING: Any = getattr(sys, "monitoring", None)
LONG = ("test_distributed.py", "test_soak.py", "test_properties.py")
"""Files with tests or fixtures of half a minute: begun first, so that at the end no process waits for another one's."""
BEGUN = time.perf_counter()
GPU = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add where shared tests run, and what ``make test`` says of its own time."""
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="where tests run that do on both")
    parser.addoption("--cpu", action="store_true", help="rehearse tests/gpu and --device cuda on the CPU and the tape")
    parser.addoption("--soak", action="store_true", help="run what is left to make soak, and nothing else")
    parser.addoption("--bar", type=float, metavar="SECONDS", help="how long this run may take on two idle cores")


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known, and CUDA's kernels repeatable."""
    config.addinivalue_line("markers", "gated: replays have to be faster than eager steps, or the step stands down")
    config.addinivalue_line("markers", "frugal: further programs wait until replays have saved what others took")
    config.addinivalue_line("markers", "twice: steps are traced twice, also where one trace is enough")
    config.addinivalue_line("markers", "soak: left to make soak; docs/tests.md has what holds the same promise")
    config.addinivalue_line("markers", "crossed(every, start=0): the cases but each of these are left to make soak")
    # cuBLAS reads it when its first handle is made; without it two runs of one matrix product may differ.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the long tests first; for a GPU only those that need it or run on both devices."""
    items.sort(key=lambda item: item.path.name not in LONG)
    if config.getoption("--device") == "cpu":
        _select(config, items, _left_to_soak(items))
    else:
        kept = [item for item in items if GPU in item.path.parents or "device" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _select(config: pytest.Config, items: list[pytest.Item], left: set[pytest.Item]) -> None:
    """Leave out what is ``left`` to ``make soak``, or all else for that; a test that is named is run."""
    if not any("::" in argument for argument in config.args):
        soak = config.getoption("--soak")
        config.hook.pytest_deselected(items=[item for item in items if (item in left) is not soak])
        items[:] = [item for item in items if (item in left) is soak]


def _left_to_soak(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests that ``make test`` leaves out: those with the mark ``soak``, and of ``crossed(n)`` all but each nth."""
    left, counts = set(), Counter[str]()
    for item in items:
        name, crossed = item.nodeid.split("[")[0], item.get_closest_marker("crossed")
        every, start = (*crossed.args, 0)[:2] if crossed is not None else (1, 0)
        if item.get_closest_marker("soak") or counts[name] % every != start:
            left.add(item)
        counts[name] += 1
    return left


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how long the run took, and how long it may take."""
    bar = config.getoption("--bar")
    if bar is not None:
        took = time.perf_counter() - BEGUN
        verdict = "within" if took <= bar else "over"
        terminalreporter.write_line(f"{took:.0f} s, {verdict} the bar of {bar:.0f} s on two idle cores")


def pytest_collection_finish() -> None:
    """Leave everything that was imported out of collections of garbage: many tests ask for one."""
    gc.collect()
    gc.freeze()


def _installed() -> dict[str, object]:
    """What graphplan could leave behind in the process."""
    return {
        "forward hooks": len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks),
        "optimizer hooks": len(optimizers._global_optimizer_pre_hooks) + len(optimizers._global_optimizer_post_hooks),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "profile function": sys.getprofile(),
        "monitors": [_MONITORING.get_tool(number) for number in range(6)] if _MONITORING is not None else [],
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
    }


@pytest.fixture(autouse=True)
def thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replays are checked as often as the schedule says, however busy the machine is."""
    monkeypatch.setattr(schedule, "FREE", math.inf)
    monkeypatch.setattr(schedule, "STEPS", math.inf)


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    """Run on one thread from a fixed seed, and fail a test that leaves hooks, modes or settings behind."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = _installed()
    yield
    assert _installed() == before


@pytest.fixture(autouse=True, scope="session")
def _fixed_addresses() -> Iterator[None]:
    """The tape would follow memory that moves, and a CUDA graph would not."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        insist(monkeypatch)
        yield


@pytest.fixture(autouse=True)
def _deterministic_flag_goes_back() -> Iterator[None]:
    """``Trainer(deterministic=True)`` sets torch's global flag and leaves it; libraries choose other kernels by it."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test runs: the CPU, or a GPU with ``--device cuda``, which runs the tests that ask for it."""
    if request.config.getoption("--device") == "cpu":
        return torch.device("cpu")
    request.getfixturevalue("ungated")
    request.getfixturevalue("repeatable")
    return devices.DEVICE


@pytest.fixture
def backend(device: torch.device) -> str:
    """The backend of the device."""
    return "tape" if device.type == "cpu" else "cudagraph"


@pytest.fixture
def equals_eager(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., Any]:
    """``equals_eager(make_rig)`` checks a rig against its eager twin on the device, and returns the step. ``exact``:
    two eager runs are expected to agree in every bit, as they always do on the CPU.
    """
    if request.config.getoption("--device") == "cpu":
        return lambda make, *, exact=False, **options: assert_equals_eager(make, **options)
    return lambda make, **options: devices.assert_like_eager(devices.on_device(make), **options)[0]


@pytest.fixture
def ungated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test says otherwise, ``min_speedup`` is 0: the first steps are not timed, and programs are kept, however
    busy the device is with other tests.
    """
    if request.node.get_closest_marker("gated") is None:
        monkeypatch.setattr(Options, "least_speedup", lambda options, device: options.min_speedup or 0.0)


@pytest.fixture(autouse=True)
def undelayed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test says otherwise, no program waits for what others save: tests have few replays."""
    if request.node.get_closest_marker("frugal") is None:
        monkeypatch.setattr(programs, "_ALLOWANCE", math.inf)


@pytest.fixture(autouse=True)
def traced_twice(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a test says so, all steps are traced twice: replays begin with the same call, and what two traces tell
    apart is found there, not by the check of the first replay.
    """
    token = planner.ALWAYS_TWO_TRACES.set(request.node.get_closest_marker("twice") is not None)
    yield
    planner.ALWAYS_TWO_TRACES.reset(token)


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Ask for deterministic kernels, and let no test's memory live on into the next."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filling
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
