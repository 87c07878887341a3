"""Modules that FSDP2 (``fully_shard``) shards: they gather parameters on demand, and keep their state in Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from graphplan.compare.comparing import Column
from graphplan.owners.slots import Walk
from graphplan.owners.walk import walk_owners
from graphplan.tensors.dtensors import loaded

_PLAIN = (bool, int, float, str, type(None), Enum)


class Sharding:
    """FSDP2's memory for gathered parameters of ``modules``, its settings and its state."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kind = loaded("torch.distributed.fsdp", "FSDPModule")
        self._modules: list[Any] = [module for module in modules if isinstance(module, kind)]
        states = [module._get_fsdp_state() for module in self._modules]
        self._states = list({id(state): state for state in states}.values())
        self._groups = [group for state in self._states for group in _groups_of(state)]
        self._params = [param for group in self._groups for param in group.fsdp_params]

    @cached_property
    def _settings(self) -> Column:
        """The plain values among the attributes of FSDP2's state objects. There are many attributes."""
        spaces = [(type(thing).__name__, vars(thing)) for thing in (*self._states, *self._groups)]
        settings = ((kind, space, name) for kind, space in spaces for name in space if isinstance(space[name], _PLAIN))
        return Column("same_values", [(f"{kind}.{name}", space, name) for kind, space, name in settings])

    @property
    def is_there(self) -> bool:
        """Whether any module is sharded."""
        return bool(self._modules)

    def settle(self) -> None:
        """Reshard the modules: free parameters that were gathered outside a training step, such as by a validation."""
        for module in self._modules:
            module.reshard()

    def gathered(self) -> Iterator[Tensor]:
        """Yield the tensors that parameters are gathered into. After :meth:`settle` they hold nothing."""
        for param in self._params:
            yield from param.all_gather_outputs
            yield from getattr(param, "_unsharded_inner_tensors", ())

    def holds_gradients(self) -> bool:
        """Return True if FSDP2 holds gradients that it has not reduced yet, which no walk over owners finds."""
        partial = (getattr(group, "_partial_reduce_output", None) for group in self._groups)
        accumulated = (param.unsharded_accumulated_grad for param in self._params)
        own = (getattr(getattr(param, "_unsharded_param", None), "grad", None) for param in self._params)
        return any(held is not None for kept in (partial, accumulated, own) for held in kept)

    def labels(self) -> list[str]:
        """Return the names of :meth:`values`."""
        return [*self._settings.paths, "gradients held by fully_shard"] if self._modules else []

    def values(self) -> tuple[Any, ...]:
        """Return the values that FSDP2's code branches on, and whether it holds gradients."""
        if not self._modules:
            return ()
        plain = (value if isinstance(value, _PLAIN) else id(value) for value in self._settings.read())
        return (*plain, self.holds_gradients())

    def containers(self) -> Iterator[Any]:
        """Yield the dictionaries, lists and sets that hold FSDP2's state."""
        shared = (getattr(state, name, None) for state in self._states for name in ("_state_ctx", "_comm_ctx"))
        things = {id(t): t for t in (*self._states, *self._groups, *self._params, *shared) if t is not None}
        for thing in things.values():
            yield vars(thing)
            yield from (value for value in vars(thing).values() if type(value) in (dict, list, set))


def _groups_of(state: Any) -> Sequence[Any]:
    """Return the groups of parameters that are gathered together. Older versions have at most one per module."""
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def reshard_and_walk(owners: Mapping[str, Any]) -> tuple[Sharding, Walk]:
    """Reshard the FSDP2 modules among ``owners``. Return their sharding and a walk over the owners afterwards."""
    walk = walk_owners(owners)
    sharding = Sharding(walk.modules)
    sharding.settle()
    # Walk again: gathered parameters were in other places.
    return sharding, walk_owners(owners) if sharding.is_there else walk
