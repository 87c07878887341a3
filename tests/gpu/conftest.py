"""Collects these tests only where they can run, and makes CUDA's kernels repeatable while they do.

``python -m pytest tests/gpu --cpu`` runs on the CPU and the tape what does not need CUDA: a rehearsal of the tests
themselves.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphplan.step.options import Options
from graphplan.verify import schedule

# cuBLAS reads it when its first handle is made; without it two runs of one matrix product may differ.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch for a rehearsal on the CPU."""
    parser.addoption("--cpu", action="store_true", help="run tests/gpu on the CPU with the tape backend")


def _wanted(config: pytest.Config) -> bool:
    return torch.cuda.is_available() or bool(config.getoption("--cpu", default=False))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder's tests out where no CUDA device is."""
    return None if _wanted(config) else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say why nothing of this folder ran."""
    if not _wanted(config):
        terminalreporter.write_line("tests/gpu: not collected: torch sees no CUDA device")


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", "gated: replays have to be faster than eager steps, or the step stands down")


@pytest.fixture(autouse=True)
def ungated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test says otherwise, ``min_speedup`` is 0: the first steps are not timed, and programs are kept, however
    busy the device is with other tests.
    """
    if request.node.get_closest_marker("gated") is None:
        monkeypatch.setattr(Options, "least_speedup", lambda options, device: options.min_speedup or 0.0)


@pytest.fixture(autouse=True)
def thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replays are checked as often as they come, however long the first use of a kernel takes."""
    monkeypatch.setattr(schedule, "FREE", math.inf)


@pytest.fixture(autouse=True)
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
