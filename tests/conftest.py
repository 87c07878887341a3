"""Settings that every test runs under, and the check that no test leaves anything installed."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from graphplan.verify import schedule
from tests.addresses import insist

# Builds of the guards that the first capture begins would take the time of the tests.
os.environ.setdefault("GRAPHPLAN_NATIVE", "found")
_MONITORING: Any = getattr(sys, "monitoring", None)
LONG = ("test_soak.py", "test_properties.py")
"""Files with tests of a minute: begun first, so that at the end no process waits for another one's."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long tests first."""
    items.sort(key=lambda item: item.path.name not in LONG)


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
