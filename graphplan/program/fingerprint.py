"""Python values that every program bakes in, as part of its key: modes, flags, hyper-parameters, memberships, hooks."""

from __future__ import annotations

from collections.abc import Collection
from itertools import repeat, zip_longest
from operator import contains, is_not
from typing import Any

from torch import Tensor

from graphplan.compare.comparing import Checks, Row, contents_of, facts_of, row_of
from graphplan.compare.tensors import GEOMETRY, geometry
from graphplan.owners.contents import has_contents, state_of
from graphplan.owners.kinds import PLAIN
from graphplan.owners.sharding import Sharding
from graphplan.owners.slots import Walk
from graphplan.program.registered_hooks import Hooks, Own
from graphplan.specs.paths import Of, Path, names
from graphplan.trace.changes import same_value

_PARTS = ("_modules", "_parameters", "_buffers")
_OPTIMIZER_METHODS = ("step", "zero_grad")


class Fingerprint:
    """The values of one walk. ``left_out`` are entries of parameter groups, by the group's identity and a key: learning
    rates that lie in device tensors, what the optimizer itself counts with.
    """

    def __init__(self, walk: Walk, left_out: Collection[tuple[int, str]] = ()) -> None:
        self._modules = list(walk.modules)
        self._parameters = [param for _, param in walk.parameters.values()]
        self._paths = [path for path, _ in walk.parameters.values()]
        # A dictionary of layers or parameters may be put in another order.
        self._order = tuple(
            name
            for module in self._modules
            for part in (module._modules, module._parameters)
            # A scripted module keeps them in what is no dictionary, and cannot be iterated.
            for name in part.keys()  # noqa: SIM118
        )
        self._containers: list[Any] = []
        self._keys: list[str] = []
        self.labels: list[str] = []
        # A layer, parameter or buffer that comes or goes changes what a step runs.
        parts = [
            (getattr(module, part), f"{type(module).__name__}.{part}") for module in walk.modules for part in _PARTS
        ]
        self._empty = [items for items, _ in parts if not len(items)]
        self._sized: list[Any] = [items for items, _ in parts if len(items)]
        self._size_labels = [label for items, label in parts if len(items)]
        self._hooks = Hooks(walk)
        self._dicts = [vars(module) for module in walk.modules]
        self._training, self._forward = (list(repeat(name, len(self._dicts))) for name in ("training", "forward"))
        self._sharding = Sharding(walk.modules)
        self._facts: Any = None
        self._flags: tuple[Any, ...] = ()
        self._steppers = [vars(optimizer) for optimizer in walk.optimizers.values() for _ in _OPTIMIZER_METHODS]
        self._methods = [name for _ in walk.optimizers for name in _OPTIMIZER_METHODS]
        self._method_labels = [f"{path}.{name}" for path in walk.optimizers for name in _OPTIMIZER_METHODS]
        self._groups = _Groups(walk)
        for path, optimizer in walk.optimizers.items():
            self._sized.append(optimizer.param_groups)
            self._size_labels.append(f"{path}.param_groups")
            for index, group in enumerate(optimizer.param_groups):
                place = f"{path}.param_groups[{index}]"
                self._sized += [group, group["params"]]
                self._size_labels += [place, f"{place}['params']"]
                # Groups that change places have their keys in other orders.
                for key, value in sorted(group.items(), key=lambda item: str(item[0])):
                    if key == "params" or isinstance(value, Tensor) or (id(group), key) in left_out:
                        continue
                    self._containers.append(group)
                    self._keys.append(key)
                    self.labels.append(f"{type(optimizer).__name__} {place}.{key}")

    def is_of_today(self) -> bool:
        """Return True if the optimizers' groups have the same parameters as in the walk."""
        return self._groups.hold()

    def rows(self, placed: Collection[int]) -> list[Row] | None:
        """After :meth:`values`: comparisons that hold while everything is as it was; None if these cannot tell.
        ``placed`` are the ids of tensors that others compare.
        """
        if (
            any(self._empty)
            or any(map(contains, self._dicts, repeat("forward")))
            or self._sharding.is_there
            or (hooks := self._hooks.rows()) is None
            or not all(map(_stays, map(dict.get, self._containers, self._keys)))
        ):
            return None
        left: list[Tensor] = [param for param in self._parameters if id(param) not in placed]
        return [
            ("same_values", self._containers, self._keys, list(map(dict.get, self._containers, self._keys))),
            ("same_values", self._dicts, self._training, list(map(dict.get, self._dicts, repeat("training")))),
            ("same_types", self._modules, list(map(type, self._modules))),
            ("same_values", self._steppers, self._methods, list(map(dict.get, self._steppers, self._methods))),
            ("same_lengths", self._sized, list(map(len, self._sized))),
            ("all_empty", self._empty),
            ("none_there", self._dicts, self._forward),
            *hooks,
            row_of(left, placed=False),
        ]

    def values(self) -> tuple[Any, ...]:
        """The values now: hyper-parameters first, in the order of :attr:`labels`."""
        # One that is gone shows in the group's length.
        hypers = tuple(map(dict.get, self._containers, self._keys))
        if not PLAIN.issuperset(map(type, hypers)):
            hypers = tuple(map(_frozen, hypers))
        return (
            *hypers,
            *map(dict.get, self._dicts, repeat("training")),
            tuple(map(type, self._modules)),
            self._order,
            *[own and Own(own) for own in map(dict.get, self._steppers, self._methods)],
            *map(len, self._sized),
            *self._groups.values,
            # Which of those that were empty are filled.
            tuple((n, len(items)) for n, items in enumerate(self._empty) if items) if any(self._empty) else (),
            self._own_forwards(),
            self._hooks.values(),
            *self._sharding.values(),
            self._parameter_flags(),
        )

    def _parameter_flags(self) -> tuple[Any, ...]:
        """The geometry of every parameter: a frozen one, or one in another memory format."""
        if self._facts is None or not self._facts.fit(self._parameters):
            self._facts = facts_of(self._parameters, placed=False)
            columns = zip(*map(geometry, self._parameters), strict=True)
            self._flags = tuple(fact for column in columns for fact in column)
        return self._flags

    def _own_forwards(self) -> tuple[tuple[int, Own], ...]:
        """Which instances have a ``forward`` of their own, which stands before their class's."""
        if not any(map(dict.get, self._dicts, repeat("forward"))):
            return ()
        own = enumerate(map(dict.get, self._dicts, repeat("forward")))
        return tuple((index, Own(forward)) for index, forward in own if forward is not None)

    def _all_labels(self) -> list[str]:
        return [
            *self.labels,
            *(f"{type(module).__name__}.training" for module in self._modules),
            "the classes of the modules",
            "the order of layers or parameters",
            *self._method_labels,
            *map(Path.length, self._size_labels),
            *self._groups.labels,
            "layers, parameters or buffers where there were none",
            "a module's own forward",
            "hooks",
            *self._sharding.labels(),
            *(f"{path}.{fact}" for fact in GEOMETRY for path in self._paths),
        ]

    @property
    def layout(self) -> tuple[list[str], list[str], list[str]]:
        """What the values are of: parameters, containers, hyper-parameters. Only values of one layout compare."""
        return (self._paths, self._size_labels, self.labels)

    def changed_hypers(self, layout: Any, old: tuple[Any, ...], new: tuple[Any, ...]) -> list[str]:
        """Descriptions of the hyper-parameters that differ. ``layout`` is that of the ``old`` values."""
        return _differences(self.labels, old, new) if layout == self.layout else []

    def changed(self, layout: Any, old: tuple[Any, ...], new: tuple[Any, ...]) -> list[str]:
        """Descriptions of everything that differs. ``layout`` is that of the ``old`` values."""
        if layout != self.layout:
            pairs = [(set(before), set(now)) for before, now in zip(layout, self.layout, strict=True)]
            gone = [f"{label} is gone" for before, now in pairs for label in sorted(before - now)]
            return gone + [f"{label} is new" for before, now in pairs for label in sorted(now - before)]
        # The parameters' flags are one value, so that they need not be copied for each call.
        return _differences(self._all_labels(), (*old[:-1], *old[-1]), (*new[:-1], *new[-1]))


def _differences(labels: list[str], old: tuple[Any, ...], new: tuple[Any, ...]) -> list[str]:
    rows = zip(labels, old, new, strict=False)
    return [f"{label}: {_difference(label, a, b)}" for label, a, b in rows if not same_value(a, b)]


def _difference(label: str, old: Any, new: Any) -> str:
    return _first_difference(old, new) if names(label, Of.MEMBERS) and old and new else f"{old!r} then {new!r}"


def _first_difference(old: tuple[str, ...], new: tuple[str, ...]) -> str:
    """What the first place at which two groups' paths differ has in each, and how many more do."""
    differ = [pair for pair in zip_longest(old, new, fillvalue="nothing") if pair[0] != pair[1]]
    first, then = differ[0]
    more = f", and {len(differ) - 1} more" if len(differ) > 1 else ""
    return f"{first} then {then}{more}"


class _Groups:
    """The parameters in the groups of a walk's optimizers. ``values`` are the paths of each group's parameters, which
    loading a state dictionary leaves as they are. A program's guards compare the lists themselves.
    """

    def __init__(self, walk: Walk) -> None:
        self._optimizers = list(walk.optimizers.values())
        self._parameters = self._now()
        paths = {number: path for number, (path, _) in walk.parameters.items()}
        self.values = [tuple(paths[id(param)] for param in params) for params in self._parameters]
        self.labels = [
            Path.members(f"{path}.param_groups[{index}]")
            for path, optimizer in walk.optimizers.items()
            for index in range(len(optimizer.param_groups))
        ]
        spaces, outer = list(map(vars, self._optimizers)), [optimizer.param_groups for optimizer in self._optimizers]
        groups = [group for groups in outer for group in groups]
        lists = [group["params"] for group in groups]
        self._checks = Checks([
            ("same_values", spaces, ["param_groups"] * len(outer), outer),
            ("same_values", groups, ["params"] * len(lists), lists),
            *contents_of([*outer, *lists]),
        ])  # fmt: skip

    def _now(self) -> list[list[Any]]:
        return [list(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def hold(self) -> bool:
        """Return True if all groups have the same parameters in the same order, perhaps in other lists."""
        if self._checks.hold():
            return True
        before, now = self._parameters, self._now()
        return list(map(len, before)) == list(map(len, now)) and not any(
            any(map(is_not, *pair)) for pair in zip(before, now, strict=True)
        )


class _Odd:
    """A hyper-parameter of a type with an ``__eq__`` of its own, or without a hash."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Odd) and same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)


def _frozen(value: Any) -> Any:
    """What can be compared and hashed in the place of ``value``, with what lists, dictionaries and buffers hold now."""
    if isinstance(value, dict):
        return tuple((_frozen(key), _frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if type(value) in PLAIN:
        return value
    return state_of(value) if has_contents(value) else _Odd(value)


def _stays(value: Any) -> bool:
    """Return True if the value cannot change without becoming another object."""
    if type(value) is tuple:
        return all(map(_stays, value))
    return not isinstance(value, (list, dict)) and not has_contents(value)
