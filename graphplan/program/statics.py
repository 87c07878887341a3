"""A program's fixed storage by role: buffers for copied roles, the owners' memory for adopted ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType

import torch
from torch import Tensor, nn

from graphplan.errors import FeedError, PolicyError, UncoveredRoleError
from graphplan.feed.buffers import Buffers
from graphplan.owners.slots import Slot, Walk
from graphplan.plan.plan import Plan
from graphplan.specs.policy import Policy
from graphplan.specs.roles import External, Role, TensorSpec
from graphplan.tensors.dtensors import is_sharded
from graphplan.tensors.storages import without_overlap


def check_policy(plan: Plan, policy: Policy) -> None:
    """Refuse a policy that leaves an external without storage, or that copies a parameter that the step trains."""
    loose = [external for external in plan.externals if external.role not in policy.static_roles]
    if loose:
        raise _without_storage(loose, plan, policy)
    if Role.PARAM in policy.copy_roles:
        trained = next((external for external in plan.params if external.mutated), None)
        if trained is not None:
            raise PolicyError(
                f"copy_roles has param, but the step itself changes {trained.name}: a copy would be trained instead of "
                "the parameter. Copy params under a policy for inference only"
            )


def _without_storage(loose: list[External], plan: Plan, policy: Policy) -> UncoveredRoleError:
    names = ", ".join(str(external) for external in loose[:4]) + (", …" if len(loose) > 4 else "")
    roles = ", ".join(sorted({str(external.role) for external in loose}))
    fix = f"add {roles} to static_roles, or use a mode that has it (mode='train', Policy.train())"
    slots = plan.handles.walk().slots
    training = [_owner_in_training(external, slots) for external in loose]
    if all(training):
        path, module = loose[0].name.rpartition(".")[0], training[0]
        return UncoveredRoleError(
            f"{path} ({type(module).__name__}) is in training mode, in which each call changes {names}, and the "
            f"{policy.mode} policy has no storage for {roles}; expected modules in evaluation mode: call .eval() on "
            f"the model first. If calls are to change that state, {fix}"
        )
    return UncoveredRoleError(
        f"the {policy.mode} policy has static_roles={[str(r) for r in policy.static_roles]}, which leaves {names} "
        f"without storage: {fix}"
    )


def _owner_in_training(external: External, slots: Mapping[str, Slot]) -> nn.Module | None:
    """Return the module in training mode that owns the state ``external``, if its code reads ``training``."""
    slot = None if external.path is None or external.role is not Role.STATE else slots.get(external.path)
    owner = None if slot is None or slot.param is not None else slot.owner
    if not isinstance(owner, nn.Module) or not owner.training:
        return None
    spaces = [vars(kind) for kind in type(owner).__mro__ if not issubclass(nn.Module, kind)]
    codes = [value.__code__ for space in spaces for value in space.values() if isinstance(value, FunctionType)]
    return owner if any("training" in code.co_names for code in codes) else None


class CopiedOwned:
    """Buffers that replace owned externals of a copied role while the step is recorded. Gradients, tuples of tensors
    and DTensors are always adopted: no buffer can be bound in their place.
    """

    def __init__(self, plan: Plan, policy: Policy, buffers: Buffers, walk: Walk) -> None:
        roles = [role for role in policy.copy_roles if role is not Role.INPUT]
        self.externals = [e for e in plan.externals if e.role in roles and _has_stand_in(e, walk)]
        self.stand_ins: dict[str, Tensor] = {}
        """The buffers by the path that they replace; these paths are not adopted."""
        for external in self.externals:
            held = _held(external, walk)
            # Callers may give any values, so each element needs its own memory.
            like = held if without_overlap(held) is held else held.detach().contiguous()
            assert external.path is not None
            self.stand_ins[external.path] = buffers.view(("owned", external.name), like, plan.device)
        self._names = _short_names(self.externals)
        self._back: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def swapped_in(self, walk: Walk) -> Iterator[None]:
        """In the block, bind the buffers in place of the owners' tensors, under every name of each tensor."""
        swapped: list[tuple[Slot, Tensor]] = []
        for external, static in zip(self.externals, self.stand_ins.values(), strict=True):
            held = _held(external, walk)
            stand_in = (
                nn.Parameter(static, requires_grad=held.requires_grad) if isinstance(held, nn.Parameter) else static
            )
            for slot in walk.slots.values():
                if slot.param is None and slot.get() is held:
                    swapped.append((slot, held))
                    slot.set(stand_in)
        try:
            yield
        finally:
            for slot, held in reversed(swapped):
                slot.set(held)

    def load(self, given: Mapping[Role, Mapping[str, Tensor]], walk: Walk) -> None:
        """Copy in the values given by name, else the owners' own in ``walk``."""
        sources = self._sources(given, walk)
        targets = list(self.stand_ins.values())
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        pairs = zip(self.externals, targets, sources, strict=True)
        self._back = [(target, source) for external, target, source in pairs if external.mutated]

    def give_back(self) -> None:
        """Copy values that a run has changed back to their sources."""
        with torch.no_grad():
            for target, source in self._back:
                source.copy_(target)
        self._back = []

    def _sources(self, given: Mapping[Role, Mapping[str, Tensor]], walk: Walk) -> list[Tensor]:
        chosen: dict[str, Tensor] = {}
        for role, values in given.items():
            if values and not any(external.role is role for external in self.externals):
                raise FeedError(
                    f"{role} values are given ({', '.join(list(values)[:3])}), but the policy does not copy that role: "
                    f"capture with copy_roles=('input', '{role}')"
                )
            for name, value in values.items():
                external = self._names.get((role, name))
                if external is None and any(name in (path, path.split(".", 1)[-1]) for path in walk.slots):
                    # The step does not use it.
                    continue
                if external is None:
                    known = ", ".join(sorted(n for r, n in self._names if r is role)[:12])
                    raise FeedError(f"the plan has no copied {role} called {name!r}; expected one of: {known}")
                if not external.spec.fits(TensorSpec.of(value)):
                    raise FeedError(f"{name} is {TensorSpec.of(value)}; expected {external.spec}: nothing is cast")
                chosen[external.name] = value
            missing = [e.name for e in self.externals if values and e.role is role and e.name not in chosen]
            if missing:
                raise FeedError(
                    f"{missing[0]} is missing ({len(missing)} of the {role} values are); expected a value for every "
                    f"copied {role}, because a mixture of two sets is rarely intended: pass a whole state_dict"
                )
        return [chosen[e.name] if e.name in chosen else _held(e, walk) for e in self.externals]


def _has_stand_in(external: External, walk: Walk) -> bool:
    slot = None if external.path is None else walk.slots.get(external.path)
    held = None if slot is None or slot.param is not None else slot.get()
    return isinstance(held, Tensor) and not is_sharded(held)


def _held(external: External, walk: Walk) -> Tensor:
    assert external.path is not None
    return walk.slots[external.path].tensors()[0]


def _short_names(externals: list[External]) -> dict[tuple[Role, str], External]:
    """Return externals by full name, and by the name within their owner (as in a ``state_dict``) if it is unique."""
    shorts = [(external.role, external.name.split(".", 1)[-1]) for external in externals]
    counts = Counter(shorts)
    names = {short: external for short, external in zip(shorts, externals, strict=True) if counts[short] == 1}
    names.update({(external.role, external.name): external for external in externals})
    return names
