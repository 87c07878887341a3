"""Sums of bits: what they tell apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphplan.verify.checksums import Checksums, _factors

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Numbers of any type."""
    drawn = torch.randn(*shape, device=device) * 3
    return drawn > 0 if dtype is torch.bool else drawn.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_among_many(dtype: torch.dtype, device: torch.device) -> None:
    """Wherever it lies, in tensors of sizes and places that no word fits."""
    torch.manual_seed(0)
    tensors = {str(size): numbers(size + 3, dtype=dtype, device=str(device))[3:] for size in (1, 7, 100, 0)}
    known = Checksums({path: tensor.clone() for path, tensor in tensors.items()})
    assert not known.differ(Checksums(tensors))
    for tensor in tensors.values():
        for place in range(tensor.numel()):
            old = tensor[place].clone()
            tensor[place] = ~old if dtype is torch.bool else old + 1
            assert known.differ(Checksums(tensors)), f"{dtype}, element {place} of {tensor.numel()}"
            tensor[place] = old
    assert not known.differ(Checksums(tensors))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128], ids=str
)
@pytest.mark.parametrize("count", [2, 3, 64, 1000, 4096])
def test_changes_of_high_bits(dtype: torch.dtype, count: int) -> None:
    """Signs, exponents, zeros, of some and of all: what a bit adds to a sum must not cancel what others add."""
    torch.manual_seed(count)
    for number in range(40):
        tensor = torch.randn(2, count, dtype=dtype)
        known = Checksums({"x": tensor})
        some = torch.randperm(2 * count)[: 2 + number % (2 * count - 1)]
        flat = tensor.flatten()
        changed = [
            -tensor,
            2 * tensor,
            tensor / 4,
            tensor.index_fill(0, torch.tensor([1]), 0),
            tensor.flip(1),
            1 / tensor,
        ]
        changed += [flat.index_copy(0, some, factor * flat[some]).view_as(tensor) for factor in (-1, 2, 0.5)]
        changed += [tensor.conj().resolve_conj()] if dtype.is_complex else []
        for other in changed:
            assert known.differ(Checksums({"x": other})) is not torch.equal(other, tensor)
    zeros = torch.zeros(count, dtype=dtype)
    signed = torch.complex(zeros.real, -zeros.imag) if dtype.is_complex else -zeros
    assert Checksums({"x": zeros}).differ(Checksums({"x": signed}))


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "two rows are exchanged": lambda t: t.flip(0),
    "the numbers are negative": lambda t: -t,
    "zero has another sign": lambda t: torch.where(t == 0, -0.0, t),
    "two differences cancel out": lambda t: t + torch.tensor([1.0, -1.0]).repeat(t.shape[0], t.shape[1] // 2),
    "another shape": lambda t: t.reshape(t.shape[1], t.shape[0]),
    "another dtype": lambda t: t.double(),
    "fewer numbers": lambda t: t[:-1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors(name: str) -> None:
    """Large enough for several pieces."""
    first = torch.arange(2**20 * 6, dtype=torch.float32).reshape(2048, -1)
    known = Checksums({"x": first})
    assert not known.differ(Checksums({"x": first.clone()}))
    assert known.differ(Checksums({"x": OTHERS[name](first)}))


def test_paths_count() -> None:
    """Two tensors that have taken each other's places, and one more."""
    one, two = torch.randn(2, 5)
    known = Checksums({"one": one, "two": two})
    assert not known.differ(Checksums({"two": two, "one": one}))
    assert known.differ(Checksums({"one": two, "two": one}))
    assert known.differ(Checksums({"one": one, "two": two, "three": two}))


def test_layouts_of_their_own() -> None:
    """Transposed tensors are summed as they read; conjugated ones are copied, and NaN is the same as NaN."""
    wide = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    conjugated = torch.randn(4, dtype=torch.complex64).conj()
    tensors = {"wide": wide, "conjugated": conjugated, "nan": torch.full((3,), torch.nan)}
    known = Checksums(tensors)
    assert not known.differ(Checksums({**tensors, "wide": wide.contiguous(), "nan": tensors["nan"].clone()}))
    assert known.differ(Checksums({**tensors, "conjugated": conjugated.resolve_conj() + 1}))
    wide[1, 2, 3, 4] += 1
    assert known.differ(Checksums(tensors))


def test_another_default_device() -> None:
    """What is made first while it is set lies on the host all the same."""
    _factors.cache_clear()
    tensor = torch.randn(5)
    with torch.device("meta"):
        known = Checksums({"x": tensor.clone()})
    assert not known.differ(Checksums({"x": tensor}))
