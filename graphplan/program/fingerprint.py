"""Python values that every recording fixes, as part of its key: modes, flags, hyper-parameters, memberships, hooks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from graphplan.compare.comparing import Checks, Column, Row, contents_of, facts_of, row_of, rows_of
from graphplan.compare.fast_compare import Modes, hooks_registered
from graphplan.compare.tensors import GEOMETRY, geometry
from graphplan.environment.switches import NAMES
from graphplan.owners.contents import has_contents, state_of
from graphplan.owners.kinds import MODULE_HOOKS, PLAIN
from graphplan.owners.sharding import Sharding, reshard_and_walk
from graphplan.owners.slots import Walk
from graphplan.plan.plan import Handles
from graphplan.specs.paths import Fact, Path, names
from graphplan.trace.changes import same_value

_PARTS = ("_modules", "_parameters", "_buffers")
_OF_MODULES, _OF_OPTIMIZERS = ("training", "forward"), ("step", "zero_grad")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = [
    *((f"_global_{name}_hooks", modules) for name in ("forward", "forward_pre", "backward", "backward_pre")),
    *((f"_global_optimizer_{name}_hooks", optimizers) for name in ("pre", "post")),
]


class OpaqueValue:
    """Wrapper for a value in a key whose type has its own ``__eq__`` or no hash."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpaqueValue) and same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


class Hooks:
    """Hooks of the layers, parameters and optimizers of a walk, and torch's global hooks."""

    def __init__(self, walk: Walk) -> None:
        self._places: list[tuple[str, Any, str]] = [(name, space, name) for name, space in _GLOBAL_HOOKS]
        for module in walk.modules:
            self._places += [(f"{type(module).__name__}.{name}", module, name) for name in MODULE_HOOKS]
        for path, param in walk.parameters.values():
            self._places += [(path, param, name) for name in _TENSOR_HOOKS]
        for path, optimizer in walk.optimizers.items():
            self._places += [(f"{path}.{name}", optimizer, name) for name in _OPTIMIZER_HOOKS]
        self._registered: int | None = None
        self._filled = Column("same_attributes", [])

    def values(self) -> tuple[tuple[str, tuple[tuple[int, OpaqueValue], ...]], ...]:
        """Return hooks by their ids in torch. All places are searched again only after one was registered."""
        registered = hooks_registered()
        if registered != self._registered:
            self._registered = registered
            self._filled = Column("same_attributes", [place for place in self._places if getattr(*place[1:])])
        if not self._filled.paths:
            return ()
        held = zip(self._filled.paths, self._filled.read(), strict=True)
        return tuple(
            [
                (label, tuple([(number, OpaqueValue(hook)) for number, hook in hooks.items()]))
                for label, hooks in held
                if hooks
            ]
        )

    def functions(self) -> list[Any]:
        """Return the functions and objects that torch calls as hooks."""
        return [hook.value for _, hooks in self.values() for _, hook in hooks]

    def rows(self) -> list[Row]:
        """After :meth:`values`: return comparisons that hold while no hook is added or removed."""
        return [
            ("same_results", [hooks_registered], [self._registered]),
            self._filled.row(),
            *contents_of(list(self._filled.read())),
        ]


class Fingerprint:
    """The values of one walk. ``left_out`` are entries of parameter groups, by the group's id and a key: learning rates
    in device tensors and the optimizer's own counters.
    """

    def __init__(self, walk: Walk, left_out: Collection[tuple[int, str]] = ()) -> None:
        modules = [(type(module).__name__, module) for module in walk.modules]
        optimizers = walk.optimizers.items()
        groups = [(f"{path}.param_groups[{n}]", g) for path, o in optimizers for n, g in enumerate(o.param_groups)]
        # An added or removed layer, parameter or buffer changes the operators of a step.
        sized = [(f"{kind}.{part}", getattr(module, part)) for kind, module in modules for part in _PARTS]
        sized += [(f"{path}.param_groups", optimizer.param_groups) for path, optimizer in optimizers]
        sized += [pair for path, group in groups for pair in ((path, group), (f"{path}['params']", group["params"]))]
        self._hypers = Column("same_values", _hypers_of(walk, left_out))
        self._own = Column("same_values", [*_own(modules, _OF_MODULES), *_own(optimizers, _OF_OPTIMIZERS)])
        self._types = Column("same_types", [(f"the class of a {kind}", module) for kind, module in modules])
        self._sizes = Column("same_lengths", sized)
        # Compare paths, which do not change when a state dict is loaded. Guards compare the lists themselves.
        paths = {number: path for number, (path, _) in walk.parameters.items()}
        self._members = {Path.members(path): tuple(paths[id(p)] for p in group["params"]) for path, group in groups}
        lists: list[tuple[Any, ...]]
        lists = [("same_attributes", optimizer, "param_groups", optimizer.param_groups) for _, optimizer in optimizers]
        lists += [("same_values", group, "params", group["params"]) for _, group in groups]
        self._membership = Checks([*rows_of(lists), *contents_of([items for *_, items in lists])])
        # Code may reorder a dictionary of layers or parameters.
        self._order = tuple(
            name
            for module in walk.modules
            for part in (module._modules, module._parameters)
            # In a scripted module, these are no dictionaries and cannot be iterated.
            for name in part.keys()  # noqa: SIM118
        )
        self._hooks = Hooks(walk)
        self._sharding = Sharding(walk.modules)
        self._parameters = [param for _, param in walk.parameters.values()]
        self._paths = [path for path, _ in walk.parameters.values()]
        self._facts: Any = None
        self._flags: tuple[Any, ...] = ()

    def matches_groups(self) -> bool:
        """Return True if the optimizers still have the walk's parameter groups, with the same parameters."""
        return bool(self._membership.hold())

    def rows(self, placed: Collection[int]) -> list[Row] | None:
        """After :meth:`values`: return comparisons that hold while nothing changes; None if comparisons cannot tell.
        ``placed`` are the ids of tensors that other guards compare.
        """
        if self._sharding.is_there or not all(map(_stays, self._hypers.read())):
            return None
        left = [param for param in self._parameters if id(param) not in placed]
        return [*(column.row() for column in self._columns), *self._hooks.rows(), row_of(left, placed=False)]

    def values(self) -> tuple[Any, ...]:
        """Return the current values: hyper-parameters first, in the order of :meth:`_all_labels`."""
        return (
            # A removed entry shows in the group's length.
            *_frozen_all(self._hypers.read()),
            *_frozen_all(self._own.read()),
            *self._types.read(),
            *self._sizes.read(),
            *self._members.values(),
            self._order,
            self._hooks.values(),
            *self._sharding.values(),
            self._parameter_flags(),
        )

    @property
    def _columns(self) -> tuple[Column, ...]:
        return (self._hypers, self._own, self._types, self._sizes)

    def _parameter_flags(self) -> tuple[Any, ...]:
        """Return the geometry of every parameter, which shows freezing and changes of the memory format."""
        if self._facts is None or not self._facts.fit(self._parameters):
            self._facts = facts_of(self._parameters, placed=False)
            columns = zip(*map(geometry, self._parameters), strict=True)
            self._flags = tuple(fact for column in columns for fact in column)
        return self._flags

    def _all_labels(self) -> list[str]:
        return [
            *(path for column in self._columns[:-1] for path in column.paths),
            *map(Path.length, self._sizes.paths),
            *self._members,
            "the order of layers or parameters",
            "hooks",
            *self._sharding.labels(),
            *(f"{path}.{fact}" for fact in GEOMETRY for path in self._paths),
        ]

    @property
    def layout(self) -> tuple[list[str], list[str], list[str]]:
        """Paths of parameters, containers and hyper-parameters. Only values of the same layout can be compared."""
        return (self._paths, self._sizes.paths, self._hypers.paths)

    def changed_hypers(self, layout: Any, old: tuple[Any, ...], new: tuple[Any, ...]) -> list[str]:
        """Describe the hyper-parameters that differ. ``layout`` is that of the ``old`` values."""
        return _differences(self._hypers.paths, old, new) if layout == self.layout else []

    def changed(self, layout: Any, old: tuple[Any, ...], new: tuple[Any, ...]) -> list[str]:
        """Describe all values that differ. ``layout`` is that of the ``old`` values."""
        if layout != self.layout:
            pairs = [(set(before), set(now)) for before, now in zip(layout, self.layout, strict=True)]
            gone = [f"{label} is gone" for before, now in pairs for label in sorted(before - now)]
            return gone + [f"{label} is new" for before, now in pairs for label in sorted(now - before)]
        # The parameters' flags are one nested tuple, so that no call has to copy them.
        return _differences(self._all_labels(), (*old[:-1], *old[-1]), (*new[:-1], *new[-1]))


class Conditions:
    """The modes and the fingerprint of a plan's owners, for plans and programs without a state machine."""

    def __init__(self, handles: Handles) -> None:
        rates, self._modes = handles.rates, Modes()
        counted = {(id(optimizer.param_groups[index]), key) for optimizer, index, key in rates.counted}
        self._sharding, walk = reshard_and_walk(handles.owners())
        self._fingerprint = Fingerprint(walk, rates.on_device | counted)
        self._checks: Any = None

    def read(self) -> tuple[Any, ...]:
        """Reshard, and return the present modes, layout and values, without references to objects."""
        self._sharding.settle()
        return self._modes.now(), self._fingerprint.layout, _identified(self._fingerprint.values())

    def change(self, before: tuple[Any, ...]) -> str | None:
        """Describe what differs from ``before``, the result of :meth:`read` under other conditions; None if nothing."""
        if self._checks is not None and self._checks.hold() and self._fingerprint.matches_groups():
            return None
        now = self.read()
        if now == before and self._fingerprint.matches_groups():
            modes, rows = self._modes.rows(), self._fingerprint.rows(())
            self._checks = None if modes is None or rows is None else Checks([*modes, *rows])
            return None
        modes, layout, values = before
        changed = [*_differences(list(NAMES), modes, now[0]), *self._fingerprint.changed(layout, values, now[2])]
        return "; ".join(changed[:3]) or "parameter groups are other ones"


def _identified(value: Any) -> Any:
    """Return ``value`` with the identities of objects instead of references, which would keep them alive."""
    if type(value) is tuple:
        return tuple(map(_identified, value))
    return (type(value.value).__name__, id(value.value)) if type(value) is OpaqueValue else value


def _own(things: Iterable[tuple[str, Any]], keys: Iterable[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield places of instance attributes that would hide those of the class; the value is None if not set."""
    return ((f"{path}.{key}", vars(thing), key) for path, thing in things for key in keys)


def _hypers_of(walk: Walk, left_out: Collection[tuple[int, str]]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield label, group and key for each value in the parameter groups of optimizers."""
    for path, optimizer in walk.optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            # Sort: groups that change places may have their keys in another order.
            for key, value in sorted(group.items(), key=lambda item: str(item[0])):
                if key != "params" and not isinstance(value, Tensor) and (id(group), key) not in left_out:
                    yield f"{type(optimizer).__name__} {path}.param_groups[{index}].{key}", group, key


def _differences(labels: list[str], old: tuple[Any, ...], new: tuple[Any, ...]) -> list[str]:
    rows = zip(labels, old, new, strict=False)
    differing = [(label, f"{a!r} then {b!r}") for label, a, b in rows if not same_value(a, b)]
    return [f"{label}: {'other ones' if names(label, Fact.MEMBERS) else text}" for label, text in differing]


def _frozen_all(values: Iterable[Any]) -> Iterable[Any]:
    """Return comparable and hashable representations of ``values``."""
    values = tuple(values)
    return values if PLAIN.issuperset(map(type, values)) else map(_frozen, values)


def _frozen(value: Any) -> Any:
    """Return a comparable and hashable representation of ``value`` with the current items of containers and buffers."""
    if isinstance(value, dict):
        return tuple((_frozen(key), _frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if type(value) in PLAIN:
        return value
    return state_of(value) if has_contents(value) else OpaqueValue(value)


def _stays(value: Any) -> bool:
    """Return True if the value cannot change without becoming another object."""
    if type(value) is tuple:
        return all(map(_stays, value))
    return not isinstance(value, (list, dict)) and not has_contents(value)
