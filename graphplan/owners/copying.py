"""Copies of many tensors, their way back, and their comparison, each with few launches.

A step has hundreds of small tensors (biases, moments, step counters), and on a device a launch takes longer than what
it does to one of them. So small ones of one dtype and device are handled together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

_SMALL, _TOGETHER = 2**22, 2**24
"""Bytes of a tensor that is handled with others, and of all of those: the others take longer than their launch, and a
comparison needs two more copies of what is compared together.
"""
_WITHOUT_LAUNCHES = frozenset({"cpu"})
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """``tensor`` as integers, so that NaN equals NaN and 0.0 differs from -0.0."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors on one device have the same shape, dtype and bits."""
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(bits(first), bits(second))


def _is_small(tensor: Tensor) -> bool:
    """Whether ``tensor`` can lie beside others in a flat one, and had better: on the host there are no launches."""
    if tensor.device.type in _WITHOUT_LAUNCHES:
        return False
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.is_contiguous()
    return plain and tensor.nbytes <= _SMALL and not (tensor.is_conj() or tensor.is_neg())


def _groups(tensors: Sequence[Tensor], keys: Iterable[Hashable | None]) -> Iterator[tuple[bool, list[int]]]:
    """Positions of tensors that belong together by their keys, and whether they do; those without a key alone."""
    together: dict[Hashable, list[int]] = {}
    sizes: Counter[Hashable] = Counter()
    for index, (tensor, key) in enumerate(zip(tensors, keys, strict=True)):
        if key is None:
            yield False, [index]
            continue
        if sizes[key] + tensor.nbytes > _TOGETHER:
            sizes[key] = 0
            yield True, together.pop(key)
        together.setdefault(key, []).append(index)
        sizes[key] += tensor.nbytes
    yield from ((True, members) for members in together.values())


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.view(-1) for tensor in tensors])


def _home(tensor: Tensor) -> Hashable | None:
    return (tensor.device, tensor.dtype) if _is_small(tensor) else None


@torch.no_grad()
def copy_all(tensors: Sequence[Tensor], device: torch.device | None = None) -> list[Tensor]:
    """Detached copies, beside the tensors or on ``device``. Small ones share memory with each other."""
    copies: list[Tensor] = list(tensors)
    for are_small, members in _groups(tensors, map(_home, tensors)):
        if not are_small:
            (index,) = members
            tensor = tensors[index].detach()
            copies[index] = tensor.clone() if device is None else tensor.to(device, copy=True)
            continue
        flat = _flat(tensors[index] for index in members)
        parts = flat.to(device if device is not None else flat.device).split([tensors[i].numel() for i in members])
        for index, part in zip(members, parts, strict=True):
            copies[index] = part.view(tensors[index].shape)
    return copies


@torch.no_grad()
def write_all(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy ``values`` into ``targets`` of the same shapes and dtypes."""
    for are_small, members in _groups(targets, map(_home, targets)):
        if are_small:
            torch._foreach_copy_([targets[i].detach() for i in members], [values[i] for i in members])
        else:
            targets[members[0]].detach().copy_(values[members[0]])


@torch.no_grad()
def unequal(ones: Sequence[Tensor], twos: Sequence[Tensor]) -> list[int]:
    """Where two rows of tensors, of the same shapes and dtypes, have not the same bits.

    Each device of ``ones`` is waited for once, or twice if small tensors differ; ``twos`` may lie elsewhere.
    """
    pairs = zip(ones, twos, strict=True)
    keys = [(_home(one), two.device) if _is_small(one) and _is_small(two) else None for one, two in pairs]
    groups = [members for _, members in _groups(ones, keys)]
    suspects = [groups[place] for place in _marked(_sides(ones, twos, members) for members in groups)]
    several = [index for members in suspects if len(members) > 1 for index in members]
    found = [members[0] for members in suspects if len(members) == 1]
    found += [several[place] for place in _marked(_sides(ones, twos, [index]) for index in several)]
    return sorted(found)


def _sides(ones: Sequence[Tensor], twos: Sequence[Tensor], members: list[int]) -> tuple[Tensor, Tensor]:
    if len(members) == 1:
        one, two = ones[members[0]], twos[members[0]].detach()
    else:
        one, two = _flat(ones[index] for index in members), _flat(twos[index] for index in members)
    return one, two.to(one.device)


def _marked(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[int]:
    """Positions of pairs that are not the same bits."""
    found: list[int] = []
    flags: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for place, (one, two) in enumerate(pairs):
        if one.device.type == "cpu":
            found += [] if torch.equal(bits(one), bits(two)) else [place]
        else:
            flags.setdefault(one.device, []).append((place, (bits(one) != bits(two)).any()))
    for marked in flags.values():
        differ = torch.stack([flag for _, flag in marked]).tolist()
        found += [place for (place, _), differs in zip(marked, differ, strict=True) if differs]
    return found
