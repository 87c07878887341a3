"""Tensors that torch reads on the host with its dispatch modes off: refused as other host reads are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Thread
from types import BuiltinFunctionType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphplan import HostSyncError, SkipReason
from graphplan.observe.conversions import Conversions
from tests.models import attributes, updating_rig
from tests.twins import (
    assert_equals_eager,
    assert_falls_back,
    assert_refused,
    assert_same_as_eager,
    line_of,
)


def _one(loss: Tensor) -> Tensor:
    """A number that is computed, and alike in all steps: two traces do not show that it is read."""
    return (loss.detach() > -1).float()


def list_of_one(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor([_one(loss)]) * loss  # culprit


def list_of_both(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor([[1.0, 2.0], (3.0, _one(loss))]) * loss  # culprit


def list_of_vectors(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor([_one(loss)[None]]) * loss  # culprit


def list_of_parameters(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor([model.scale]) * loss  # culprit


def list_of_integers(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor([_one(loss).long()]) * loss  # culprit


def list_of_truths(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor([_one(loss).bool()]) * loss  # culprit


def list_of_complex(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor([_one(loss)], dtype=torch.complex64) * loss  # culprit


def list_as_tensor(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.as_tensor([_one(loss)]) * loss  # culprit


def list_as_array(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.asarray([_one(loss)]) * loss  # culprit


def list_new_tensor(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return x.new_tensor([_one(loss)]) * loss  # culprit


def list_by_class(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.Tensor([_one(loss)]) * loss  # culprit


def list_by_old_class(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.FloatTensor([_one(loss)]) * loss  # culprit


LISTS = [list_of_both, list_of_vectors, list_of_parameters, list_of_complex, list_as_array, list_new_tensor]
LISTS += [list_by_class, list_by_old_class]
STACKED = [list_of_one, list_of_integers, list_of_truths, list_as_tensor]


def exported(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return loss * float(np.from_dlpack(_one(loss)))  # culprit


NAMES = dict.fromkeys(LISTS, r"torch\.tensor, as_tensor, new_tensor.*torch\.stack")
NAMES |= {exported: r"Tensor\.__dlpack__"}


@pytest.mark.parametrize("read", NAMES, ids=lambda read: read.__name__)
def test_reads_that_no_mode_hears_of_are_refused(read: Callable[..., Tensor]) -> None:
    """At the first trace, with the call, its line and what to do instead; and torch's classes are as they were."""
    make = partial(updating_rig, read, attributes(scale=lambda: nn.Parameter(torch.ones(()), requires_grad=False)))
    text = f"{NAMES[read]}.* reads a tensor's values on the host at {line_of(read)}.*Keep the values in a tensor"
    assert_refused(make, HostSyncError, text)
    assert "__float__" not in vars(Tensor)
    assert type(torch.tensor) is BuiltinFunctionType


def test_a_list_of_tensors_falls_back_to_eager() -> None:
    make = partial(updating_rig, list_of_both, attributes())
    assert_falls_back(make, SkipReason.HOST_SYNC, line_of(list_of_both), r"torch\.stack")


def stacked(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.stack([_one(loss), loss.detach()])


def of_numbers(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor([1.0, 2.0]) * loss


def split_by_numbers(model: nn.Module, x: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
    return (*torch.tensor_split(x + 1, 2), *torch.tensor_split(input=x + 1, indices=[1]), *x.tensor_split((1,), dim=1))


@pytest.mark.parametrize(
    "update", [stacked, of_numbers, split_by_numbers, *STACKED], ids=lambda update: update.__name__
)
def test_what_reads_no_tensor_is_captured(update: Callable[..., object]) -> None:
    """What the messages advise, and the same calls with numbers."""
    assert_equals_eager(partial(updating_rig, update, attributes()))


def copied(model: nn.Module, x: Tensor, loss: Tensor) -> Tensor:
    return torch.tensor(loss.detach()) + x.new_tensor(loss.detach())


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_copy_of_one_tensor_is_captured() -> None:
    """``torch.tensor(t)`` copies ``t`` where it lies."""
    step = assert_same_as_eager(partial(updating_rig, copied, attributes()))
    assert step.stats.replayed > 0


def test_only_the_thread_that_watches_is_told() -> None:
    """And it is told of what its innermost watcher has not heard of yet; of nothing once that is over."""
    outer: list[str] = []
    inner: list[str] = []
    with Conversions(lambda what, _: outer.append(what)):
        other = Thread(target=lambda: torch.tensor([torch.ones(())]))
        other.start()
        other.join()
        assert outer == []
        with Conversions(lambda what, _: inner.append(what)):
            torch.tensor([torch.ones(())])
        torch.tensor([torch.ones(())])
    torch.tensor([torch.ones(())])
    assert (len(outer), len(inner)) == (1, 1)
    assert float(torch.ones(())) == 1.0
