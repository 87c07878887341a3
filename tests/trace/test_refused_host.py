"""Steps that read tensors on the host or compute with Python numbers that change: refused, with nothing changed."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import ControlFlowError, GraphPlanError, HostScalarError, HostSyncError, SkipReason
from tests.models import attributes, updating_rig
from tests.twins import (
    LAST_TRACE,
    SECOND_TRACE,
    Rig,
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    assert_same_as_eager,
    build,
    by_chance,
    drive,
    line_of,
    managed,
)


def read_item(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    str(loss.item())  # culprit


def read_float(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    complex(loss.detach())  # culprit


def read_format(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    print(f"{loss:.3f}", file=io.StringIO())  # culprit


def read_bool(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    if loss > 100:  # culprit
        model.double()


def read_tolist(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    loss.tolist()  # culprit


def read_numpy(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    loss.detach().numpy()  # culprit


def read_asarray(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    np.asarray(loss.detach())  # culprit


def read_index(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    x[x.argmax() % 4]  # culprit


def read_equal(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    torch.equal(x, x + 1)  # culprit


def read_allclose(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    torch.allclose(x, x + 1)  # culprit


def read_finite(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    model.train(bool(torch.isfinite(loss).all()))  # culprit


def shape_nonzero(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    (x > 0).nonzero()  # culprit


def shape_mask(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    x[x > 0].sum()  # culprit


def shape_select(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    torch.masked_select(x, x > 0)  # culprit


def shape_unique(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    torch.unique((4 * x).long())  # culprit


def shape_one_hot(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    F.one_hot(x.abs().long())  # culprit


def read_each(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.ones_like(x).map_(x, lambda one, other: one * other)  # type: ignore[attr-defined]  # culprit


def change_each(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return x.clone().apply_(abs)  # culprit


READS = [read_each, change_each]
READS += [read_item, read_float, read_format, read_tolist, read_numpy, read_asarray, read_index, read_allclose]
READS += [shape_nonzero, shape_mask, shape_select, shape_unique, shape_one_hot]


def reading_rig(read: Callable[..., Any]) -> Rig:
    """A step that reads its loss, or what is drawn beside the batch."""
    return updating_rig(lambda model, x, loss: read(model, by_chance(x), loss), attributes())


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_host_reads_are_refused_at_the_first_trace(read: Callable[..., None]) -> None:
    """Values, or shapes made from values, that reach the host: the message has the source line."""
    assert_refused(partial(reading_rig, read), HostSyncError, line_of(read))


@pytest.mark.parametrize("read", [read_bool, read_finite, read_equal])
def test_truth_values_are_compared(read: Callable[..., None]) -> None:
    step = managed(rig := build(partial(reading_rig, read)))
    drive(rig, step)
    assert step.stats.replayed > 0
    assert [re.search(line_of(read), place) for place in step.plan.branches] != [None]


def test_a_host_read_falls_back_to_eager() -> None:
    """With ``on_failure="eager"`` the same step warns once and trains each batch once."""
    make = partial(reading_rig, read_item)
    assert_falls_back(make, SkipReason.HOST_SYNC, line_of(read_item), "item|_local_scalar_dense")


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_a_refused_step_is_traced_once(read: Callable[..., None]) -> None:
    """The first trace tells; after the warning nothing more is tried."""
    rig = build(partial(reading_rig, read))
    step = managed(rig, on_failure="eager")
    with pytest.warns(UserWarning, match=line_of(read)):
        drive(rig, step)
    assert (step.stats.traced, step.stats.captured, step.stats.phase_counts["trace"]) == (1, 0, 1)


def test_the_message_names_the_read() -> None:
    """What was called is in the message, not only where."""
    for read, name in ((read_tolist, "tolist"), (read_numpy, "numpy"), (shape_nonzero, "nonzero")):
        assert_refused(partial(reading_rig, read), HostSyncError, name)


def decaying_attribute(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    model.temperature *= 0.5
    return loss * model.temperature


def decaying_constant(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss * torch.tensor(model.temperature)


def decaying_scalar(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return x.mul(model.temperature)


def decaying_fill(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return torch.full((3,), model.temperature)


def decaying_power(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return x**model.temperature  # culprit


def decaying_dropout(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return F.dropout(x, p=model.temperature)  # culprit


def numpy_noise(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss + float(model.noise.random())  # culprit


def python_noise(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return loss + random.choice(range(1, 4)) / 2  # culprit


def moving_slice(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return x[:, model.start :].clone()[:, :2]  # culprit


def _halve(model: Any, index: int) -> None:
    model.temperature *= 0.5
    model.start = (model.start + 1) % 6


def scalar_rig(update: Callable[..., Any]) -> Rig:
    """The host halves ``model.temperature`` after every call."""
    host = _halve if update is not decaying_attribute else lambda model, index: None
    random.seed(0)
    noise = np.random.default_rng(0)
    return updating_rig(update, attributes(temperature=0.5, start=0, noise=noise), host)


class _StandIn:
    """What is no number, but says what torch's functions do with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[1.0 if type(arg) is cls else arg for arg in args], **(kwargs or {}))


def _are_handed_over() -> bool:
    """Whether functions of this torch that take only numbers ask what is none."""
    try:
        torch.full((), _StandIn())  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


HANDED_OVER = pytest.mark.skipif(not _are_handed_over(), reason="this torch has functions that take real numbers alone")


def test_a_python_number_that_changes_is_refused() -> None:
    """Both values before the last two traces, where the number lies and the line are in the message."""
    patterns = [line_of(decaying_power), r"uses model\.temperature at", r"0\.015625", r"0\.0078125"]
    assert_refused(partial(scalar_rig, decaying_power), HostScalarError, *patterns, done=LAST_TRACE)


@pytest.mark.parametrize(
    "update",
    [decaying_constant, decaying_scalar, decaying_attribute, pytest.param(decaying_fill, marks=HANDED_OVER)],
    ids=lambda update: update.__name__,
)
@pytest.mark.parametrize("verify", ["geometric", "off"])
def test_a_python_number_that_operators_get(update: Callable[..., Any], verify: str) -> None:
    """Each replay computes with that of its own step."""
    assert_equals_eager(partial(scalar_rig, update), verify=verify)


@HANDED_OVER
def test_a_python_number_that_is_asked_and_needed() -> None:
    """``F.dropout`` asks whether it is a probability: calls with another one than the call before are eager."""
    with pytest.warns(UserWarning, match=r"needs the value of model\.temperature at .*decaying_dropout"):
        step = assert_same_as_eager(partial(scalar_rig, decaying_dropout))
    assert step.stats.replayed == 0


@pytest.mark.parametrize("update", [numpy_noise, python_noise, moving_slice], ids=lambda update: update.__name__)
def test_host_noise_and_moving_slices_are_refused(update: Callable[..., Any]) -> None:
    """Numbers that come from no attribute, and ones that only shape a view."""
    make = partial(scalar_rig, update)
    error = _refusal(make)
    assert isinstance(error, HostScalarError | ControlFlowError)
    done = LAST_TRACE if update is moving_slice else SECOND_TRACE
    assert_refused(make, type(error), line_of(update), done=done)


def _refusal(make: Callable[[], Rig]) -> Exception:
    """The refusal that a rig runs into."""
    rig = build(make)
    step = managed(rig)
    with pytest.raises(GraphPlanError) as caught:
        for index, args in enumerate(rig.calls):
            step(*args)
            rig.after(index)
    return caught.value


def signed_constant(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor(model.zero) * loss


def _flip(model: Any, index: int) -> None:
    model.zero = -model.zero


def signed_list(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor([complex(model.zero).real]) * loss  # culprit


def test_zeros_of_two_signs_are_two_numbers() -> None:
    """A constant that is 0.0 in one trace and -0.0 in the next would keep its sign; a number does not."""
    make = partial(updating_rig, signed_list, attributes(zero=0.0), _flip)
    assert_refused(make, HostScalarError, line_of(signed_list), r"is -0\.0 before|and -0\.0 before", done=LAST_TRACE)
    assert_equals_eager(partial(updating_rig, signed_constant, attributes(zero=0.0), _flip), verify="off")


def nan_constant(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor([float("nan"), 1.0]) * loss


def test_a_constant_that_is_not_a_number_is_a_constant() -> None:
    """NaN does not equal itself, and is the same number in both traces all the same."""
    assert_equals_eager(partial(updating_rig, nan_constant, attributes()))


def test_a_changing_number_falls_back_to_eager() -> None:
    """Eager goes on with the number of each step."""
    make = partial(scalar_rig, decaying_power)
    assert_falls_back(make, SkipReason.HOST_SCALAR, line_of(decaying_power), r"0\.015625")
