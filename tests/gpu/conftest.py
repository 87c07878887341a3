"""Collects these tests only where they can run, and makes CUDA's kernels repeatable while they do.

``python -m pytest tests/gpu --cpu`` runs on the CPU and the tape what does not need CUDA: a rehearsal of the tests
themselves.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def _wanted(config: pytest.Config) -> bool:
    return torch.cuda.is_available() or bool(config.getoption("--cpu"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder's tests out where no CUDA device is."""
    return None if _wanted(config) else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say why nothing of this folder ran."""
    if not _wanted(config):
        terminalreporter.write_line("tests/gpu: not collected: torch sees no CUDA device")


@pytest.fixture(autouse=True)
def _as_on_a_device(ungated: None, repeatable: None) -> None:
    """What every test here runs under."""
