"""Numbers that a step draws again, on the device: activation checkpointing with dropout, forks, states put back."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.gpu.helpers import CUDA, assert_like_eager, on_device
from tests.saved_states import STEPS, rig_of


@pytest.mark.parametrize("kind", STEPS)
def test_numbers_that_are_drawn_again(kind: str) -> None:
    assert_like_eager(on_device(partial(rig_of, STEPS[kind])), exact=True)


@pytest.mark.parametrize("kind", STEPS)
def test_the_host_draws_and_seeds_between_steps(kind: str) -> None:
    """Replays draw on from wherever the generator is, with its seed."""

    def after(index: int) -> None:
        torch.rand(3, device="cuda" if CUDA else "cpu")
        if index % 5 == 4:
            torch.manual_seed(index)

    assert_like_eager(on_device(partial(rig_of, STEPS[kind], after)), exact=True)
