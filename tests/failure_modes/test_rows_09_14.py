"""Rows 9 to 14: what is fed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import NotCapturedError, UnownedTensorError
from tests.failure_modes.naive import WHEN, Normless, assert_handled, changing_rig, loss_of, naive, stay
from tests.models import Hidden, Memory, float_batches
from tests.twins import BEFORE_REPLAY, SECOND_TRACE, Rig, assert_equals_eager, assert_refused, build, drive, managed


def sized(last: int) -> list[Any]:
    """Batches of six, the last four of which are smaller."""
    return [(x[:last], y[:last]) if index > 19 else (x, y) for index, (x, y) in enumerate(float_batches(24))]


def test_row_09_smaller_last_batch() -> None:
    """Another size runs eagerly until it has a program of its own; a copy into the larger input cannot work."""
    make = partial(changing_rig, stay, calls=sized(4))
    assert_equals_eager(make, captured=2, replayed=20 - BEFORE_REPLAY)
    rig = build(make)
    with pytest.raises(RuntimeError, match="must match"):
        drive(rig, naive(rig.step))


def test_row_10_last_batch_of_one() -> None:
    """A batch of one would be broadcast over the whole static input."""
    assert_handled(partial(changing_rig, stay, make_model=Normless, calls=sized(1)), replayed=14)


def _scaled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model, (x / 3).float(), y)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_row_11_dtype_changed(dtype: torch.dtype) -> None:
    """A ``copy_`` into the static input would cast; another dtype is another signature."""
    calls = [(x.to(dtype) if index < WHEN else x.double() * 0.77, y) for index, (x, y) in enumerate(float_batches(24))]
    assert_handled(partial(changing_rig, stay, _scaled, calls=calls))


def _masked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"] * batch["mask"] if "mask" in batch else batch["x"]
    return loss_of(model, x, batch["y"])


def test_row_12_batch_key_missing() -> None:
    """Without its mask the batch has another structure; the mask of an earlier batch must not be used."""
    calls = [({"x": x, "y": y, "mask": (x > 0).float()},) for x, y in float_batches(24)]
    for (batch,) in calls[WHEN:]:
        del batch["mask"]
    assert_handled(partial(changing_rig, stay, _masked, calls=calls), replayed=12)


def _power(model: nn.Module, x: Tensor, y: Tensor, power: float) -> Tensor:
    return loss_of(model, x, y) * power


def test_row_13_python_value_changed() -> None:
    """Numbers in the arguments are part of the signature: each value has a program."""
    calls = [(x, y, (0.5, 2.0)[index % 2]) for index, (x, y) in enumerate(float_batches(40))]
    assert assert_handled(partial(changing_rig, stay, _power, calls=calls), replayed=28).stats.captured == 2


@pytest.mark.twice
def test_row_13_python_value_that_never_repeats() -> None:
    """A file name in each batch: one program if no step reads it, else no signature repeats, which is said."""
    calls = [(x, y, f"{index}.png") for index, (x, y) in enumerate(float_batches(120))]
    unread = managed(build(partial(changing_rig, stay, lambda model, x, y, name: loss_of(model, x, y), calls=calls)))
    for args in calls:
        unread(*args)
    assert (unread.stats.captured, unread.stats.replayed) == (1, 120 - BEFORE_REPLAY - 1)
    rig = build(partial(changing_rig, stay, lambda model, x, y, name: loss_of(model, x, y) * len(name), calls=calls))
    with pytest.raises(NotCapturedError, match="Python values"):
        drive(rig, managed(rig))


def held_rig(held: Any) -> Rig:
    """A step that finds its batch on an object, where the caller puts a new tensor before each call."""
    rig = changing_rig(stay)
    model, optimizer = rig.owners.values()
    batches = [(x.to(torch.bfloat16).float(), y) for x, y in float_batches(25)]
    held.x, held.y = batches[0]

    def train_step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, held.x, held.y)
        loss.backward()
        optimizer.step()
        return loss

    def after(index: int) -> None:
        held.x, held.y = batches[index + 1]

    return Rig(train_step, {"model": model, "optimizer": optimizer}, [()] * 24, after)


def test_row_14_a_batch_that_comes_in_a_new_tensor() -> None:
    """Cast after the copy, the batch is another tensor in each step: handled where graphplan can see the object that
    holds it, refused where it cannot.
    """
    hidden = lambda: held_rig(Hidden())  # noqa: E731
    texts = r"each\s+step\s+uses\s+another\s+one", "Pass it as an argument"
    assert_refused(hidden, UnownedTensorError, *texts, done=SECOND_TRACE)
    assert_handled(lambda: held_rig(Memory()))
