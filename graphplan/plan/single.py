"""Where one trace makes a plan, and the check of the first replay stands for a second one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.utils._pytree import tree_leaves

from graphplan.owners.slots import is_optimizer_state
from graphplan.owners.views import Given, Numbers
from graphplan.specs.paths import Of, names
from graphplan.tensors.deferred import NumberForm
from graphplan.trace.changes import Rebinding
from graphplan.trace.records import OutputTensor, Trace
from graphplan.trace.symbolic_numbers import SymbolicNumbers


def suffices(trace: Trace, rates: Collection[int]) -> bool:
    """Whether one trace of a step is enough: it works with what is fed or owned alone and with numbers that are
    followed or drawn, branches on nothing that it reads of the device, and leaves nothing in Python but what the check
    of a replay compares. ``rates`` are storages of device learning rates.

    What differs between two such steps is a Python value that no guard knows. The capture finds it if it is returned or
    compared with a number, and the check of the first replay if it leads to other operators, is a number that one gets,
    or changes what the step leaves.
    """
    known = trace.entry_slots.keys() | set(trace.leaf_storages.values())
    given = trace.symbolic.given
    others = (storage for storage, each in trace.externals.items() if not (each.is_passing or id(each.tensor) in given))
    is_owned = set(others).difference(rates) <= known
    runs_otherwise = trace.graph_elsewhere or _shows_rates(trace, rates)
    return is_owned and not (runs_otherwise or _works_on_host(trace) or _leaves_more(trace))


def _shows_rates(trace: Trace, rates: Collection[int]) -> bool:
    """Whether others than the optimizer's kernels get a device learning rate, which is a number in eager steps."""
    met = (external for storage, external in trace.externals.items() if storage in rates)
    return any(external.source.component != "optimizer" for external in met)


def _works_on_host(trace: Trace) -> bool:
    """Whether the step reads values of the device that may decide something, or keeps, prints or draws some in Python.
    Constants are as good as Python's numbers: a capture compares those that it copies to the device with the trace.
    What torch draws on the host, a replay draws again. Numbers that are only returned, logged or kept decide nothing.
    """
    reads = any(read.expected for read in trace.host_reads)
    if reads or trace.prints or (trace.deferred is not None and trace.deferred.shows_more):
        return True
    return bool(trace.draws or trace.drawings) or _follows(trace.symbolic, trace.changes.scalars.keys())


def _follows(numbers: SymbolicNumbers, changed: Collection[str]) -> bool:
    """Whether the step does more with numbers that have stand-ins than to branch on them and to give them to operators
    that take numbers; or owners have some beside those that it has ``changed``: a trace cannot tell if it sets one to
    the value that it has.
    """
    others = (place for path, place in numbers.places.items() if path not in changed)
    is_given = all(type(place.container) in (Given, Numbers) for place in others)
    needs_more = numbers.used.keys() - changed or numbers.behind or numbers.rewrites
    return bool(needs_more) or not is_given


def _leaves_more(trace: Trace) -> bool:
    """Whether the step leaves more changed than gradients, memory that it writes to, tensors of one form that follow
    each other in their places, as sums of a metric do, integers that it raises, tensors that it appends, and numbers
    that it sets to what it reads or computes.
    """
    changes = trace.changes
    is_known = all(_is_raised(old, new) or isinstance(new, NumberForm) for old, new in changes.scalars.values())
    is_known &= all(names(path, Of.GRADIENT) or _gets_alike(each) for path, each in changes.rebindings.items())
    is_known &= all(isinstance(leaf, OutputTensor) for leaf in tree_leaves(list(changes.appended.values())))
    return bool(changes.moved or changes.flags or changes.renewed) or not is_known


def _is_raised(old: Any, new: Any) -> bool:
    return type(old) is type(new) is int and old < new


def _gets_alike(rebinding: Rebinding) -> bool:
    """Whether a slot gets another tensor like the one that it held. Optimizers may begin anew with theirs."""
    forms = [[(place[2], place[4]) for place in places or ()] for places in (rebinding.before, rebinding.after)]
    is_kept = rebinding.plain and not (rebinding.moved or rebinding.joined or rebinding.follows)
    return is_kept and bool(forms[0]) and forms[0] == forms[1] and not is_optimizer_state(rebinding.path)
