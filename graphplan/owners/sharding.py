"""Modules that FSDP2 (``fully_shard``) shards: they gather parameters when they need them, and keep notes in Python."""

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
    """The memory that FSDP2 gathers parameters of modules into, its settings and notes. At rest nothing is gathered."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kind = loaded("torch.distributed.fsdp", "FSDPModule")
        self._modules: list[Any] = [module for module in modules if isinstance(module, kind)]
        states = [module._get_fsdp_state() for module in self._modules]
        self._states = list({id(state): state for state in states}.values())
        self._groups = [group for state in self._states for group in _groups_of(state)]
        self._params = [param for group in self._groups for param in group.fsdp_params]

    @cached_property
    def _settings(self) -> Column:
        """The plain values among the attributes of its notes, of which there are many."""
        spaces = [(type(thing).__name__, vars(thing)) for thing in (*self._states, *self._groups)]
        settings = ((kind, space, name) for kind, space in spaces for name in space if isinstance(space[name], _PLAIN))
        return Column("same_values", [(f"{kind}.{name}", space, name) for kind, space, name in settings])

    @property
    def is_there(self) -> bool:
        """Whether any module is sharded."""
        return bool(self._modules)

    def settle(self) -> None:
        """Come to rest: drop what was gathered outside a training step, by a validation for instance."""
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

    def labels(self) -> list[str]:
        """Names for :meth:`values`."""
        return [*self._settings.paths, "gradients held by fully_shard"] if self._modules else []

    def values(self) -> tuple[Any, ...]:
        """What its code branches on, and whether it holds gradients."""
        if not self._modules:
            return ()
        plain = (value if isinstance(value, _PLAIN) else id(value) for value in self._settings.read())
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


def come_to_rest(owners: Mapping[str, Any]) -> tuple[Sharding, Walk]:
    """Have the modules among ``owners`` that FSDP2 shards come to rest; what a walk finds there."""
    walk = walk_owners(owners)
    sharding = Sharding(walk.modules)
    sharding.settle()
    # What was gathered lay in other places.
    return sharding, walk_owners(owners) if sharding.is_there else walk
