"""Copies of everything that owners hold, to restore it after a rehearsal or a refusal."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor

from graphplan.environment.devices import default_generators, set_generator
from graphplan.environment.switches import read_all, set_all
from graphplan.errors import CaptureError, EffectError
from graphplan.owners.contents import has_contents, kept
from graphplan.owners.generators import HostGenerators
from graphplan.owners.sharding import Sharding
from graphplan.owners.slots import Container, Walk, is_optimizer_state
from graphplan.owners.tensor_metadata import ABSENT
from graphplan.owners.views import ComputedItem, contents
from graphplan.tensors.attributes import PLAIN_KINDS, has_memory, has_own_operators, is_freed
from graphplan.tensors.copying import copy_all, copy_into, unequal
from graphplan.tensors.storages import put_back, storage_id

_as_memory = torch._C.DisableTorchFunctionSubclass
"""Ignore ``__torch_function__`` of tensor subclasses while copying: it may raise, such as for an outdated result."""


class Snapshot:
    """Copies of owners' containers, gradients, modes, ``requires_grad`` flags, the values of their tensors and of
    ``extra`` (or of ``tensors`` instead), torch's switches unless ``within`` a step, and the states of torch's default
    generators, Python's, NumPy's and ``generators``. Copies are on the tensors' devices, or on ``device`` except for
    ``beside`` bytes. ``uncopied`` are tensors whose values the caller restores, or that keep them: only their memory
    is restored. ``without`` names attributes that exist now and that ``restore`` removes.
    """

    def __init__(
        self,
        walk: Walk,
        *,
        extra: Iterable[Tensor] = (),
        tensors: Iterable[Tensor] | None = None,
        generators: Iterable[torch.Generator] = (),
        device: torch.device | None = None,
        beside: float = 0,
        uncopied: Iterable[Tensor] = (),
        without: Sequence[str] = (),
        within: bool = False,
    ) -> None:
        containers = [*walk.containers, *Sharding(walk.modules).containers()]
        self._copies: list[tuple[Container, Any]] = [(c, _shallow(c, without)) for c in containers]
        self._places = [(space, key, space[key]) for space, key in walk.places]
        if tensors is None:
            # Tensors that only a name in code leads to may be a dataset: callers pass those they need as ``extra``.
            found = walk.found
            slots = [t for slot in walk.slots.values() for t in slot.tensors() if not (found and id(t) in found)]
            tensors = [*slots, *extra]
        each = list({id(t): t for t in tensors}.values())
        kept_alive = {id(tensor): tensor for tensor in uncopied}
        # A scripted module keeps its mode in C++.
        self._modes = [(m, m.training) for m in walk.modules if "training" not in vars(m) and hasattr(m, "training")]
        self._switches = None if within else read_all()
        with _as_memory():
            # Including tensors that do not require gradients: the step may change that.
            leaves = [*(param for _, param in walk.parameters.values()), *(tensor for tensor in each if tensor.is_leaf)]
            self._grads = [(leaf, leaf.requires_grad, leaf.grad) for leaf in leaves]
            # Expanded tensors are left out: neither the step nor a restore can write to them.
            self._aliases = [(tensor, tensor.detach()) for tensor in kept_alive.values()]
            live = [tensor for tensor in each if id(tensor) not in kept_alive and _is_copied(tensor)]
            _check_copies(walk, live)
            copies = copy_all(live, device, beside)
        self._tensors = {id(t): (t, copy) for t, copy in zip(live, copies, strict=True)}
        of_torch = [(partial(set_generator, g), g.get_state()) for g in (*default_generators(), *generators)]
        told = (scalar.container for scalar in walk.scalars.values() if type(scalar.container) is ComputedItem)
        of_owners = [kept(place.items) for place in told if place.read is contents and has_contents(place.items)]
        self._generators: list[tuple[Callable[[Any], object], Any]] = [*of_torch, *HostGenerators().states, *of_owners]

    @property
    def storages(self) -> set[int | None]:
        """Storages of the tensors that were copied."""
        return {storage_id(tensor) for tensor, _ in self._tensors.values()}

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the value that ``tensor`` had when the snapshot was made; None if it was not copied."""
        found = self._tensors.get(id(tensor))
        return None if found is None else found[1]

    def restore(self, changed: Collection[int | None] = ()) -> None:
        """Restore everything. Tensors keep identity and storage. ``changed`` are storages whose values differ."""
        try:
            self._restore(changed)
        except Exception as error:
            raise EffectError(
                f"{type(error).__name__} while a step was undone: {str(error)[:200]}. The owners are neither in the "
                "state before the step nor in the state after it: continue from a checkpoint, and keep objects whose "
                "items cannot be set out of the owners and arguments"
            ) from error

    def _restore(self, changed: Collection[int | None]) -> None:
        for container, copy in self._copies:
            _put_back(container, copy)
        for space, key, value in self._places:
            if space[key] is not value:
                space[key] = value
        with _as_memory():
            for leaf, asks, grad in self._grads:
                if leaf.requires_grad is not asks and leaf.is_leaf:
                    leaf.requires_grad = asks
                if leaf.grad is not grad:
                    leaf.grad = grad
            for tensor, before in self._aliases:
                put_back(tensor, before)
            self._write_values(changed)
        for module, training in self._modes:
            module.training = training
        if self._switches is not None:
            set_all(self._switches)
        for set_state, state in self._generators:
            set_state(state)

    def _write_values(self, changed: Collection[int | None]) -> None:
        # Unchanged memory is not written, as it may be read-only (a mapped file); FSDP2 may have freed some.
        pairs = [pair for pair in self._tensors.values() if not is_freed(pair[0])]
        for live, copy in pairs:
            if (live.shape, live.dtype) != (copy.shape, copy.dtype):
                # The step gave it memory of another shape or dtype (``tensor.data = ...``).
                live.data = torch.empty_like(copy, device=live.device)
        open_: list[tuple[Tensor, Tensor]] = []
        written: list[tuple[Tensor, Tensor]] = []
        for pair in pairs:
            (open_ if pair[0].is_cpu and storage_id(pair[0]) not in changed else written).append(pair)
        written += [open_[index] for index in unequal([live for live, _ in open_], [copy for _, copy in open_])]
        copy_into([live for live, _ in written], [copy for _, copy in written])


def _is_copied(tensor: Tensor) -> bool:
    # ``has_memory`` comes first: without values, a tensor may not have a layout or strides to read.
    return has_memory(tensor) and tensor.layout is torch.strided and 0 not in tensor.stride() and not is_freed(tensor)


def _check_copies(walk: Walk, tensors: Iterable[Tensor]) -> None:
    """Refuse tensors whose class does not support copies."""
    for tensor in tensors:
        if type(tensor) in PLAIN_KINDS or not has_own_operators(tensor):
            continue
        try:
            tensor.detach().clone()
        except Exception as error:
            path = next((path for path, slot in walk.slots.items() if slot.get() is tensor), "an argument")
            raise CaptureError(
                f"{path} is of type {type(tensor).__name__}, which cannot be copied ({str(error)[:200]}): graphplan "
                "has to undo a step whose trace or capture fails. Move the code that uses it out of the step (for an "
                "optimizer with such state, optimizer.step(); in a Trainer, graphplan does this)",
                component="optimizer" if is_optimizer_state(path) else "step",
            ) from error


_BUILT_IN: tuple[Any, ...] = (OrderedDict, dict, set, list, deque)


def _kind(container: Container) -> Any:
    """Return the built-in class whose methods access ``container`` without the user's code, which may raise."""
    if type(container) is dict:
        return dict
    return next((kind for kind in _BUILT_IN if issubclass(type(container), kind)), type(container))


def _shallow(container: Container, without: Sequence[str]) -> Any:
    kind = _kind(container)
    if kind in (set, list, deque):
        return (set if kind is set else list)(kind.__iter__(container))
    if type(container) in (dict, defaultdict) and not without:
        # A copy does not hash the keys: the hash of a tensor is computed in Python.
        return dict.copy(container)  # type: ignore[arg-type]
    return {key: value for key, value in kind.items(container) if key not in without}


def _put_back(container: Any, copy: Any) -> None:
    kind = _kind(container)
    if kind is set:
        kind.intersection_update(container, copy)
        kind.update(container, copy)
    elif kind in (list, deque):
        if kind.__len__(container) != len(copy) or any(map(is_not, kind.__iter__(container), copy)):
            kind.clear(container)
            kind.extend(container, copy)
    elif not (type(container) is dict and _holds_the_same(container, copy)):
        # Most dictionaries are unchanged, and do not get here.
        for key in [key for key in kind.__iter__(container) if key not in copy]:
            kind.__delitem__(container, key)
        for key, value in copy.items():
            if kind.get(container, key, ABSENT) is not value:
                kind.__setitem__(container, key, value)


def _holds_the_same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))
