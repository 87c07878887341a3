"""Python's garbage collector stays out of traces, captures and checks, and is left as it was."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

from graphplan import graph_step
from graphplan.environment.collector import no_collections
from graphplan.step.replays import Replays
from graphplan.step.stages import Stages
from tests.models import descent


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Whatever a test does to the collector ends with it."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_come_back() -> None:
    gc.set_threshold(500, 5, 6)
    with pytest.raises(RuntimeError, match="left early"), no_collections():
        assert gc.get_threshold()[0] > 10**7
        with no_collections():
            pass
        assert gc.get_threshold()[0] > 10**7
        assert gc.isenabled()
        raise RuntimeError("left early")
    assert gc.get_threshold()[:2] == (500, 5)


def test_what_somebody_sets_meanwhile_stays() -> None:
    with no_collections():
        gc.set_threshold(50, 5, 6)
    assert gc.get_threshold()[:2] == (50, 5)


def test_a_collector_that_never_runs_by_itself_is_left_alone() -> None:
    gc.set_threshold(0)
    with no_collections():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0


LONG = {Stages.advance.__code__, Stages.warm_up.__code__, Replays.check.__code__}


def _within(codes: set[CodeType]) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


@pytest.mark.twice
def test_no_collection_on_the_way_to_a_program_or_in_a_check() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    step: Any = descent(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda x: model(x).square().mean())
    graphed = graph_step(step, owners=step.owners, backend="tape", verify=1)
    found: list[bool] = []
    note = lambda phase, info: found.append(_within(LONG))  # noqa: E731
    gc.callbacks.append(note)
    gc.set_threshold(20, 2, 2)
    try:
        for number in range(12):
            graphed(torch.full((2, 8), float(number)))
    finally:
        gc.callbacks.remove(note)
    assert (graphed.stats.captured, graphed.stats.verified) == (1, 6)
    assert found, "the collector was at work between"
    assert not any(found)
