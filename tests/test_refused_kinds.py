"""Sequences of other lengths: what operators keep on the host without saying so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from graphplan import HostSyncError, SkipReason
from tests.twins import Rig, assert_equals_eager, assert_falls_back, assert_refused, line_of

CALLS = 16


def _called(step: Callable[..., Any], *args: Callable[[int], Any]) -> Rig:
    """A step that only computes; ``args`` make its arguments from the number of the call."""

    def computing(*args: Any) -> Any:
        with torch.no_grad():
            return step(*args)

    return Rig(computing, {}, [tuple(make(index) for make in args) for index in range(CALLS)])


def _rows(index: int) -> Tensor:
    return torch.randn(3, 5, 8)


def _lengths(index: int) -> Tensor:
    # As many in all, and then fewer.
    return torch.tensor([5, 3, 2] if index < 8 else [5, 4, 1] if index < 10 else [4, 3, 2])


def packed(x: Tensor, lengths: Any) -> Tensor:
    return pack_padded_sequence(x, lengths, batch_first=True).data * 2  # culprit


def test_lengths_in_a_tensor_are_refused() -> None:
    """Packing goes by lengths on the host: the operator, the line, and what to do."""
    make = partial(_called, packed, _rows, _lengths)
    name = r"aten\._pack_padded_sequence\.default reads the lengths of sequences on the host"
    text = rf"{name} at {line_of(packed)}.*under a mask.*list of numbers.*eager_if="
    assert_refused(make, HostSyncError, text)
    assert_falls_back(make, SkipReason.HOST_SYNC, text)


def there_and_back(x: Tensor, lengths: list[int], is_sorted: bool) -> tuple[Tensor, Tensor]:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=is_sorted)
    return pad_packed_sequence(packed._replace(data=packed.data * 2), batch_first=True)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_lengths_in_a_list_are_numbers_of_the_program(is_sorted: bool) -> None:
    """What the message advises: other numbers are another program."""
    lists = ([5, 3, 2], [5, 4, 1]) if is_sorted else ([3, 5, 2], [1, 4, 5])
    make = partial(_called, there_and_back, _rows, lambda index: lists[index % 2], lambda index: is_sorted)
    assert_equals_eager(make, captured=2)


def changed_lengths(x: Tensor, one: Tensor) -> Tensor:
    lengths = torch.tensor([4, 3, 2])
    lengths += one
    return pack_padded_sequence(x, lengths, batch_first=True).data * 2  # culprit


def test_a_constant_that_is_written_to_is_none() -> None:
    make = partial(_called, changed_lengths, _rows, lambda index: torch.tensor(index // 9))
    assert_refused(make, HostSyncError, line_of(changed_lengths))
