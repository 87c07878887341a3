"""The Python values that every program bakes in: modes, flags, hyper-parameters, memberships and hooks.

They are part of a program's key: when they come back, so does the program.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import repeat
from operator import contains
from typing import Any

from torch import Tensor

from graphplan.compare.comparing import Row, facts_of, row_of
from graphplan.compare.tensors import GEOMETRY, geometry
from graphplan.guards.groups import Groups, difference
from graphplan.guards.hooks import Hooks
from graphplan.guards.key_values import Own, frozen, stays
from graphplan.owners.kinds import PLAIN
from graphplan.owners.sharding import Sharding
from graphplan.owners.slots import Walk
from graphplan.specs.paths import Of, Path, names
from graphplan.trace.changes import same_value

_MODULE_PARTS = ("_modules", "_parameters", "_buffers")
_OPTIMIZER_METHODS = ("step", "zero_grad")


class Fingerprint:
    """The values of one walk, without the entries ``left_out`` of parameter groups (a group's identity and a key): a
    learning rate that a device tensor shadows, what the optimizer itself counts with.
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
        # A layer, parameter, buffer or hook that comes or goes changes what a step runs.
        self._sized: list[Any] = []
        self._size_labels: list[str] = []
        self._empty: list[Any] = []
        self._hooks = Hooks(walk)
        for module in walk.modules:
            for part in _MODULE_PARTS:
                self._add_size(getattr(module, part), f"{type(module).__name__}.{part}")
        self._dicts = [vars(module) for module in walk.modules]
        self._training, self._forward = (list(repeat(name, len(self._dicts))) for name in ("training", "forward"))
        self._sharding = Sharding(walk.modules)
        self._facts: Any = None
        self._flags: tuple[Any, ...] = ()
        self._steppers = [vars(optimizer) for optimizer in walk.optimizers.values() for _ in _OPTIMIZER_METHODS]
        self._methods = [name for _ in walk.optimizers for name in _OPTIMIZER_METHODS]
        self._method_labels = [f"{path}.{name}" for path in walk.optimizers for name in _OPTIMIZER_METHODS]
        self._groups = Groups(walk)
        for path, optimizer in walk.optimizers.items():
            self._add_size(optimizer.param_groups, f"{path}.param_groups")
            for index, group in enumerate(optimizer.param_groups):
                self._add_size(group, f"{path}.param_groups[{index}]")
                self._add_size(group["params"], f"{path}.param_groups[{index}]['params']")
                # Groups that change places have their keys in other orders.
                for key, value in sorted(group.items(), key=lambda item: str(item[0])):
                    if key == "params" or isinstance(value, Tensor) or (id(group), key) in left_out:
                        continue
                    self._containers.append(group)
                    self._keys.append(key)
                    self.labels.append(f"{type(optimizer).__name__} {path}.param_groups[{index}].{key}")

    def _add_size(self, items: Any, label: str) -> None:
        if len(items):
            self._sized.append(items)
            self._size_labels.append(Path.length(label))
        else:
            self._empty.append(items)

    def is_of_today(self) -> bool:
        """Whether the optimizers' groups have the parameters that they had in the walk."""
        return self._groups.hold()

    def rows(self, placed: Collection[int]) -> list[Row] | None:
        """After :meth:`values`: comparisons that hold while everything is as it was; None where those do not say
        enough. ``placed`` are the ids of tensors that others compare.
        """
        if (
            any(self._empty)
            or any(map(contains, self._dicts, repeat("forward")))
            or self._sharding.is_there
            or (hooks := self._hooks.rows()) is None
            or not all(map(stays, map(dict.get, self._containers, self._keys)))
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
            hypers = tuple(map(frozen, hypers))
        return (
            *hypers,
            *map(dict.get, self._dicts, repeat("training")),
            tuple(map(type, self._modules)),
            self._order,
            *[own and Own(own) for own in map(dict.get, self._steppers, self._methods)],
            *map(len, self._sized),
            *self._groups.values,
            self._filled(),
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

    def _filled(self) -> tuple[tuple[int, int], ...]:
        """Which containers that were empty are so no more, and how many items they have."""
        if not any(self._empty):
            return ()
        return tuple((index, len(items)) for index, items in enumerate(self._empty) if items)

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
            *self._size_labels,
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
            gone = [f"{_within(label)} is gone" for before, now in pairs for label in sorted(before - now)]
            return gone + [f"{_within(label)} is new" for before, now in pairs for label in sorted(now - before)]
        # The parameters' flags are one value, so that they need not be copied for each call.
        return _differences(self._all_labels(), (*old[:-1], *old[-1]), (*new[:-1], *new[-1]))


def _within(label: str) -> str:
    """What ``label`` has the length of, if it is about a length."""
    return label.place if isinstance(label, Path) else label


def _differences(labels: list[str], old: tuple[Any, ...], new: tuple[Any, ...]) -> list[str]:
    rows = zip(labels, old, new, strict=False)
    return [f"{label}: {_difference(label, a, b)}" for label, a, b in rows if not same_value(a, b)]


def _difference(label: str, old: Any, new: Any) -> str:
    return difference(old, new) if names(label, Of.MEMBERS) and old and new else f"{old!r} then {new!r}"
