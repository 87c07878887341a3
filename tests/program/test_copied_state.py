"""A policy that copies state in before each replay, and back after it: the same numbers as with adopted state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from graphplan import Policy
from tests.effects.test_carries import CARRIES, functional_rig, recurrent_rig
from tests.failure_modes.test_rows_23_29 import accumulating_rig
from tests.models import training_rig, updating_rig
from tests.optimizers.test_gradient_scaler import MAKERS, prepared, scaled_rig
from tests.step.test_step_forms import mlp_rig
from tests.twins import Rig, assert_same_as_eager

COPIED = Policy("train", static_roles=("input", "param", "state"), copy_roles=("input", "state"))
RIGS: dict[str, Callable[[], Rig]] = {
    **{f"carry: {name}": partial(updating_rig, *parts) for name, parts in CARRIES.items()},
    "moments and statistics": partial(training_rig, "mlp", "adamw", sizes=(8,) * 20),
    "a scaler": partial(scaled_rig, prepared(MAKERS["adamw"])),
    "gradients that accumulate": partial(mlp_rig, zero="never"),
    "micro-batches, zeroed in place": partial(accumulating_rig, set_to_none=False),
    "micro-batches, dropped": partial(accumulating_rig, set_to_none=True),
    "a tuple of hidden states": partial(recurrent_rig, 5),
    "a functional optimizer": functional_rig,
}


@pytest.mark.parametrize("name", RIGS)
@pytest.mark.crossed(2)
def test_state_that_is_copied(name: str) -> None:
    """From the call that captures on; what cannot be swapped for a copy (gradients, tuples) is adopted."""
    step = assert_same_as_eager(RIGS[name], policy=COPIED, verify="off")
    assert step.stats.replayed > 0
