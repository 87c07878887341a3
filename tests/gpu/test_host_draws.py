"""A step on the device that draws on the host: replays draw as often, from the same generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan import VerifyError, graph_step
from tests.devices import BACKEND, CUDA, DEVICE, needs_cuda
from tests.trace.test_host_draws import training


def _states(owners: dict[str, Any], generator: torch.Generator) -> list[Tensor]:
    device = [torch.cuda.get_rng_state(DEVICE)] if CUDA else []
    return [torch.get_rng_state(), generator.get_state(), *device, *owners["model"].state_dict().values()]


def test_layers_that_are_never_left_out() -> None:
    """Numbers and all generators after each call as in eager; other draws of the host go on between the calls."""
    runs = []
    for replays in (False, True):
        generator = torch.Generator().manual_seed(3)
        step, owners = training(0.0, DEVICE, generator)
        fast: Callable[[Tensor], Tensor] = step
        if replays:
            fast = graph_step(step, owners=owners, backend=BACKEND, verify=3)
        torch.manual_seed(1)
        run: list[Tensor] = []
        for _ in range(14):
            run.append(fast(torch.randn(5, 4).to(DEVICE)))
            run += [state.clone() for state in _states(owners, generator)]
        runs.append(run)
    assert [torch.equal(one, other) for one, other in zip(*runs, strict=True)] == [True] * len(runs[0])
    assert fast.stats.replayed == 8  # type: ignore[attr-defined]
    assert fast.stats.verified > 0  # type: ignore[attr-defined]


@needs_cuda
def test_a_draw_of_the_host_that_matters_is_found() -> None:
    """What it made is returned, and a replay would return the same for ever."""

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.rand(2)

    fast = graph_step(step, backend=BACKEND)
    with pytest.raises(VerifyError, match=r"random generator|result"):
        for _ in range(10):
            fast(torch.ones(2, device=DEVICE))
