"""Decide if one trace is enough for a plan, so that the check of the first replay takes the place of a second trace."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.utils._pytree import tree_leaves

from graphplan.owners.slots import is_optimizer_state
from graphplan.owners.views import CallNumbers, ReadOnly
from graphplan.specs.paths import Fact, names
from graphplan.tensors.deferred import NumberForm
from graphplan.trace.changes import Rebinding
from graphplan.trace.records import OutputTensor, Trace
from graphplan.trace.symbolic_numbers import SymbolicNumbers


def one_trace_suffices(trace: Trace, rates: Collection[int]) -> bool:
    """Return True if one trace of a step is enough. The step must use only fed and owned tensors and numbers with
    stand-ins, must not branch on values that it reads from the device, and may leave only such changes in Python as the
    check of a replay compares. ``rates`` are storages of device learning rates.

    Two such steps can differ only by a Python value that no guard compares. The capture detects it if the step returns
    it or compares it with a number; the check of the first replay, if it changes an operator, an operator's number or
    what the step leaves.
    """
    known = trace.entry_slots.keys() | set(trace.leaf_storages.values())
    given = trace.symbolic.given
    others = (
        storage for storage, each in trace.externals.items() if not (each.is_temporary or id(each.tensor) in given)
    )
    is_owned = set(others).difference(rates) <= known
    runs_otherwise = trace.graph_elsewhere or _shows_rates(trace, rates)
    return is_owned and not (runs_otherwise or _works_on_host(trace) or _leaves_more(trace))


def _shows_rates(trace: Trace, rates: Collection[int]) -> bool:
    """Return True if an operator outside the optimizer uses a device learning rate (a number in eager steps)."""
    met = (external for storage, external in trace.externals.items() if storage in rates)
    return any(external.source.component != "optimizer" for external in met)


def _works_on_host(trace: Trace) -> bool:
    """Return True if the step uses device reads for more than numbers that it returns, logs or keeps, or if it prints
    or draws. Constants count as Python numbers: a capture compares those that it copies to the device with the trace.
    torch's draws on the host do not count, since a replay repeats them.
    """
    reads = any(read.expected for read in trace.host_reads)
    if reads or trace.prints or trace.deferred.shows_more:
        return True
    return bool(trace.draws or trace.operator_draws) or _follows(trace.symbolic, trace.changes.scalars.keys())


def _follows(numbers: SymbolicNumbers, changed: Collection[str]) -> bool:
    """Return True if the step does more with stand-ins for numbers than branch on them or pass them to operators, or if
    owners hold such numbers that are not in ``changed``: one trace cannot tell if the step sets one to its old value.
    """
    others = (place for path, place in numbers.places.items() if path not in changed)
    is_given = all(type(place.container) in (CallNumbers, ReadOnly) for place in others)
    needs_more = numbers.used.keys() - changed or numbers.behind or numbers.rewrites
    return bool(needs_more) or not is_given


def _leaves_more(trace: Trace) -> bool:
    """Return True if the step leaves any change other than: gradients, memory that it writes to, slots rebound to a
    tensor of the same geometry (sums of a metric), integers that it raises, tensors that it appends, and numbers set to
    values that it reads or computes.
    """
    changes = trace.changes
    is_known = all(_is_raised(old, new) or isinstance(new, NumberForm) for old, new in changes.scalars.values())
    is_known &= all(names(path, Fact.GRADIENT) or _gets_alike(each) for path, each in changes.rebindings.items())
    is_known &= all(isinstance(leaf, OutputTensor) for leaf in tree_leaves(list(changes.appended.values())))
    return bool(changes.moved or changes.flags or changes.renewed) or not is_known


def _is_raised(old: Any, new: Any) -> bool:
    return type(old) is type(new) is int and old < new


def _gets_alike(rebinding: Rebinding) -> bool:
    """Return True if a slot gets a tensor of the same shape and dtype; False for optimizer state, which may restart."""
    forms = [[(place[2], place[4]) for place in places or ()] for places in (rebinding.before, rebinding.after)]
    is_kept = rebinding.plain and not (rebinding.moved or rebinding.joined or rebinding.follows)
    return is_kept and bool(forms[0]) and forms[0] == forms[1] and not is_optimizer_state(rebinding.path)
