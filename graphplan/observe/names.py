"""Find the names that a code object loads and stores, from its bytecode."""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import or_
from types import CodeType
from typing import Any, NamedTuple

from graphplan.environment.origin import is_library
from graphplan.observe.bytecode import Instruction, end_of_call, loaded_path, loads_callee, plain_instructions

_DUPLICATES = ("COPY", "DUP_TOP")
_SUBSCRIPTS = ("BINARY_SUBSCR", "BINARY_OP")
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_STORES = ("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF")
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_BY_NAME = ("getattr", "hasattr")
_WHOLE = ("vars", "attrgetter", "asdict", "astuple", "getmembers", "getattr_static", "__dict__", "__getattribute__")
_GROWTH = ("append", "extend")
_SUMS = ("BINARY_OP", "INPLACE_ADD", "INPLACE_SUBTRACT")


class Names(NamedTuple):
    """Names in one code object, or in several.

    Attributes:
        dynamic: whether it accesses attributes by computed names (``vars(self)``, ``getattr(self, x)``).
        imports: modules that it imports, each with its level (1 for ``from . import x``).
        asked: literal attribute names that the user's code passes to ``getattr`` and ``hasattr``.
        attributes: attributes that it loads other than for ``self.n += 1`` or ``self.counts[k] += 1``. A second entry
            with the suffix ``[:]`` means that it does more than append to the attribute.
        methods: attributes that it calls.
        stored: attributes that it stores; ``assigned``: other than by ``+=``; ``always``: whenever it runs.
        variables: globals and closure variables that it loads or stores; ``read``: other than for ``+=``.
        iterated: variables and attributes that it passes to ``next``.
    """

    dynamic: bool
    imports: frozenset[tuple[str, int]]
    asked: frozenset[str]
    attributes: frozenset[str]
    methods: frozenset[str]
    stored: frozenset[str]
    assigned: frozenset[str]
    always: frozenset[str]
    variables: frozenset[str]
    read: frozenset[str]
    iterated: frozenset[str]

    def __or__(self, other: Names) -> Names:
        return Names(*map(or_, self, other))


_NAMES: dict[int, tuple[CodeType, Names]] = {}
"""By id: hashing a code object takes time in proportion to its length. The code is kept, so its id stays unique."""
_MANY = 2**16


def names_of(code: CodeType) -> Names:
    """Return the names of ``code``."""
    known = _NAMES.get(id(code))
    if known is None:
        if len(_NAMES) >= _MANY:
            _NAMES.clear()
        known = _NAMES[id(code)] = code, _find_names(code)
    return known[1]


def names_in(codes: Iterable[CodeType]) -> Names:
    """Return the names of all ``codes`` together."""
    dynamic, *groups = zip(Names(False, *[frozenset[Any]()] * 10), *map(names_of, codes), strict=True)
    return Names(any(dynamic), *(frozenset[Any]().union(*group) for group in groups))


class LazyNameIndex:
    """The union of one field (``kind``) of :class:`Names` over many code objects. A name is looked up on demand, in the
    code that contains the word: to find all names in a large library's code takes as long as some steps.
    """

    def __init__(self, kind: str, codes: Iterable[CodeType] = ()) -> None:
        self._kind = kind
        self._codes = {id(code): code for code in codes}
        self._spelling: dict[Any, list[CodeType]] = {}
        self._known: dict[str, bool] = {}

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        known = self._known.get(name)
        if known is None:
            codes = self._by_word().get(name.removesuffix("[:]"), ())
            known = self._known[name] = any(name in getattr(names_of(code), self._kind) for code in codes)
        return known

    def is_loaded(self, name: str) -> bool:
        """Return True if code uses ``name`` as a name, and not only as a text, which an annotation may be."""
        return any(name in code.co_names for code in self._by_word().get(name, ()))

    def __or__(self, other: LazyNameIndex) -> LazyNameIndex:
        return LazyNameIndex(self._kind, (self._codes | other._codes).values())

    def _by_word(self) -> Mapping[Any, list[CodeType]]:
        if not self._spelling:
            for code in self._codes.values():
                for word in {*code.co_names, *(each for each in code.co_consts if type(each) is str)}:
                    self._spelling.setdefault(word, []).append(code)
        return self._spelling


def _find_names(code: CodeType) -> Names:
    steps = plain_instructions(code)
    numbered = list(enumerate(steps))
    counted, raised = _counted(steps)
    loads: Counter[str] = Counter()
    grown: Counter[str] = Counter()
    methods: set[str] = set()
    stores: Counter[str] = Counter()
    variables: set[str] = set()
    reads: Counter[str] = Counter()
    certain: set[str] = set()
    joins = 0
    for at, step in numbered:
        opname, name = step.opname, step.argval
        if step.opcode in _JUMPS or opname.startswith("RETURN"):
            # Code before this place may be skipped.
            joins = max(joins, name) if step.opcode in _JUMPS else sys.maxsize
        elif _is_method_load(step):
            methods.add(name)
        elif opname == "IMPORT_FROM":
            loads[name] += 1
        elif opname == "LOAD_ATTR":
            loads[name] += 1
            grown[name] += any(_is_method_load(after) and after.argval in _GROWTH for after in steps[at + 1 : at + 2])
        elif opname == "STORE_ATTR":
            stores[name] += 1
            certain |= {name} if step.offset >= joins else set()
        elif opname in _LOADS:
            variables.add(name)
            reads[name] += 1
        elif opname in _STORES:
            variables.add(name)
    read_loads = {name: count - counted["." + name] - raised[name] for name, count in loads.items()}
    attributes = {name for name, count in read_loads.items() if count > 0}
    attributes |= {f"{name}[:]" for name, count in read_loads.items() if count > grown[name]}
    assigned = {name for name, count in stores.items() if count > raised[name]}
    # getattr(self, "temperature")
    strings = {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
    asked = [_second_argument(code, steps, at) for at, step in numbered if _loads(step, _BY_NAME)]
    spelt: set[str] = set()
    if not is_library(code.co_filename):
        spelt.update(filter(None, asked))
        attributes |= strings
    read = {name for name, count in reads.items() if count > counted[name]}
    # The two instructions before IMPORT_NAME load the level and the names to import.
    imports = {(step.argval, int(steps[at - 2].argval or 0)) for at, step in numbered if step.opname == "IMPORT_NAME"}
    # The named arguments of ``next``.
    given = (loaded_path(steps[at + 1 :], (*_LOADS, "LOAD_FAST")) for at, step in numbered if _loads(step, ("next",)))
    iterated = {name for path in given for name in path[-1:]}
    groups = (spelt, attributes, methods, set(stores), assigned, assigned & certain, variables, read, iterated)
    is_dynamic = None in asked or any(step.opname == "MATCH_CLASS" for step in steps) or _takes_all(code, steps)
    return Names(is_dynamic, frozenset(imports), *map(frozenset, groups))


def _loads(step: Instruction, names: Sequence[str]) -> bool:
    """Return True if the instruction loads a variable with one of ``names``."""
    return step.opname in _LOADS and step.argval in names


def _takes_all(code: CodeType, steps: list[Instruction]) -> bool:
    """Return True if ``code`` accesses all attributes of an object (``vars``, ``__dict__``)."""
    spelt = {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
    spelt.update(constant for constant in code.co_consts if type(constant) is str)
    is_spelt = not spelt.isdisjoint(_WHOLE)
    return is_spelt and any(step.opname.startswith("LOAD") and step.argval in _WHOLE for step in steps)


def _second_argument(code: CodeType, steps: list[Instruction], at: int) -> str | None:
    """Return the literal second argument of the call of what is loaded at ``at``; None for any other, and if there is a
    third argument that is no constant or variable.
    """
    call = end_of_call(code, steps[at].offset)
    if call is None or call.arg not in (2, 3):
        return None
    given = [step for step in steps[at + 1 :] if step.offset < call.offset]
    is_last_simple = given[-1].opname in ("LOAD_CONST", "LOAD_FAST", *_LOADS)
    found = given[1 - call.arg].argval if is_last_simple and given[1 - call.arg].opname == "LOAD_CONST" else None
    return found if isinstance(found, str) and found.isidentifier() else None


def _counted(steps: list[Instruction]) -> tuple[Counter[str], Counter[str]]:
    """Count how often ``+=`` changes each variable (``n``) or item of an attribute (``.n``); and each attribute."""
    counted: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    for index, step in enumerate(steps):
        opname, name, before = step.opname, step.argval, steps[max(index - 1, 0)]
        if opname == "LOAD_ATTR" and before.opname in _DUPLICATES:
            # self.n += 1 loads and stores through one duplicated reference.
            raised[name] += 1
        elif opname in _SUBSCRIPTS and _is_augmented_item(steps[max(index - 2, 0) : index]):
            # This instruction loaded the container, if a single instruction loads the key.
            holder = steps[max(index - (3 if before.opname == "DUP_TOP_TWO" else 4), 0)]
            if holder.opname == "LOAD_ATTR":
                counted["." + holder.argval] += 1
            elif holder.opname in _LOADS:
                counted[holder.argval] += 1
        elif opname in _STORES and index >= 3 and before.opname in _SUMS:
            load = steps[index - 3]
            if load.opname in _LOADS and load.argval == name:
                counted[name] += 1
    return counted, raised


def _is_augmented_item(before: list[Instruction]) -> bool:
    """Return True if the instructions duplicate a container and its key, as ``counts[k] += 1`` does."""
    names = [step.opname for step in before]
    return names == ["COPY", "COPY"] or names[-1:] == ["DUP_TOP_TWO"]


def _is_method_load(step: Instruction) -> bool:
    """Return True for a load of a method to call: since Python 3.12, a ``LOAD_ATTR`` with its lowest bit set."""
    if step.opname == "LOAD_METHOD":
        return True
    return step.opname == "LOAD_ATTR" and loads_callee(step)
