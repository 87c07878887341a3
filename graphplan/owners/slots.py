"""Results of a walk over owners: slots, scalars, and the containers and links that lead to them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphplan.owners.kinds import SCALARS
from graphplan.owners.tensor_metadata import ABSENT, metadata_of
from graphplan.owners.views import Cell, GroupCounts, Inherited, Members, ReadOnly, attributes_of, present
from graphplan.specs.paths import free_name
from graphplan.tensors.attributes import PLAIN_KINDS, has_memory
from graphplan.tensors.dtensors import local
from graphplan.tensors.storages import storage_id
from graphplan.tensors.tables import is_table

Items = list[Any] | deque[Any]
_FEW = 3  # Maximum number of further references by which an Item looks up its list or dictionary.
Container = MutableMapping[Any, Any] | Items | set[Any]


@dataclass(slots=True, eq=False)
class Scalar:
    """A container and a key in it that hold a Python value; ``owner.attribute`` is the attribute that leads to it.

    If ``via`` is set, only code that also loads an attribute of that name can reach the value. ``name`` is a further
    name that the step's code has for the container or one around it. ``others`` are further objects, each with the
    attribute of it that leads to the container.
    """

    container: Any
    key: Any
    owner: Any = None
    attribute: str = ""
    via: str | None = None
    name: str | None = None
    others: tuple[tuple[Any, str], ...] = ()

    def ways(self) -> Iterator[tuple[Any, str]]:
        """Yield the objects and attributes that lead here, the owner first; a ``[:]`` suffix is kept on each."""
        yield self.owner, self.attribute
        rest = "[:]" if self.others and self.attribute.endswith("[:]") else ""
        for owner, attribute in self.others:
            yield owner, attribute + rest

    def is_called(self, names: Collection[str]) -> bool:
        """Return True if an attribute that leads here is among ``names``."""
        return self.attribute in names or any(attribute in names for _, attribute in self.others)

    def get(self) -> Any:
        """Return the current value."""
        return present(self.container)[self.key]

    @property
    def is_stored_here(self) -> bool:
        """Whether the container itself stores the value; False for properties and inherited class attributes."""
        return not isinstance(self.container, (ReadOnly, Inherited))

    @property
    def component(self) -> str:
        """The part of the step that the value belongs to, as in :class:`graphplan.errors.RefusalError`."""
        return "optimizer" if isinstance(self.owner, (Optimizer, GroupCounts)) else "step"

    def rows(self, value: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the fastest guards for ``value`` in this place, for :func:`graphplan.compare.comparing.rows_of`."""
        container = self.container
        if isinstance(container, Inherited):
            yield from (("none_there", space, self.key) for space in container.before)
        if isinstance(container, ReadOnly):
            yield "equal_attributes", container.thing, self.key, value
        else:
            space = container.space if isinstance(container, Members) else present(container)
            yield "equal_items", space, self.key, value


@dataclass(slots=True, eq=False)
class Item(Scalar):
    """An item of the list or dictionary that an attribute holds now. The attribute is read on each access, because
    schedulers make a new list of rates in each step. ``container`` holds the attributes; ``key`` is the item's key.
    """

    @property
    def items(self) -> Any:
        """The current list or dictionary. Raises KeyError if the attributes no longer all hold the same one."""
        items = self.container[self.attribute]
        if not self.others or _lead_to(self.others, items):
            return items
        raise KeyError(self.attribute)

    def get(self) -> Any:
        """Return the current value."""
        return self.items[self.key]


@dataclass(slots=True, eq=False)
class Presence(Scalar):
    """Whether an object itself has an attribute that code may look up. ``container`` holds the object's attributes."""

    @property
    def _spaces(self) -> list[Any]:
        """The dictionaries that may hold the attribute: a module has others for parameters, buffers and submodules."""
        apart = ("_parameters", "_buffers", "_modules") if issubclass(type(self.owner), nn.Module) else ()
        return [self.container, *(self.container[kind] for kind in apart)]

    def get(self) -> bool:
        """Return True if the attribute exists now."""
        return any(self.key in space for space in self._spaces)

    def rows(self, value: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the guards for an absent attribute. If it exists, its value is compared instead."""
        yield from (("none_there", space, self.key) for space in self._spaces if not value)


def item_by_attribute(place: Scalar) -> Scalar:
    """Return the :class:`Item` for a place in a list or dictionary that attributes hold. Return ``place`` itself for
    all others, if code has a variable for the container, or if reading all attributes that hold it would be slow.
    """
    is_apart = place.name is not None or len(place.others) > _FEW
    items, inner = place.container, None if is_apart else attributes_of(place.owner)
    if type(items) not in (list, dict) or inner is None or inner is items:
        return place
    if not _lead_to(((place.owner, place.attribute), *place.others), items):
        return place
    return Item(inner, place.key, place.owner, place.attribute, place.via, place.name, place.others)


def _lead_to(ways: Iterable[tuple[Any, str]], items: Any) -> bool:
    return all((attributes_of(owner) or {}).get(attribute) is items for owner, attribute in ways)


@dataclass(slots=True, eq=False)
class Slot(Scalar):
    """A container and a key that hold a tensor or a tuple with tensors. For ``.grad``, ``param`` is the parameter."""

    path: str = ""
    is_parameter: bool = False
    param: Tensor | None = None

    def get(self) -> Any:
        """Return the value that the slot holds now; None if it no longer exists."""
        if type(self.container) is dict:
            return self.container.get(self.key)
        try:
            return present(self.container)[self.key]
        except (KeyError, IndexError):
            return None

    def set(self, value: Any) -> None:
        """Store ``value`` in the slot."""
        self.container[self.key] = value

    def tensors(self) -> list[Tensor]:
        """Return the tensors with memory that the slot holds now."""
        return tensor_leaves(self.get())


def tensor_leaves(value: Any) -> list[Tensor]:
    """Return the tensors with memory in ``value``: itself or the leaves of a (nested) tuple; of a DTensor its shard."""
    kind = type(value)
    if kind in PLAIN_KINDS:
        return [value] if has_memory(value) else []
    # ``isinstance`` would also read ``value.__class__``, which may run the user's code.
    if issubclass(kind, Tensor):
        return [local(value)] if has_memory(value) else []
    return [leaf for item in value for leaf in tensor_leaves(item)] if issubclass(kind, tuple) else []


def holds_plain(value: Any) -> bool:
    """Return True if new tensors with the same values can replace those in ``value``: no attributes, no shards."""
    if isinstance(value, tuple):
        parts = [item for item in value if isinstance(item, (tuple, Tensor))]
        return bool(parts) and all(map(holds_plain, parts))
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    return not (value.requires_grad or vars(value))


@dataclass(frozen=True, slots=True, eq=False)
class OwnerByAttribute:
    """An owner that code can only reach through an attribute called ``name``."""

    thing: Any
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class ConditionalOwner:
    """A library's object, walked only if code loads one of ``names``, and ``without`` some of its attributes."""

    thing: Any
    names: Collection[str]
    without: Collection[str] = ()


class Namespace:
    """Names that a step's code uses: globals, closure variables, functions of modules and classes.

    ``entries`` maps each label to a namespace and a key in it. ``attributes`` are the attributes that code loads from
    any object, ``mentioned`` the names and strings in all code that ran, ``beyond_libraries`` the names in code other
    than torch's and Lightning's. ``computes``: the user's code also computes names. ``asked`` are the names that it
    passes to ``getattr`` and ``hasattr``, ``iterated`` those that it passes to ``next``. ``leaves`` are the paths of
    tensors that get gradients like parameters but are not parameters.
    """

    def __init__(self) -> None:
        self.entries: dict[str, tuple[Any, Any]] = {}
        self.attributes: set[str] = set()
        self.mentioned: set[str] = set()
        self.beyond_libraries: set[str] = set()
        self.asked: set[str] = set()
        self.computes = False
        self.leaves: set[str] = set()
        self.iterated: set[str] = set()
        self.functions: weakref.WeakKeyDictionary[CodeType, list[weakref.ref[FunctionType]]]
        self.functions = weakref.WeakKeyDictionary()
        """Functions with closures that were found although no name leads to them, by code object; none if a search
        found none.
        """
        self._known: set[tuple[int, Any]] = set()

    def add(self, label: str, space: Any, key: Any) -> bool:
        """Add one name. Return False if it is already known."""
        if self.has(space, key):
            return False
        self._known.add(_place(space, key))
        self.entries[free_name(label, self.entries)] = (space, key)
        return True

    def has(self, space: Any, key: Any) -> bool:
        """Return True if a label leads to this place."""
        return _place(space, key) in self._known

    def plain(self) -> Namespace:
        """Return the names that hold a number, a string or None: keeping these keeps no object alive."""
        plain = copy(self)
        plain.entries, plain.functions, plain._known = {}, weakref.WeakKeyDictionary(), set()
        for label, space, key, value in self.there():
            if isinstance(value, SCALARS):
                plain.add(label, space, key)
        return plain

    def there(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yield the names that exist now: label, namespace, key, and value."""
        for label, (space, key) in self.entries.items():
            with suppress(KeyError):
                yield label, space, key, space[key]


def _place(space: Any, key: Any) -> tuple[int, Any]:
    home = space.cell if isinstance(space, Cell) else space.kind if isinstance(space, Members) else space
    return id(home), key


@dataclass(slots=True)
class Walk:
    """Everything that a walk over owners found, in walking order.

    ``objects`` are identities of objects and lengths of containers: a step can depend on them, but their changes are
    detected elsewhere. ``places`` are single items of containers that are not owned as a whole. ``found`` are the ids
    of tensors that only a name in the step's code leads to, ``reached`` the paths that a library's object leads to.
    ``attributes`` are modules and objects with their attribute dictionaries. ``empty`` maps the paths of parameters and
    buffers that are None to container and key. ``parts`` are modules, and optimizers that values refer to, by path.
    ``passed`` are the names of attributes that hold data and were not walked.
    """

    slots: dict[str, Slot] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    objects: dict[str, Scalar] = field(default_factory=dict)
    places: list[tuple[Any, Any]] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    found: set[int] = field(default_factory=set)
    lists: dict[str, Items] = field(default_factory=dict)
    links: list[tuple[Any, Any, Any]] = field(default_factory=list)
    containers: list[Container] = field(default_factory=list)
    attributes: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    parts: dict[str, Any] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    empty: dict[str, tuple[Any, str]] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    parameters: dict[int, tuple[str, Tensor]] = field(default_factory=dict)

    @property
    def counted(self) -> set[str]:
        """Paths of the counters that optimizers keep in their parameter groups."""
        return {path for path, scalar in self.scalars.items() if isinstance(scalar.container, GroupCounts)}

    def place(self, path: str) -> Slot | None:
        """Return the slot at ``path``, also if it holds a Python value such as None at the moment."""
        slot, scalar = self.slots.get(path), self.scalars.get(path)
        if slot is None and scalar is not None:
            return Slot(scalar.container, scalar.key, path=path)
        return slot

    def value(self, path: str) -> Scalar | None:
        """Return the place of the Python value, object or length at ``path``."""
        return self.scalars.get(path) or self.objects.get(path)

    def metadata(self, path: str) -> Any:
        """Return the metadata of the tensors at ``path``, or its current Python value; ``ABSENT`` if there is none."""
        place = self.slots.get(path) or self.scalars.get(path)
        if place is not None:
            return metadata_of(place.get())
        return None if path in self.empty else ABSENT

    def tables(self, names: Collection[str]) -> list[tuple[Any, str, str]]:
        """Return the containers called one of ``names`` that code can look up numbers in: the holder of each, its key
        there, and the name. Names of attributes begin with a dot.
        """
        # Not plain objects, whose attributes other code may read all at once; nor torch's layers, which pass them to C.
        modules = (thing for thing, _ in self.attributes if names and isinstance(thing, nn.Module))
        spaces: list[Any] = [vars(module) for module in modules if not type(module).__module__.startswith("torch.")]
        spaces += [space for space, _ in self.places if isinstance(space, Members)]
        places = [(space, name[1:], name) for space in spaces for name in names if name[:1] == "."]
        places += [(space, key, key) for space, key in self.places if key in names]
        return [place for place in places if is_table(_value_at(*place[:2]))]

    def by_storage(self) -> dict[int, list[Slot]]:
        """Group the slots by the identity of their storages."""
        groups: dict[int, list[Slot]] = {}
        for slot in self.slots.values():
            for tensor in slot.tensors():
                key = storage_id(tensor)
                if key is not None:
                    groups.setdefault(key, []).append(slot)
        return groups


def _value_at(space: Any, key: str) -> Any:
    with suppress(KeyError):
        return space[key]
    return None


def is_optimizer_state(path: str) -> bool:
    """Return True if ``path`` is a slot of an optimizer's ``state``."""
    return ".state[" in path
