"""Copy, compare and write back many tensors. Small tensors are batched, since launches take most of the time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphplan.environment.devices import is_accelerator
from graphplan.tensors.attributes import is_plain
from graphplan.tensors.page_locked import HostMemory, fits_host_memory

_TOGETHER = 2**22
"""Maximum bytes of a batch that is compared, or copied to another device: it is first concatenated on its own."""
COMPARISON = 40 * 2**20
"""Bytes that torch reserves to compare such a batch: two segments, for copies of both sides and a mask."""
_COPIED = 2**28
"""Maximum bytes of copies that share one storage."""
_LARGE, _BLOCK = 10 * 2**20, 2**20
"""For an allocation of more than 1 and less than 10 MiB, torch reserves 20 MiB, and for a smaller one 2 MiB: copies
that take less than 10 MiB together are made in parts.
"""
FEW = 2**22
"""Up to this many bytes, compare on the host: an H200 takes 30 ms to load the kernels, 1 ms to copy these bytes."""
_PIECE = 2**14
"""Elements that are compared at once on the host: for more than twice as many torch starts its threads, in 10 ms."""
_is_on_host = attrgetter("is_cpu")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def bits(tensor: Tensor) -> Tensor:
    """Return ``tensor`` viewed as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    elif tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.dtype in _INTEGERS or tensor.is_quantized else tensor.view(_BITS[tensor.element_size()])


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors on one device have the same shape, dtype and bits. Meta tensors have no bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return first.is_meta or torch.equal(bits(first), bits(second))


flat: Callable[[list[Tensor]], Tensor] = torch._C._nn.flatten_dense_tensors
"""Concatenate copies of tensors of one dtype into a 1-D tensor. A single tensor may be returned without a copy."""
_unflat = torch._C._nn.unflatten_dense_tensors


def _may_be_flat(tensor: Tensor) -> bool:
    """Return True if ``tensor`` can be a part of a flat tensor."""
    return is_plain(tensor) and tensor.is_contiguous()


def _home(tensor: Tensor) -> Hashable | None:
    # Batching saves launches, and host tensors have none.
    return (tensor.device, tensor.dtype) if not _is_on_host(tensor) and _may_be_flat(tensor) else None


def groups(tensors: Sequence[Tensor], keys: Iterable[Hashable | None], most: int) -> Iterator[tuple[bool, list[int]]]:
    """Yield (True, positions of tensors with one key, at most ``most`` bytes), and (False, [position]) for key None."""
    together: dict[Hashable, tuple[list[int], int]] = {}
    for index, (tensor, key) in enumerate(zip(tensors, keys, strict=True)):
        if key is None:
            yield False, [index]
            continue
        members, size = together.get(key, ([], 0))
        nbytes = tensor.nbytes
        if members and size + nbytes > most:
            yield True, members
            members, size = [], 0
        members.append(index)
        together[key] = members, size + nbytes
    yield from ((True, members) for members, _ in together.values())


@torch.no_grad()
def copy_all(tensors: Sequence[Tensor], device: torch.device | None = None, beside: float = 0) -> list[Tensor]:
    """Return detached copies: on each tensor's own device, or on ``device`` except for up to ``beside`` bytes. Copies
    of host tensors stay on the host. Copies of one dtype share memory. Device-to-host copies are asynchronous, into
    pinned memory.
    """
    parts = _parts(tensors, device, beside)
    memory = _host_memory([tensors[index] for part in parts if part.leaves for index in part.members], device)
    copies = list(tensors)
    for are_many, members, leaves in parts:
        originals = [tensors[index] for index in members]
        if not are_many:
            copies[members[0]] = _moved(originals[0], device, memory) if leaves else originals[0].clone()
            continue
        copied = _moved(flat(originals), device, memory) if leaves else flat(originals)
        for index, part in zip(members, _unflat(copied, originals), strict=True):
            copies[index] = part
    return copies


class _Part(NamedTuple):
    """Positions of tensors that are copied together if ``are_many``; ``leaves``: the copy is on another device."""

    are_many: bool
    members: list[int]
    leaves: bool


def _parts(tensors: Sequence[Tensor], device: torch.device | None, beside: float) -> list[_Part]:
    leave = [not (device is None or tensor.is_cpu or tensor.device == device) for tensor in tensors]
    parts = []
    homes = list(map(_home, tensors))
    batched = sum(tensor.nbytes for tensor, home in zip(tensors, homes, strict=True) if home is not None)
    most = _TOGETHER if any(leave) else _COPIED if batched >= _LARGE else _BLOCK
    for are_plain, members in groups(tensors, homes, most):
        leaves = leave[members[0]]
        nbytes = sum(tensors[index].nbytes for index in members) if leaves and beside else 0
        if 0 < nbytes <= beside:
            leaves, beside = False, beside - nbytes
        parts.append(_Part(are_plain and len(members) > 1, members, leaves))
    return parts


def _host_memory(tensors: Sequence[Tensor], device: torch.device | None) -> dict[torch.device, HostMemory]:
    """Return pinned memory for host copies of ``tensors``, by accelerator; none if ``device`` is not the host."""
    if device is None or device.type != "cpu":
        return {}
    copied = [tensor for tensor in tensors if is_accelerator(tensor.device) and fits_host_memory(tensor)]
    homes = {tensor.device for tensor in copied}
    return {home: HostMemory(home, [tensor for tensor in copied if tensor.device == home]) for home in homes}


def _moved(tensor: Tensor, device: torch.device | None, memory: Mapping[torch.device, HostMemory]) -> Tensor:
    """Return a copy on another device; a copy on the host uses page-locked ``memory``, which is faster."""
    if tensor.device not in memory or not fits_host_memory(tensor):
        return tensor.to(device, copy=True)
    return memory[tensor.device].empty_like(tensor).copy_(tensor, non_blocking=True)


@torch.no_grad()
def copy_into(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy ``values`` into ``targets`` of the same shapes and dtypes, one by one. On an H200 a copy takes 7 µs and no
    kernel; loading the kernel that copies many tensors takes 15 to 25 ms, once.
    """
    for target, value in zip(targets, values, strict=True):
        # Writing to an inference tensor outside inference mode fails; writing to a detached alias does not.
        open_ = target.detach() if target.is_inference() else target
        open_.copy_(value, non_blocking=not target.is_cpu)


@torch.no_grad()
def unequal(ones: Sequence[Tensor], twos: Sequence[Tensor]) -> list[int]:
    """Return the positions at which two lists of tensors of the same shapes and dtypes differ in bits. The tensors of a
    pair may be on different devices: many bytes are compared on the accelerator, few on the host. Each device is
    synchronized once, unless something differs.
    """
    rows = [(two, one) if _is_on_host(one) else (one, two) for one, two in zip(ones, twos, strict=True)]
    home = comparison_device(tensor for tensor, _ in rows)
    homes = [_home(one) if one.nbytes <= _TOGETHER and _may_be_flat(two) else None for one, two in rows]
    keys = [home and (home, two.device) for home, (_, two) in zip(homes, rows, strict=True)]
    most = _TOGETHER if home is None else _BLOCK
    parts = [members for _, members in groups([one for one, _ in rows], keys, most)]
    sides = (_sides([rows[index] for index in members], home) for members in parts)
    if home is None:
        differ = values_of([_mark(*pair).any() for pair in sides])
    else:
        differ = [not _same_on_host(*pair) for pair in sides]
    found: list[int] = []
    for members in compress(parts, differ):
        mark = _mark(*_sides([rows[index] for index in members], home))
        marked = mark.flatten().split([ones[index].numel() for index in members])
        found += [index for index, part in zip(members, marked, strict=True) if part.any()]
    return sorted(found)


def comparison_device(tensors: Iterable[Tensor]) -> torch.device | None:
    """Return the CPU device if comparing these tensors with others of equal sizes is faster there, else None."""
    return torch.device("cpu") if sum(t.nbytes for t in tensors if not _is_on_host(t)) <= FEW else None


def _sides(rows: Sequence[tuple[Tensor, Tensor]], home: torch.device | None) -> tuple[Tensor, Tensor]:
    """Return both sides of the rows on one device (``home``, if given), concatenated if there are several rows."""
    ones = [one for one, _ in rows]
    one = flat(ones) if rows[1:] else ones[0]
    # A blocking copy to the host also waits for earlier asynchronous copies, such as those that made ``twos``.
    one = one.to(home or one.device)
    twos = [two if home else two.to(one.device, non_blocking=not one.is_cpu) for _, two in rows]
    two = flat(twos) if rows[1:] else twos[0]
    return one, two.to(one.device)


def _mark(one: Tensor, two: Tensor) -> Tensor:
    """Return a mask of the elements that differ in bits."""
    mark = bits(one) != bits(two)
    return mark.any(-1) if one.is_complex() else mark


def _same_on_host(one: Tensor, two: Tensor) -> bool:
    one, two = bits(one), bits(two)
    if one.numel() <= _PIECE:
        return torch.equal(one, two)
    return all(map(torch.equal, *(side.reshape(-1).split(_PIECE) for side in (one, two))))


def values_of(scalars: Sequence[Tensor]) -> list[Any]:
    """Return the values of scalar tensors of one dtype, with one host synchronization per device."""
    found: dict[int, Any] = {}
    for device in dict.fromkeys(scalar.device for scalar in scalars):
        here = [index for index, scalar in enumerate(scalars) if scalar.device == device]
        found.update(zip(here, torch.stack([scalars[index] for index in here]).tolist(), strict=True))
    return [found[index] for index in range(len(scalars))]
