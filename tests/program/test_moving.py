"""What is moved in and out is the same in C++ as by torch's own operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from graphplan.compare import building as native
from graphplan.compare import moving

built = native.load()
needs_build = pytest.mark.skipif(built is None, reason="not built: python -m graphplan.compare says why")
PYTHON = SimpleNamespace(copy_in=moving._copy_in, hand_out=moving._hand_out, fill=torch.Tensor.fill_)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
either = pytest.mark.parametrize(
    "by", [pytest.param(built, id="C++", marks=needs_build), pytest.param(PYTHON, id="Python")]
)


@either
def test_copies_of_any_kind(by: Any) -> None:
    """Other dtypes and devices, other strides, what asks for gradients: autograd notes none of it."""
    weight = nn.Parameter(torch.randn(3, 4))
    sources = [torch.randn(2, 3).t(), weight, weight * 2, torch.arange(4), torch.empty(0)]
    targets = [
        torch.zeros(s.shape, device=DEVICE, dtype=torch.float64 if i == 3 else s.dtype) for i, s in enumerate(sources)
    ]
    assert by.copy_in(targets, sources) is None
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu(), source.detach().to(target.dtype))
        assert not target.requires_grad
        assert target.grad_fn is None


@either
def test_elements_of_a_copy_are_tensors_of_their_own(by: Any) -> None:
    """Each may be written to with something that asks for gradients, and none leads back to the vector."""
    vector = torch.arange(3.0, device=DEVICE)
    parts = by.hand_out(vector)
    assert [part.item() for part in parts] == [0.0, 1.0, 2.0]
    assert all(type(part) is torch.Tensor and part.ndim == 0 and not part._is_view() for part in parts)
    parts[0].add_(torch.tensor(5.0, device=DEVICE, requires_grad=True))
    assert parts[0].requires_grad
    assert not parts[1].requires_grad
    vector.zero_()
    assert [part.item() for part in parts] == [5.0, 1.0, 2.0]
    assert by.hand_out(torch.empty(0)) in ([], ())


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_is_written_as_python_would(by: Any, dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, dtype=dtype, device=DEVICE)
    by.fill(tensor, 0.1)
    assert torch.equal(tensor.cpu(), torch.tensor([0.1, 0.1], dtype=dtype))


@needs_build
@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("copy_in", ([torch.zeros(1)], []), "expected two lists of as many tensors"),
        ("copy_in", ([torch.zeros(1)], [1.0]), "expected two lists of as many tensors"),
        ("copy_in", ([1.0], [torch.zeros(1)]), "expected two lists of as many tensors"),
        ("hand_out", (1.0,), "expected a tensor"),
        ("fill", (1.0, 1.0), "expected a tensor"),
        ("fill", (torch.zeros(1), "x"), "must be real number, not str"),
    ],
)
def test_what_cannot_be_moved_is_an_error_and_no_crash(name: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        getattr(built, name)(*args)


@either
def test_errors_of_the_copy_itself_come_out(by: Any) -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        by.copy_in([torch.zeros(2)], [torch.zeros(3)])
