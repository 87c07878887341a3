"""Bindings that a step changes: carries, rebound slots, gradients, counters, appended items.

The recording copies a carried slot's new value into its old storage, so that each replay continues from the last.
Carries are parallel assignments (``prev = cur; cur = f(cur)``): a source inside another carry's target is cloned first.
A tensor that the step gives other memory (``q.data = ...``) is carried, too, and gets its old memory back.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import add, attrgetter, is_, is_not, setitem, sub
from sys import getrefcount
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from graphplan.compare.tensors import Addresses, geometry
from graphplan.errors import GradientError, GuardError, HostEffectError
from graphplan.feed.signature import marks_of
from graphplan.owners.flags import Flags
from graphplan.owners.slots import Items, Scalar, Slot, Walk, tensor_leaves
from graphplan.plan.plan import Plan
from graphplan.program.static_numbers import StaticNumber, StaticNumbers, renewer
from graphplan.specs.paths import Fact, Path, names
from graphplan.tensors.attributes import attributes_on, has_own_operators
from graphplan.tensors.copying import copy_into
from graphplan.tensors.deferred import NumberForm, form_of, is_deferred, value_of
from graphplan.tensors.dtensors import is_sharded, local
from graphplan.tensors.storages import copier, lay, memory_uses, places, put_back, storage_id, with_leaves

_get_grad = attrgetter("grad")
_ACCUMULATED = WeakIdKeyDictionary()
"""Gradients that some program accumulates into; several programs may refer to one."""


class _LatestBindings:
    """State of the programs that share memory: the bindings of the program that was replayed last."""

    latest: weakref.ref[Bindings] | None = None


_LATEST: WeakValueDictionary[object, _LatestBindings] = WeakValueDictionary()
"""Turns by the generation of recordings."""


@cache
def _references() -> tuple[int, int]:
    """Return ``getrefcount`` of a gradient in a local variable, first while a parameter has it, then without."""
    param = torch.empty(0, device="cpu", requires_grad=True)
    param.grad = torch.empty(0, device="cpu")
    grad = param.grad
    bound = getrefcount(grad)
    param.grad = None
    return bound, getrefcount(grad)


class _Severed(torch.autograd.Function):
    """Copy of a replay's result that requires gradients, as the eager result does, but refuses a backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, path: str) -> Tensor:
        """Copy ``tensor``, which the step leaves at ``path``."""
        ctx.path = path
        return copier(tensor)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise GradientError(
            f"a backward pass outside the step reaches {ctx.path}, which a replay left there; expected no gradients "
            "to flow back into a finished step, because a replay keeps no autograd graph. Run the whole backward pass "
            "in the step, or use a detached copy outside"
        )


def _renewing(value: Any, path: str) -> Callable[[], Any]:
    """Return a function that copies a value that the step binds or appends; ``requires_grad`` and attributes are kept.
    Refuse attributes that are no plain values.
    """

    def copier_of(tensor: Tensor) -> Callable[[], Tensor]:
        copy = partial(_Severed.apply, tensor, path) if tensor.requires_grad else copier(tensor)
        marks = dict(marks_of(tensor))
        odd = [f"{name}, a {mark.__name__}" for name, mark in marks.items() if isinstance(mark, type)]
        if odd:
            raise HostEffectError(
                f"the step leaves a tensor at {path} with the attribute {odd[0]}, which a replay cannot make anew. "
                "Keep it beside the tensor, or set it to a number or a string"
            )
        return partial(_marked, copy, marks) if marks else copy

    make = renewer(value, copier_of)
    asks = any(tensor.requires_grad for tensor in tensor_leaves(value))
    return torch.enable_grad()(make) if asks else make


def _marked(copy: Callable[[], Tensor], marks: Mapping[str, Any]) -> Tensor:
    made = copy()
    vars(made).update(marks)
    return made


class Bindings:
    """The bindings of one program. ``before`` is the walk before its recording, in which slots hold ``stand_ins``."""

    def __init__(self, plan: Plan, before: Walk, stand_ins: Mapping[str, Tensor]) -> None:
        self._plan = plan
        self._own, self._turn = weakref.ref(self), _LatestBindings()
        self._old = {path: before.slots[path].get() for path in plan.rebindings.carries}
        self._into = {path: tensor_leaves(stand_ins.get(path, old)) for path, old in self._old.items()}
        # Detached aliases keep the memory, even if the step gives the tensors other memory.
        self._memory_of = {path: [tensor.detach() for tensor in into] for path, into in self._into.items()}
        self.homes = {path: old for path, old in self._old.items() if path not in stand_ins}
        """The values in carried slots between steps."""
        self.targets = {storage_id(tensor) for into in self._into.values() for tensor in into}
        self._fresh: dict[str, Callable[[], Any] | None] = {}
        """Functions that make the value that the step leaves, by path; None if it leaves nothing."""
        self._places: dict[str, Slot | None] = {}
        self._appended: dict[str, list[Callable[[], Any]]] = {}
        lent = {path: place.get() for path in plan.symbolic if (place := before.scalars.get(path)) is not None}
        self.numbers = StaticNumbers(lent, plan.filled, plan.drawn)
        """Numbers that the step reads to bind or return them."""
        self._numbers: dict[str, StaticNumber] = {}
        self._left: dict[str, StaticNumber] = {}
        self._raised = {path for path, form in plan.numbers.items() if form.has_own}
        self._before = {path: before.scalars[path].get() for path in plan.numbers}
        self._lengths = {path: len(before.lists[path]) for path in plan.appends if path in before.lists}
        self._grads: list[tuple[Tensor, Tensor | None]] = []
        self._walk = before
        kept = {path for path, need in plan.entry_grads.items() if need == "kept"}
        self.entry_grads = {path: param.grad for path, param in before.parameters.values() if path in kept}
        """Gradients that the step accumulates into, as they are before it, since it may drop them at its end."""

    def close_step(self, after: Walk, foreign: Iterable[int | None]) -> None:
        """Record the copies at the end of a step. ``foreign`` are storages that the recording does not own."""
        outside = set(foreign) | self.targets
        new = {path: after.slots[path].get() for path in self._plan.rebindings.carries}
        for path in self._plan.rebindings.fresh:
            if not names(path, Fact.GRADIENT):
                slot = after.slots.get(path)
                value = _own(slot.get(), outside) if slot else None
                self._fresh[path] = None if value is None else _renewing(value, path)
        for path, count in self._plan.appends.items():
            items = list(after.lists[path])[-count:]
            most = getattr(after.lists[path], "maxlen", None) or sys.maxsize
            if len(after.lists[path]) != min(self._lengths[path] + count, most):
                raise _otherwise(path, "appends another number of items")
            self._appended[path] = [_renewing(_own(self.numbers.take(item), outside), path) for item in items]
        for path, own in self._before.items():
            scalar = after.scalars[path]
            # Equal small integers are one object: pass the old value only where the form uses it.
            raised = own if path in self._raised else None
            value = scalar.get()
            if not is_deferred(value) or form_of(value, raised)[0] != self._plan.numbers[path]:
                raise _otherwise(path, "keeps a number that is computed in another way")
            self._numbers[path] = self.numbers.take(value, raised)
            scalar.container[scalar.key] = own
        forms = {path: form for path, form in self._plan.left.items() if isinstance(form, NumberForm)}
        for path, value in Flags(after).read().items() if forms else ():
            if path in forms and (not is_deferred(value) or form_of(value)[0] != forms[path]):
                raise _otherwise(path, "leaves a number that is computed in another way")
            if path in forms:
                self._left[path] = self.numbers.take(value)
        for path in self._plan.counters:
            counted = after.scalars.get(path)
            if counted is not None and is_deferred(counted.get()):
                counted.container[counted.key] = value_of(counted.get())
        sources = {path: _own(value, self.targets) for path, value in new.items()}
        with torch.no_grad():
            for path, targets in self._memory_of.items():
                for target, source in zip(targets, tensor_leaves(sources[path]), strict=True):
                    target.copy_(source)
        self.numbers.close()

    def leave(self, left: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the flags that the step has ``left``, by path, with the numbers of the latest replay."""
        return {**left, **{path: number.value() for path, number in self._left.items()}} if self._left else left

    def bind_back(self, after: Walk) -> None:
        """Bind carried slots to their fixed storage, and store the gradients that the step leaves."""
        self.follow(after)
        for path, old in self._old.items():
            after.slots[path].set(old)
            for tensor, memory in zip(self._into[path], self._memory_of[path], strict=True):
                put_back(tensor, memory)
        for path, other in self._plan.rebindings.followers.items():
            after.slots[path].set(after.slots[other].get().detach())
        # Drop these references: `memory_uses` counts the users of this memory.
        self._old, self._into = {}, {}
        touched = {
            path.place for path in self._plan.rebindings.fresh if isinstance(path, Path) and path.of is Fact.GRADIENT
        }
        touched |= set(self._plan.entry_grads)
        by_path = dict(after.parameters.values())
        self._grads = [(by_path[path], by_path[path].grad) for path in sorted(touched) if path in by_path]
        _ACCUMULATED.update({grad: True for grad in self.entry_grads.values() if grad is not None})
        self._bind_grads()

    def _bind_grads(self) -> None:
        """Prepare the lists for the gradients in ``_grads``."""
        self._grad_params = [param for param, _ in self._grads]
        self._grad_values = [grad for _, grad in self._grads]
        self._written = [grad for grad in self._grad_values if grad is not None]
        self._written_params = [param for param, grad in self._grads if grad is not None]
        self._aliases = [grad.detach() for grad in self._written]
        sharded = any(map(is_sharded, self._written))
        self._memory = list(map(local, self._written)) if sharded else self._written
        self._addresses = Addresses(self._memory)
        self.grad_memory = set(map(storage_id, self._memory))
        """Storages of the gradients that the recording writes."""
        self.gradient_bytes = sum(memory.nbytes for memory in self._memory)
        self._counts = self._count()

    def _count(self) -> list[int]:
        """Count references to each gradient that is written and to its shard, except those of parameters."""
        counts = map(getrefcount, self._written)
        if self._memory is not self._written:
            counts = map(add, counts, map(getrefcount, self._memory))
        bound, alone = _references()
        if bound == alone:
            return list(counts)
        return list(map(sub, counts, map(is_, map(_get_grad, self._written_params), self._written)))

    def settle_grads(self, *, are_kept: bool = True) -> None:
        """Before a replay: return gradients that moved (``module.to``) to the memory that the recording writes. A
        gradient that the caller keeps gets other memory and a new tensor takes its place, as an eager step makes new
        ones; but not if steps accumulate into it. ``are_kept``: False if it is known that none is kept.
        """
        if not self._addresses.are_of(self._memory):
            lost = self.lost_memory()
            if lost is not None:
                raise GuardError(lost)
            lay(self._memory, map(local, self._aliases))
        if are_kept and self._count() != self._counts:
            self._release_kept()

    def share_memory(self, generation: object) -> None:
        """Share :class:`_LatestBindings` with the programs of this ``generation``."""
        self._turn = _LATEST.setdefault(generation, _LatestBindings())

    def rescue_gradients(self) -> None:
        """Before a replay: move gradients of the program replayed last out of shared memory, if this one makes none."""
        before = self._turn.latest
        if before is self._own:
            return
        self._turn.latest = self._own
        latest, written = None if before is None else before(), set(map(id, self._written_params))
        if latest is not None:
            for param, grad, memory in zip(latest._written_params, latest._written, latest._memory, strict=True):
                if param.grad is grad and id(param) not in written:
                    memory.data = memory.detach().clone()

    def grads_in_place(self) -> list[Tensor]:
        """Return the memory of gradients that lie where the recording makes new ones."""
        pairs = zip(self._written_params, self._written, strict=True)
        return [local(grad).detach() for param, grad in pairs if param.grad is grad and grad not in _ACCUMULATED]

    def take_grads(self) -> None:
        """After an eager step: move gradients that nothing else refers to into the memory that replays write."""
        taken: list[tuple[Tensor, Tensor]] = []
        for param, grad in self._grads:
            new = param.grad
            if grad is None or new is None or new is grad or type(new) is not Tensor or vars(new):
                continue
            is_alone = getrefcount(new) == _references()[0] and all(uses == 1 for uses in memory_uses([new]).values())
            if is_alone and type(grad) is Tensor and geometry(new) == geometry(grad):
                taken.append((param, grad))
        copy_into([grad for _, grad in taken], [param.grad for param, _ in taken if param.grad is not None])
        for param, grad in taken:
            param.grad = grad

    def lost_memory(self) -> str | None:
        """Describe a gradient whose memory was given back: only ``storage.resize_`` changes an alias's address."""
        if self._addresses.are_of(self._memory):
            return None
        for param, alias, pointer in zip(self._written_params, self._aliases, self._addresses.pointers, strict=True):
            if local(alias).data_ptr() != pointer:
                path = next(path for path, known in self._walk.parameters.values() if known is param)
                return f"the memory of {path}.grad was freed (untyped_storage().resize_)"
        return None

    def _release_kept(self) -> None:
        counts = self._count()
        kept = [
            number
            for number, (count, now) in enumerate(zip(self._counts, counts, strict=True))
            if now > count and self._written[number] not in _ACCUMULATED
        ]
        # Handle gradients by index: a local variable would count as a reference that keeps one.
        self._counts = counts
        if kept:
            released = {id(self._written[number]): self._aliases[number].detach() for number in kept}
            for number in kept:
                self._memory[number].data = local(self._aliases[number]).clone()
            self._grads = [(param, released.get(id(grad), grad)) for param, grad in self._grads]
            released.clear()
            self._bind_grads()

    def follow(self, walk: Walk) -> None:
        """Bind in the containers of ``walk`` from now on."""
        self._places = {path: self._place_in(walk, path) for path in self._fresh}
        self._walk = walk
        self.numbers.follow(walk)
        self._set_numbers = [partial(_set_number, walk.scalars[path], number) for path, number in self._numbers.items()]
        plan, scalars = self._plan, walk.scalars
        self._repeats: list[Callable[[], Any]] = [
            *(
                partial(_count, to.container, to.key, by)
                for path, by in plan.counters.items()
                if (to := scalars.get(path))
            ),
            *(
                partial(setitem, to.container, to.key, n)
                for path, n in plan.assignments.items()
                if (to := walk.place(path))
            ),
            self._set_fresh,
            *(partial(_append, walk.lists[path], makes) for path, makes in self._appended.items()),
            *self._set_numbers,
        ]

    def _place_in(self, walk: Walk, path: str) -> Slot | None:
        """Return the slot in which the step binds ``path``. If it is empty now (``self.cache.clear()`` before each
        step), return the former slot, or one in the container's replacement (``self.cache = {}``).
        """
        place = walk.place(path)
        before = self._places.get(path)
        if place is not None or before is None:
            return place
        container = before.container
        for holder, key, child in self._walk.links:
            if child is container:
                now = holder.get(key) if isinstance(holder, dict) else None
                return replace(before, container=now) if type(now) is type(container) else None
        return before if any(container is held for held in walk.containers) else None

    def lost_place(self) -> str | None:
        """Return a path that the step binds and that no longer leads to a slot; None if there is none."""
        lost = (path for path, place in self._places.items() if place is None and self._fresh[path] is not None)
        return next(lost, None)

    def move_homes(self, walk: Walk) -> None:
        """Set :attr:`homes` to the values in ``walk``'s carried slots."""
        self.homes = {path: walk.slots[path].get() if path in walk.slots else home for path, home in self.homes.items()}

    def homes_in_place(self) -> dict[str, Any]:
        """Return :attr:`homes`, with tensors in the recorded memory for those that another program has moved."""
        found = dict(self.homes)
        for path, home in self.homes.items():
            if places(tensor_leaves(home)) != places(self._memory_of[path]):
                found[path] = with_leaves(home, [memory.detach() for memory in self._memory_of[path]])
        return found

    def replace_recorded(self) -> None:
        """After the recorded pass has run: give owners copies of the values that a replay will overwrite."""
        self.numbers.fetch()
        for path, makes in self._appended.items():
            for number, make in enumerate(makes, -len(makes)):
                self._walk.lists[path][number] = make()
        for set_number in self._set_numbers:
            set_number()
        self._set_fresh()

    def _set_fresh(self) -> None:
        for path, make in self._fresh.items():
            slot = self._places.get(path)
            if slot is not None:
                slot.set(None if make is None else make())

    def keep_places(self, walk: Walk) -> bool:
        """Return True if ``walk``, made before :meth:`repeat`, still finds every slot after it."""
        stay = (path in walk.slots and make is not None for path, make in self._fresh.items())
        # Parameters that require gradients only within the step have no gradient slots before it.
        given = set(map(id, self._written_params))
        found = (Path.gradient(path) in walk.slots for path, param in walk.parameters.values() if id(param) in given)
        return not self._appended and all(stay) and all(found)

    def repeat(self) -> None:
        """Repeat the step's Python effects after a replay."""
        self.numbers.fetch()
        if any(map(is_not, map(_get_grad, self._grad_params), self._grad_values)):
            for param, grad in self._grads:
                param.grad = grad
        for repeat in self._repeats:
            repeat()


def _otherwise(path: str, what: str) -> HostEffectError:
    return HostEffectError(
        f"the step {what} in its capture than in its traces ({path}), because of a value that graphplan cannot see; a "
        "replay repeats one of the two. Pass the deciding value as an argument, or keep it on an owner"
    )


def _count(container: Any, key: Any, delta: float) -> None:
    container[key] += delta


def _append(to: Items, makes: Sequence[Callable[[], Any]]) -> None:
    to.extend([make() for make in makes])


def _set_number(scalar: Scalar, number: StaticNumber) -> None:
    scalar.container[scalar.key] = number.value(scalar.container[scalar.key])


def _own(value: Any, foreign: set[int | None]) -> Any:
    """Return ``value`` with all tensors detached, and those in foreign memory cloned inside the recording.
    ``requires_grad`` and attributes are kept.
    """

    def own(tensor: Tensor) -> Tensor:
        detached = tensor.detach().clone() if storage_id(tensor) in foreign else tensor.detach()
        if not has_own_operators(tensor):
            vars(detached).update(attributes_on(tensor))
        return detached.requires_grad_(tensor.requires_grad)

    with torch.no_grad():
        return pytree.tree_map_only(Tensor, own, value)
