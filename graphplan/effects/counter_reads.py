"""Whether code reads a number that the step counts with, for more than to raise it."""

from __future__ import annotations

import dis
from collections.abc import Mapping
from types import CodeType

from torch.optim import Optimizer

from graphplan.owners.group_counts import GroupCounts
from graphplan.owners.slots import Scalar
from graphplan.trace.records import Trace

_PADDING = ("CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL", "PUSH_NULL")
_DUPLICATES = ("COPY", "DUP_TOP_TWO")


def is_item_of_optimizer(scalar: Scalar) -> bool:
    """Whether ``scalar`` is an item of an optimizer's state or of a parameter group, which code has by its key."""
    if isinstance(scalar.owner, GroupCounts):
        return True
    if not isinstance(scalar.owner, Optimizer) or scalar.container is vars(scalar.owner):
        return False
    return isinstance(scalar.container, Mapping) and isinstance(scalar.key, str)


def is_read(scalar: Scalar, trace: Trace) -> bool:
    """Whether code of the trace uses the number."""
    if not is_item_of_optimizer(scalar):
        return trace.reads.uses(scalar)
    return any(_uses_item(code, scalar.key) for code, _ in trace.reads.codes)


def _uses_item(code: CodeType, key: str) -> bool:
    """Whether ``code`` has the literal ``key`` for anything but ``items[key] += 1``, ``items[key] = 0``, and ``key in
    items``.
    """
    if key not in code.co_consts:
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname not in _PADDING]
    for index, step in enumerate(steps):
        if step.opname == "LOAD_CONST" and step.argval == key:
            following = [after.opname for after in steps[index + 1 : index + 3]]
            is_stored = following[:1] == ["STORE_SUBSCR"] or following[:1][0] in _DUPLICATES
            if not is_stored and following[1:] != ["CONTAINS_OP"]:
                return True
    return False
