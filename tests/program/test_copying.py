"""Copies of many tensors, their way back and their comparison, small tensors together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphplan.tensors import copying
from graphplan.tensors.copying import copy_all, copy_into, unequal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are handled together, on a host as well: a few hundred bytes, so that there is all of it."""
    monkeypatch.setattr(copying, "_is_on_host", lambda tensor: False)
    monkeypatch.setattr(copying, "_TOGETHER", 500)


def many() -> list[Tensor]:
    """Tensors of all kinds, several of most."""
    torch.manual_seed(0)
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    shapes = ((), (1,), (3, 5), (0, 4), (7,))
    made = [torch.randn(shape).mul(3).to(DEVICE, kind) for kind in kinds for shape in shapes]
    image = torch.randn(2, 3, 4, 4, device=DEVICE)
    made += [nn.Parameter(image.clone()), image.to(memory_format=torch.channels_last), image[:, :, 1:3], image[..., 0]]
    made += [torch.view_as_complex(torch.randn(4, 2, device=DEVICE)).conj(), torch.randn(600, 600, device=DEVICE)]
    made += [torch.tensor([float("nan"), -0.0, 0.0], device=DEVICE), torch.eye(3, device=DEVICE).to_sparse()]
    return made


def dense() -> list[Tensor]:
    """Those that can be compared bit by bit."""
    return [tensor for tensor in many() if tensor.layout is torch.strided]


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_copies_have_the_same_bits_and_memory_of_their_own(device: torch.device | None) -> None:
    tensors = dense()
    copies = copy_all(tensors, device)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert (copy.shape, copy.dtype, copy.requires_grad) == (tensor.shape, tensor.dtype, False)
        assert copy.device == (device or tensor.device)
    assert unequal(copies, tensors) == unequal(tensors, copies) == []
    with torch.no_grad():
        for tensor in tensors:
            tensor.detach().copy_(torch.ones_like(tensor))
    changed = unequal(copies, tensors)
    assert changed == [i for i, (a, b) in enumerate(zip(copies, dense(), strict=True)) if a.numel() and not _ones(b)]


def test_what_lies_on_the_host_stays_there() -> None:
    """A meta device has no memory to copy anything to."""
    state = torch.default_generator.get_state()
    (copy,) = copy_all([state], torch.device("meta"))
    assert copy.is_cpu
    assert torch.equal(copy, state)
    assert copy.data_ptr() != state.data_ptr()


def _ones(tensor: Tensor) -> bool:
    return bool((tensor == 1).all())


def test_what_is_written_back_is_what_was_there() -> None:
    tensors, wanted = dense(), dense()
    addresses = [tensor.data_ptr() for tensor in tensors]
    copies = copy_all(tensors)
    for tensor in tensors:
        tensor.detach().zero_()
    assert unequal(wanted, tensors)
    copy_into(tensors, copies)
    assert unequal(wanted, tensors) == []
    assert [tensor.data_ptr() for tensor in tensors] == addresses


@pytest.mark.parametrize("place", range(len(dense())))
def test_one_bit_is_found(place: int) -> None:
    """In any one of them, and nowhere else; zeros of both signs are different bits."""
    ones, twos = dense(), dense()
    flat = twos[place].detach().resolve_conj().flatten()
    flat[-1:] = _changed(flat[-1:])
    twos[place] = flat.view(ones[place].shape)
    assert unequal(ones, twos) == ([place] if flat.numel() else [])


def _changed(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:
        return ~tensor
    return -tensor if tensor.is_floating_point() else tensor + 8


def test_sparse_tensors_are_copied_too() -> None:
    (sparse,) = [tensor for tensor in many() if tensor.layout is not torch.strided]
    (copy,) = copy_all([sparse])
    assert torch.equal(copy.to_dense(), sparse.to_dense())
