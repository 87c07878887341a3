"""Tensors and modules that are spread over processes: DTensors, and modules that FSDP2 (``fully_shard``) shards.

A DTensor has no memory of its own: its shard is another tensor, and that is what operators work on. A module under
FSDP2 gathers its parameters into memory that it takes and gives back as it needs it, and notes how far it has come.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None), Enum)


def _kind(module: str, name: str) -> Any:
    """A class of torch.distributed's, or nothing: before somebody has imported it, nothing can be of it."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor."""
    return isinstance(tensor, _kind("torch.distributed.tensor", "DTensor"))


def local(tensor: Tensor) -> Tensor:
    """The tensor that has ``tensor``'s memory: a DTensor's shard in this process, any other tensor itself."""
    if type(tensor) is Tensor or not is_sharded(tensor):
        return tensor
    shard: Tensor = attrgetter("_local_tensor")(tensor)
    return shard


def is_wrapped(types: Iterable[type]) -> bool:
    """Whether an operator gets tensors that stand for others (by their types): their own dispatch calls operators on
    those, and whoever watches operators is to see these.
    """
    wrappers = (
        _kind("torch.distributed.tensor", "DTensor"),
        _kind("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    )
    return any(issubclass(kind, wrappers) for kind in types)


def is_imagined() -> bool:
    """Whether operators compute nothing at the moment: DTensors learn so what the shape of a result will be."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class Sharding:
    """What FSDP2 does with some modules: the memory that it gathers into, its settings, and its notes.

    At rest, between steps, parameters are sharded and nothing is gathered.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kind = _kind("torch.distributed.fsdp", "FSDPModule")
        self._modules: list[Any] = [module for module in modules if isinstance(module, kind)]
        states = [module._get_fsdp_state() for module in self._modules]
        self._states = list({id(state): state for state in states}.values())
        self._groups = [group for state in self._states for group in _groups_of(state)]
        self._params = [param for group in self._groups for param in group.fsdp_params]
        self._settings = [(thing, _reader(thing)) for thing in (*self._states, *self._groups)]

    def settle(self) -> None:
        """Come to rest. What was gathered outside a training step, by a validation for instance, goes: the next step
        gathers the same values again.
        """
        for module in self._modules:
            module.reshard()

    def gathered(self) -> Iterator[Tensor]:
        """Memory that it gathers parameters into. At rest there is nothing in it."""
        for param in self._params:
            yield from param.all_gather_outputs
            yield from getattr(param, "_unsharded_inner_tensors", ())

    def holds_gradients(self) -> bool:
        """Whether it keeps gradients that it did not reduce yet, where no owner shows them."""
        partial = (getattr(group, "_partial_reduce_output", None) for group in self._groups)
        accumulated = (param.unsharded_accumulated_grad for param in self._params)
        own = (getattr(getattr(param, "_unsharded_param", None), "grad", None) for param in self._params)
        return any(held is not None for kept in (partial, accumulated, own) for held in kept)

    def values(self) -> tuple[Any, ...]:
        """What its code branches on, and whether it holds gradients."""
        if not self._modules:
            return ()
        read = (value for thing, reader in self._settings for value in reader(thing))
        plain = (value if isinstance(value, _PLAIN) else id(value) for value in read)
        return (*plain, self.holds_gradients())

    def containers(self) -> Iterator[Any]:
        """Dictionaries, lists and sets that its notes lie in."""
        shared = (getattr(state, name, None) for state in self._states for name in ("_state_ctx", "_comm_ctx"))
        things = {id(t): t for t in (*self._states, *self._groups, *self._params, *shared) if t is not None}
        for thing in things.values():
            yield vars(thing)
            yield from (value for value in vars(thing).values() if type(value) in (dict, list, set))


def _groups_of(state: Any) -> Sequence[Any]:
    """The groups of parameters that are gathered together; older versions have at most one for each module."""
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def _reader(thing: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Reads the plain values among the attributes of ``thing``, of which there are many."""
    return attrgetter(*(name for name, value in vars(thing).items() if isinstance(value, _PLAIN)))
