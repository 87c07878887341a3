"""Copies of many tensors, their way back, and their comparison, each with few launches.

A step has hundreds of small tensors (biases, moments, step counters), and on a device a launch takes longer than what
it does to one of them. So small ones of one dtype and device are handled together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from graphplan.environment.devices import is_accelerator
from graphplan.tensors.attributes import PLAIN_KINDS

_SMALL, _TOGETHER = 2**22, 2**24
"""Most bytes of a tensor that is compared together with others, and of all of these, of which that takes two copies."""
_COPIED = 2**28
"""Bytes of the copies that are one piece of memory."""
_is_on_host = attrgetter("is_cpu")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def bits(tensor: Tensor) -> Tensor:
    """``tensor`` as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    elif tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.dtype in _INTEGERS or tensor.is_quantized else tensor.view(_BITS[tensor.element_size()])


def _find_memcmp() -> Callable[[int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None).memcmp
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return found


_memcmp = _find_memcmp()
"""The function in C, where there is one: ``torch.equal`` takes twice as long for large tensors, and five times as long
with what it takes to see small ones as integers.
"""


def _are_equal_on_host(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors on the host have the same bits, which have the same shape and dtype."""
    if _memcmp is not None and _is_plain(one) and _is_plain(two) and not one.is_quantized:
        return _memcmp(one.data_ptr(), two.data_ptr(), one.nbytes) == 0
    return torch.equal(bits(one), bits(two))


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors on one device have the same shape, dtype and bits, if there are any."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return first.is_meta or torch.equal(bits(first), bits(second))


_flat = torch._C._nn.flatten_dense_tensors
_unflat = torch._C._nn.unflatten_dense_tensors


def _is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` can lie beside others in a flat one."""
    if type(tensor) not in PLAIN_KINDS or tensor.layout is not torch.strided:
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _home(tensor: Tensor) -> Hashable | None:
    # On the host there are no launches.
    return (tensor.device, tensor.dtype) if not _is_on_host(tensor) and _is_plain(tensor) else None


def _groups(tensors: Sequence[Tensor], keys: Iterable[Hashable | None], most: int) -> Iterator[tuple[bool, list[int]]]:
    """Positions of tensors that belong together by their keys, in at most ``most`` bytes, and whether they do; those
    without a key alone.
    """
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
def copy_all(tensors: Sequence[Tensor], device: torch.device | None = None) -> list[Tensor]:
    """Detached copies, beside the tensors or on ``device``. Those of one dtype share memory with each other.

    What lies on the host stays there: on its way to a device all would wait for that. Copies from a device to the host
    are in pinned memory and not waited for: the host has to wait for the stream before it reads them.
    """
    copies: list[Tensor] = list(tensors)
    leave = [not (device is None or tensor.is_cpu or tensor.device == device) for tensor in tensors]
    # What goes elsewhere is put together first, which takes room here.
    for are_plain, members in _groups(tensors, map(_home, tensors), _TOGETHER if any(leave) else _COPIED):
        originals, leaves = [tensors[index] for index in members], leave[members[0]]
        if not are_plain or len(members) == 1:
            copies[members[0]] = _moved(originals[0], device) if leaves else originals[0].clone()
            continue
        flat = _moved(_flat(originals), device) if leaves else _flat(originals)
        for index, part in zip(members, _unflat(flat, originals), strict=True):
            copies[index] = part
    return copies


def _moved(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A copy on another device; on the host in pinned memory, which is faster and which torch keeps for later ones."""
    is_pinned = device is not None and device.type == "cpu" and is_accelerator(tensor.device)
    is_plain = type(tensor) in PLAIN_KINDS and tensor.layout is torch.strided
    # A conjugate is resolved on the host, which would have to wait for the copy.
    if not (is_pinned and is_plain) or tensor.is_conj() or tensor.is_neg():
        return tensor.to(device, copy=True)
    return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor, non_blocking=True)


def beside(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """``tensors`` on ``device``. Neighbours in memory elsewhere, as :func:`copy_all` leaves them, are one copy."""
    if all(tensor.device == device for tensor in tensors):
        return list(tensors)
    runs: list[list[Tensor]] = []
    for tensor in tensors:
        if runs and _follows(tensor, runs[-1][-1]):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    found: list[Tensor] = []
    for run in runs:
        whole = run[0].as_strided((sum(tensor.numel() for tensor in run),), (1,)) if run[1:] else run[0]
        there = whole.to(device, non_blocking=device.type != "cpu")
        found += _unflat(there, run) if run[1:] else [there]
    return found


def _follows(tensor: Tensor, before: Tensor) -> bool:
    """Whether ``tensor`` lies right behind ``before`` in one piece of memory."""
    if tensor.dtype != before.dtype or not (tensor.is_contiguous() and before.is_contiguous()):
        return False
    is_next = before.storage_offset() + before.numel() == tensor.storage_offset()
    return is_next and tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()


@torch.no_grad()
def write_all(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy ``values`` into ``targets`` of the same shapes and dtypes."""
    # Tensors from inference mode may not be written to outside of it, other tensors on their memory may.
    targets = [target.detach() if target.is_inference() else target for target in targets]
    here = [index for index, t in enumerate(targets) if _is_on_host(t) and type(t) in PLAIN_KINDS]
    if here:
        torch._foreach_copy_([targets[index] for index in here], [values[index] for index in here])
        rest = sorted(set(range(len(targets))) - set(here))
        targets, values = [targets[index] for index in rest], [values[index] for index in rest]
    # What comes from elsewhere takes room here on its way.
    most = _TOGETHER if any(map(_is_on_host, values)) else _COPIED
    for are_plain, members in _groups(targets, map(_home, targets), most):
        if are_plain:
            there = beside([values[i] for i in members], targets[members[0]].device)
            torch._foreach_copy_([targets[i] for i in members], there)
        else:
            target = targets[members[0]]
            target.copy_(values[members[0]], non_blocking=not target.is_cpu)


class Unequal:
    """Where two rows of tensors of the same shapes and dtypes differ in bits. Devices compare on after the constructor;
    :meth:`places` waits. One of two tensors may lie elsewhere: what a device has is compared there.
    """

    @torch.no_grad()
    def __init__(self, ones: Sequence[Tensor], twos: Sequence[Tensor]) -> None:
        rows = [(two, one) if _is_on_host(one) else (one, two) for one, two in zip(ones, twos, strict=True)]
        self._ones, self._twos = [one for one, _ in rows], [two for _, two in rows]
        here = {index for index, (one, _) in enumerate(rows) if _is_on_host(one)}
        self._groups = _on_devices(self._ones, self._twos) if len(here) < len(rows) else []
        self._flags = [_mark(self._ones, self._twos, members).any() for members in self._groups]
        # Each is compared alone, up to its first difference.
        self._found = [index for index in here if not _are_equal_on_host(*rows[index])]

    @torch.no_grad()
    def places(self) -> list[int]:
        """Positions in the rows. Each device is waited for once, or twice if small tensors differ."""
        ones, twos, flags = self._ones, self._twos, values_of(self._flags)
        suspects = [members for members, differ in zip(self._groups, flags, strict=True) if differ]
        found = self._found + [members[0] for members in suspects if len(members) == 1]
        several = [members for members in suspects if len(members) > 1]
        for members, ends in zip(several, values_of([_ends(ones, twos, members) for members in several]), strict=True):
            found += [index for index, one, two in zip(members, [0, *ends], ends, strict=False) if one != two]
        return sorted(found)


def _on_devices(ones: Sequence[Tensor], twos: Sequence[Tensor]) -> list[list[int]]:
    """Positions of the tensors that are compared together, without what lies on the host."""
    homes = [_home(one) if one.nbytes <= _SMALL else None for one in ones]
    keys = [(home, two.device) if home and _is_plain(two) else None for home, two in zip(homes, twos, strict=True)]
    groups = (members for _, members in _groups(ones, keys, _TOGETHER))
    return [members for members in groups if not _is_on_host(ones[members[0]])]


def _mark(ones: Sequence[Tensor], twos: Sequence[Tensor], members: list[int]) -> Tensor:
    """Which elements have other bits, those of several tensors one after the other."""
    one = [ones[index] for index in members]
    two = beside([twos[index] for index in members], one[0].device)
    mark = bits(_flat(one)) != bits(_flat(two)) if members[1:] else bits(one[0]) != bits(two[0])
    return mark.any(-1) if one[0].is_complex() else mark


def _ends(ones: Sequence[Tensor], twos: Sequence[Tensor], members: list[int]) -> Tensor:
    """How many elements differ up to the end of each tensor."""
    mark = _mark(ones, twos, members)
    ends = torch.tensor([ones[index].numel() for index in members], device=mark.device).cumsum(0)
    return torch.cat([mark.new_zeros(1, dtype=torch.int64), mark.cumsum(0)])[ends]


def values_of(tensors: Sequence[Tensor]) -> list[Any]:
    """What tensors of a few elements hold, numbers or lists of them; each device is waited for once."""
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    here = {d: torch.cat([t.view(-1) for t in tensors if t.device == d]).tolist() for d in devices}
    found: list[Any] = []
    for tensor in tensors:
        values, size = here[tensor.device], tensor.numel()
        found.append(values[:size] if tensor.dim() else values[0])
        del values[:size]
    return found
