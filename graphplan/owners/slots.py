"""What a walk over owners finds: slots, scalars, and everything else that leads to them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphplan.owners.kinds import SCALARS
from graphplan.owners.tensor_metadata import ABSENT, metadata_of
from graphplan.owners.views import Cell, GroupCounts, Inherited, Members, Numbers, attributes_of, present
from graphplan.specs.paths import free_name
from graphplan.tensors.attributes import PLAIN_KINDS, has_memory
from graphplan.tensors.dtensors import local
from graphplan.tensors.storages import storage_id
from graphplan.tensors.tables import is_table

Items = list[Any] | deque[Any]
_FEW = 3  # Further ways to a list or dictionary that are asked where it is, whichever one it is.
Container = MutableMapping[Any, Any] | Items | set[Any]


@dataclass(slots=True, eq=False)
class Scalar:
    """A place that holds a Python value; ``owner.attribute`` is the attribute that leads to it.

    With ``via``, only code that also loads an attribute of that name can have come here. ``name`` is the name by which
    the step's code has the container, or one around it, beside what the owner calls it; ``others`` are further objects
    and attributes that lead to it.
    """

    container: Any
    key: Any
    owner: Any = None
    attribute: str = ""
    via: str | None = None
    name: str | None = None
    others: tuple[tuple[Any, str], ...] = ()

    def ways(self) -> Iterator[tuple[Any, str]]:
        """The objects and attributes that lead here, its owner first; ``[:]`` stays behind an attribute."""
        yield self.owner, self.attribute
        rest = "[:]" if self.others and self.attribute.endswith("[:]") else ""
        for owner, attribute in self.others:
            yield owner, attribute + rest

    def is_called(self, names: Collection[str]) -> bool:
        """Whether an attribute that leads here is among ``names``."""
        return self.attribute in names or any(attribute in names for _, attribute in self.others)

    def get(self) -> Any:
        """The value now."""
        return present(self.container)[self.key]

    @property
    def lies_here(self) -> bool:
        """Return False for what an object only shows of what lies elsewhere, such as a property."""
        return not isinstance(self.container, (Numbers, Inherited))

    @property
    def component(self) -> str:
        """The part of the step whose number it is, as in :class:`graphplan.errors.RefusalError`."""
        return "optimizer" if isinstance(self.owner, (Optimizer, GroupCounts)) else "step"

    def rows(self, value: Any) -> Iterator[tuple[Any, ...]]:
        """What guards compare to see ``value`` here, fastest: for :func:`graphplan.compare.comparing.rows_of`."""
        container = self.container
        if isinstance(container, Inherited):
            yield from (("none_there", space, self.key) for space in container.before)
        if isinstance(container, Numbers):
            yield "equal_attributes", container.thing, self.key, value
        else:
            space = container.space if isinstance(container, Members) else present(container)
            yield "equal_items", space, self.key, value


@dataclass(slots=True, eq=False)
class Item(Scalar):
    """A place in a list or dictionary that an attribute holds, whichever one that is: schedulers make a new list of
    rates in each step. ``container`` has the attributes, ``key`` is the item's.
    """

    @property
    def items(self) -> Any:
        """The list or dictionary now. Raises KeyError if not all ways lead to one any more."""
        items = self.container[self.attribute]
        if not self.others or _lead_to(self.others, items):
            return items
        raise KeyError(self.attribute)

    def get(self) -> Any:
        """The value now."""
        return self.items[self.key]


@dataclass(slots=True, eq=False)
class Presence(Scalar):
    """Whether an object, whose attributes ``container`` has, has one that ``getattr`` or ``hasattr`` wants."""

    @property
    def _spaces(self) -> list[Any]:
        """Where the attribute would lie: a module keeps parameters, buffers and modules apart."""
        apart = ("_parameters", "_buffers", "_modules") if issubclass(type(self.owner), nn.Module) else ()
        return [self.container, *(self.container[kind] for kind in apart)]

    def get(self) -> bool:
        """Whether it is there now."""
        return any(self.key in space for space in self._spaces)

    def rows(self, value: Any) -> Iterator[tuple[Any, ...]]:
        """What guards compare where it was absent: the value of one that is there is compared itself."""
        yield from (("none_there", space, self.key) for space in self._spaces if not value)


def lasting(place: Scalar) -> Scalar:
    """``place``, or the :class:`Item` that it is now, unless code has a variable for the list or dictionary, or many
    attributes lead to it, which are compared faster than they are asked.
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
    """A place that holds a tensor, or a tuple with tensors in it. ``param`` is set for ``.grad`` slots."""

    path: str = ""
    is_parameter: bool = False
    param: Tensor | None = None

    def get(self) -> Any:
        """What the slot holds now; None if it is gone."""
        if type(self.container) is dict:
            return self.container.get(self.key)
        try:
            return present(self.container)[self.key]
        except (KeyError, IndexError):
            return None

    def set(self, value: Any) -> None:
        """Bind ``value`` here."""
        self.container[self.key] = value

    def tensors(self) -> list[Tensor]:
        """The tensor leaves of what the slot holds now: those that have the memory."""
        return tensor_leaves(self.get())


def tensor_leaves(value: Any) -> list[Tensor]:
    """Tensors with values in ``value``: itself, or the leaves of a (nested) tuple; of a DTensor its shard."""
    kind = type(value)
    if kind in PLAIN_KINDS:
        return [value] if has_memory(value) else []
    # ``isinstance`` would ask the value too, whose answer is the user's code.
    if issubclass(kind, Tensor):
        return [local(value)] if has_memory(value) else []
    return [leaf for item in value for leaf in tensor_leaves(item)] if issubclass(kind, tuple) else []


def holds_plain(value: Any) -> bool:
    """Whether other tensors with the same values are as good as those in ``value``: no attributes, no shards."""
    if isinstance(value, tuple):
        parts = [item for item in value if isinstance(item, (tuple, Tensor))]
        return bool(parts) and all(map(holds_plain, parts))
    if type(value) is not Tensor or value.layout is not torch.strided:
        return False
    return not (value.requires_grad or vars(value))


@dataclass(frozen=True, slots=True, eq=False)
class Via:
    """An owner that code reaches through an attribute called ``name`` and not otherwise."""

    thing: Any
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Reached:
    """What a library's object leads to, walked ``without`` some attributes once code loads one of ``names``."""

    thing: Any
    names: Collection[str]
    without: Collection[str] = ()


class Namespace:
    """Names that a step's code uses: globals, closure variables, functions of modules and classes. ``entries`` has the
    space and the key for each label, ``attributes`` the names that the code loads of any object. ``mentioned`` are
    names and strings in all code that ran, ``computes`` says whether the user's code computes further ones; ``asked``
    are those that it gives to ``getattr`` and ``hasattr``. ``leaves``
    are paths of tensors that are no parameters and get gradients as these do, ``iterated`` the names of what the user's
    code gives to ``next``.
    """

    def __init__(self) -> None:
        self.entries: dict[str, tuple[Any, Any]] = {}
        self.attributes: set[str] = set()
        self.mentioned: set[str] = set()
        self.asked: set[str] = set()
        self.computes = False
        self.leaves: set[str] = set()
        self.iterated: set[str] = set()
        self.functions: dict[CodeType, list[weakref.ref[FunctionType]]] = {}
        """Functions with closures that no name leads to and that were found, by their code."""
        self._known: set[tuple[int, Any]] = set()

    def add(self, label: str, space: Any, key: Any) -> bool:
        """Take in one name; False if it is known."""
        if self.has(space, key):
            return False
        self._known.add(_place(space, key))
        self.entries[free_name(label, self.entries)] = (space, key)
        return True

    def has(self, space: Any, key: Any) -> bool:
        """Whether a label leads there."""
        return _place(space, key) in self._known

    def plain(self) -> Namespace:
        """The names that lead to nothing but a number, a string or nothing: holding on to them keeps nothing alive."""
        plain = Namespace()
        plain.attributes, plain.mentioned, plain.computes = self.attributes, self.mentioned, self.computes
        plain.leaves, plain.asked = self.leaves, self.asked
        for label, space, key, value in self.there():
            if isinstance(value, SCALARS):
                plain.add(label, space, key)
        return plain

    def there(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """The names that lead to something: label, space, the key in it, and what is there."""
        for label, (space, key) in self.entries.items():
            with suppress(KeyError):
                yield label, space, key, space[key]


def _place(space: Any, key: Any) -> tuple[int, Any]:
    home = space.cell if isinstance(space, Cell) else space.kind if isinstance(space, Members) else space
    return id(home), key


@dataclass(slots=True)
class Walk:
    """All that a walk over owners found, in walking order.

    ``objects`` are objects by identity and sizes of containers: a step can depend on them, but their changes are seen
    elsewhere. ``places`` are single items of containers that are not owned as a whole. ``found`` are tensors that are
    only known by a name in the step's code, ``reached`` the paths of those that a library's object leads to.
    ``attributes`` are modules and objects, with their dictionaries. ``empty`` are the containers and keys of parameters
    and buffers that are None, ``parts`` modules and optimizers that lie in other owners, both by path. ``passed`` are
    names of attributes with data that were passed over.
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
        """Paths of what optimizers count with in their parameter groups."""
        return {path for path, scalar in self.scalars.items() if isinstance(scalar.container, GroupCounts)}

    def place(self, path: str) -> Slot | None:
        """The slot of that path, also where it holds a Python value (None, say) at the moment."""
        slot, scalar = self.slots.get(path), self.scalars.get(path)
        if slot is None and scalar is not None:
            return Slot(scalar.container, scalar.key, path=path)
        return slot

    def value(self, path: str) -> Scalar | None:
        """The Python value, object or size of that path."""
        return self.scalars.get(path) or self.objects.get(path)

    def metadata(self, path: str) -> Any:
        """What the tensors of that path are like, or the Python value that lies there now; or ``ABSENT``."""
        place = self.slots.get(path) or self.scalars.get(path)
        if place is not None:
            return metadata_of(place.get())
        return None if path in self.empty else ABSENT

    def tables(self, names: Collection[str]) -> list[tuple[Any, str, str]]:
        """Where containers lie under ``names`` in which numbers can be looked up: what holds each, its key there, and
        the name. Those of attributes begin with a dot.
        """
        # Of an object, other code may look at all attributes at once; torch's layers hand theirs to code in C.
        modules = (thing for thing, _ in self.attributes if names and isinstance(thing, nn.Module))
        spaces: list[Any] = [vars(module) for module in modules if not type(module).__module__.startswith("torch.")]
        spaces += [space for space, _ in self.places if isinstance(space, Members)]
        places = [(space, name[1:], name) for space in spaces for name in names if name[:1] == "."]
        places += [(space, key, key) for space, key in self.places if key in names]
        return [place for place in places if is_table(_value_at(*place[:2]))]

    def by_storage(self) -> dict[int, list[Slot]]:
        """Slots grouped by the identity of the storage behind them."""
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
    """Whether ``path`` is a slot of an optimizer's ``state``."""
    return ".state[" in path
