"""Checksums of tensors: enough to tell whether they hold the same bits later, if there is no memory for copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from graphplan.tensors.attributes import is_plain
from graphplan.tensors.copying import bits, copy_all, flat, groups, unequal

_BYTES = 2**22
"""Bytes that are summed at once, which takes memory for four copies of them."""
_ROW = 2**12
"""Words per sum. The host makes a factor for each: for more than 2**14, torch would start threads, in 10 ms."""
_STEP, _MIX, _LAST = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Multipliers of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), signed."""


class Checksums:
    """Sums of the bits of ``tensors`` by path, computed on their devices. Tensors of another layout or class are copied
    instead.

    Each word of 32 bits is multiplied by an odd number of 64 bits that depends on its place in a row, modulo 2**64:
    Carter and Wegman's multilinear hash (Universal classes of hash functions, 1979) of each row. If one word changes,
    the sum changes. If several change, a sum with random factors stays the same with a probability of at most one in
    2**32: the highest bit of a word, a sign, meets the 33 lowest bits of its factor, of which one is known.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._forms = {path: (tensor.shape, tensor.dtype, tensor.device) for path, tensor in tensors.items()}
        self._paths = sorted(path for path, tensor in tensors.items() if not is_plain(tensor))
        self._copies = copy_all([tensors[path] for path in self._paths])
        self._sums = _sums([tensors[path] for path in sorted(self._forms.keys() - set(self._paths))])

    def differ(self, other: Checksums) -> bool:
        """Return True if ``other`` has other paths, shapes, dtypes, devices or bits. Waits for the device."""
        if (self._forms, self._paths) != (other._forms, other._paths) or unequal(self._copies, other._copies):
            return True
        return not all(torch.equal(*map(Tensor.cpu, pair)) for pair in zip(self._sums, other._sums, strict=True))


@torch.no_grad()
def _sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return one tensor of sums for each device, in the order of the devices' names."""
    keys = [(tensor.device, tensor.dtype) for tensor in tensors]
    factors = {device: _factors().to(device) for device in {tensor.device for tensor in tensors}}
    sums: dict[torch.device, list[Tensor]] = {device: [] for device in sorted(factors, key=str)}
    for _, members in groups(tensors, keys, _BYTES):
        for words in _words([tensors[index] for index in members]):
            sums[words.device].append((words * factors[words.device]).sum(-1))
    return [torch.cat(parts) for parts in sums.values()]


@lru_cache(maxsize=1)
def _factors() -> Tensor:
    """Return odd numbers for the words of a row, made on the host: a device takes longer to load the kernels for it."""
    numbers = torch.arange(1, _ROW + 1, device="cpu").mul_(_STEP)
    for bits_down, factor in ((30, _MIX), (27, _LAST)):
        # The lowest bits of a product depend only on the lowest bits of its factors: mix the highest bits into them.
        numbers.bitwise_xor_((numbers >> bits_down) & ((1 << (64 - bits_down)) - 1)).mul_(factor)
    return numbers.bitwise_xor_((numbers >> 31) & ((1 << 33) - 1)).bitwise_or_(1)


def _words(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield the bits of tensors of one device and dtype, concatenated, as rows; the last row is padded with zeros."""
    for part in bits(flat(tensors)).reshape(-1).view(torch.uint8).split(_BYTES):
        missing = -part.numel() % (4 * _ROW)
        if missing or part.storage_offset() % 4:
            part = torch.cat([part, part.new_zeros(missing)])
        yield part.view(torch.int32).view(-1, _ROW)
