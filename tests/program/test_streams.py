"""Which memory of a result is lent to another stream. Streams are the devices': here a kernel of the test's own notes
what torch would record, and ``tests/gpu/test_inference.py`` shows what it is good for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from graphplan.backends.cudagraph import lend

CPU = torch.device("cpu")


@pytest.fixture
def lent() -> Iterator[list[int]]:
    """Addresses of memory that was lent since."""
    library, found = torch.library.Library("aten", "IMPL"), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("record_stream", lambda tensor, stream: found.append(tensor.data_ptr()), "CPU")
    yield found
    library._destroy()


def to_stream(result: Any) -> None:
    lend(result, torch.Stream(device="cpu"), CPU)


@dataclass
class Output:
    """What a model returns."""

    logits: Tensor
    name: str = "output"


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda x: x,
    "in containers": lambda x: {"losses": [1, (x, None)]},
    "in a dataclass": lambda x: Output(x),
    "a parameter": lambda x: nn.Parameter(x),
    "part of a larger one": lambda x: x[1:, 1],
    "with a graph": lambda x: x.requires_grad_().view(-1),
    "conjugated": lambda x: torch.view_as_complex(x).conj(),
    "marked as negative": lambda x: torch.view_as_complex(x).conj().imag,
}


@pytest.mark.parametrize("kind", RESULTS)
def test_the_memory_of_a_result_is_lent(kind: str, lent: list[int]) -> None:
    """That of the tensor itself, from its beginning, and of no copy."""
    x = torch.randn(4, 2)
    to_stream(RESULTS[kind](x))
    assert lent == [x.untyped_storage().data_ptr()]


@torch.inference_mode()
def test_the_memory_of_a_prediction_is_lent(lent: list[int]) -> None:
    x = torch.randn(4)
    to_stream(x)
    assert lent == [x.data_ptr()]


def test_what_lies_elsewhere_is_left_alone(lent: list[int]) -> None:
    to_stream([torch.eye(2).to_sparse(), torch.empty(2, device="meta"), 3.0, "text"])
    assert lent == []


def test_what_a_mode_of_the_callers_gives_is_left_alone(lent: list[int]) -> None:
    with FlopCounterMode(display=False):
        to_stream(torch.ones(2))
    assert lent == []
