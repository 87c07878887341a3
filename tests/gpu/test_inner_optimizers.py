"""Optimizers that a step makes on the device: replayed where torch steps them in a capture, else refused by name."""

from __future__ import annotations

from functools import partial

import pytest
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from graphplan import OptimizerError
from tests.devices import BACKEND, CUDA, assert_like_eager, needs_cuda, on_device
from tests.effects.test_made_in_step import DYING, Step, rig_of, step_of_reptile
from tests.twins import assert_refused

INNER: dict[str, Step] = {
    "SGD": DYING["SGD"],
    "SGD, momentum": DYING["SGD, momentum"],
    "Adagrad": step_of_reptile(partial(Adagrad, lr=0.1)),
    "Adam": step_of_reptile(partial(Adam, lr=0.1, capturable=CUDA)),
    "AdamW, fused": step_of_reptile(partial(AdamW, lr=0.1, fused=True, capturable=CUDA)),
    "RMSprop": step_of_reptile(partial(RMSprop, lr=0.01, capturable=CUDA)),
    "SGD, fused": step_of_reptile(partial(SGD, lr=0.1, fused=True)),
    "a copied optimizer": DYING["a copied optimizer"],
    "cycles": DYING["cycles"],
    "a checkpoint": DYING["a checkpoint"],
    "an average": DYING["an average"],
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.twice
def test_an_inner_optimizer_is_replayed(name: str) -> None:
    assert_like_eager(on_device(partial(rig_of, INNER[name])))


@needs_cuda
def test_an_inner_adam_that_is_not_capturable_is_refused() -> None:
    make = on_device(partial(rig_of, DYING["Adam"]))
    assert_refused(
        make,
        OptimizerError,
        r"the step creates an optimizer \(Adam\)",
        "create this one with capturable=True",
        backend=BACKEND,
    )
