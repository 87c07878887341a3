"""Flatten whatever a training step may touch into path → value, and compare two such records bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


def flatten(**values: Any) -> dict[str, Any]:
    """Flatten any objects the way that rigs are flattened."""
    facts: dict[str, Any] = {}
    for name, value in values.items():
        walk(name, value, facts, set())
    return facts


def walk(path: str, value: Any, facts: dict[str, Any], seen: set[int]) -> None:
    """Add what is reachable from ``value`` to ``facts``, visiting every object once."""
    if isinstance(value, Tensor):
        _walk_tensor(path, value, facts)
    elif isinstance(value, SCALARS):
        facts[path] = value
    elif isinstance(value, Mapping):
        facts[f"{path}.keys"] = [str(key) for key in value]
        for key, item in value.items():
            walk(f"{path}[{key!r}]", item, facts, seen)
    elif isinstance(value, Sequence | set):
        facts[f"{path}.len"] = len(value)
        for index, item in enumerate(value):
            walk(f"{path}[{index}]", item, facts, seen)
    elif id(value) not in seen:
        seen.add(id(value))
        _walk_object(path, value, facts, seen)


def _walk_tensor(path: str, tensor: Tensor, facts: dict[str, Any]) -> None:
    facts[path] = _own(tensor)
    facts[f"{path}.requires_grad"] = tensor.requires_grad
    if tensor.is_leaf:
        facts[f"{path}.grad"] = None if tensor.grad is None else _own(tensor.grad)


def _own(tensor: Tensor) -> Tensor:
    """A copy of what this process has of ``tensor``."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _walk_object(path: str, value: Any, facts: dict[str, Any], seen: set[int]) -> None:
    if isinstance(value, Optimizer):
        parameters = [p for group in value.param_groups for p in group["params"]]
        walk(f"{path}.state", {i: value.state[p] for i, p in enumerate(parameters) if p in value.state}, facts, seen)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in value.param_groups]
        walk(f"{path}.param_groups", groups, facts, seen)
        return
    if isinstance(value, nn.Module):
        for slots in (value._parameters, value._buffers, value._modules):
            for name, item in slots.items():
                walk(f"{path}.{name}", item, facts, seen)
    if isinstance(value, nn.Module) or is_dataclass(value) or type(value).__module__.startswith("tests."):
        for name, item in vars(value).items():
            if not name.startswith("_") and not callable(item):
                walk(f"{path}.{name}", item, facts, seen)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same geometry and the same bits (so -0.0 is not 0.0)."""
    if (left.dtype, left.shape, left.device) != (right.dtype, right.shape, right.device):
        return False
    if left.is_meta:
        return True
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return left.layout is right.layout and same_bits(left.to_dense(), right.to_dense())
    flat = [side.detach().contiguous().reshape(-1).view(torch.uint8) for side in (left, right)]
    return torch.equal(flat[0], flat[1])


def difference(expected: Any, found: Any) -> str:
    """Say how two recorded values differ, or return the empty string."""
    if type(expected) is not type(found):
        return f"expected {expected!r} of {type(expected).__name__}, found {found!r} of {type(found).__name__}"
    if isinstance(expected, Tensor):
        if same_bits(expected, found):
            return ""
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return f"expected {expected.dtype}{[*expected.shape]}, found {found.dtype}{[*found.shape]}"
        return f"largest difference {(expected.double() - found.double()).abs().max().item():.3e}"
    if isinstance(expected, float) and expected != expected:
        return "" if found != found else f"expected nan, found {found!r}"
    return "" if expected == found else f"expected {expected!r}, found {found!r}"


def assert_same(expected: Mapping[str, Any], found: Mapping[str, Any], when: str = "") -> None:
    """Fail with the first paths whose values are missing or differ."""
    problems = [f"{path}: missing" for path in expected if path not in found]
    problems += [f"{path}: not expected" for path in found if path not in expected]
    for path in expected:
        if path in found and (text := difference(expected[path], found[path])):
            problems.append(f"{path}: {text}")
    assert not problems, f"{len(problems)} differences{when}:\n" + "\n".join(problems[:12])
