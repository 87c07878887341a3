"""Reads of numbers that wait until a value is needed, in a step that is traced or captured.

While :class:`DeferredReads` is entered, ``tensor.item()`` gives a :class:`graphplan.tensors.deferred.DeferredNumber`.
When the step is over, such numbers are in what it returns, in lists that it has appended to, or in its owners'
attributes. There the real numbers are put, and the trace notes how they were computed. A number that is kept elsewhere
cannot be followed: the step is undone, and run again with each number read at once.
"""

from __future__ import annotations

import gc
import sys
import weakref
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphplan.observe.conversions import Conversions
from graphplan.owners.slots import Walk
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.deferred import DeferredNumber, form_of, value_of
from graphplan.tensors.trees import flatten_result, rebuild
from graphplan.trace.changes import Changes
from graphplan.trace.host_reads import ends_step, is_operator, is_torchs

_SUMS_DIFFER = sys.version_info >= (3, 12)
"""From then on ``sum()`` makes up for what additions round off."""
_item = torch._C.TensorBase.item
_NO_NUMBERS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)
"""Code may ask whether a truth value *is* ``True``."""


class DeferredReads:
    """Defers the reads of the code that runs in the thread which enters it."""

    def __init__(self) -> None:
        self._thread = 0
        self._made: list[weakref.ref[DeferredNumber]] = []
        self._is_lost = False
        self._conversions = Conversions(on_item=self._defer)

    def __enter__(self) -> DeferredReads:
        self._thread = get_ident()
        self._conversions.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._conversions.__exit__(*exc)

    def __bool__(self) -> bool:
        return bool(self._made)

    def _defer(self, tensor: Tensor) -> Any:
        is_plain = type(tensor) in PLAIN_KINDS and tensor.layout is torch.strided and tensor.device.type != "meta"
        is_number = tensor.numel() == 1 and tensor.dtype not in _NO_NUMBERS and not tensor.is_quantized
        if not (is_plain and is_number) or torch._C._functorch.peek_interpreter_stack() is not None or is_torchs():
            return _item(tensor)
        with torch.no_grad():
            copy = tensor.clone() if tensor.dim() == 0 else tensor.reshape(()).clone()
        number = DeferredNumber(float if copy.dtype.is_floating_point else int, self, copy)
        self._made.append(weakref.ref(number))
        return number

    def read(self, tensor: Tensor) -> Any:
        """See :class:`graphplan.tensors.deferred.Reader`."""
        # No trace hears of what other threads do.
        self._is_lost |= get_ident() != self._thread
        return _item(tensor)

    def may_fail(self) -> bool:
        """See :class:`graphplan.tensors.deferred.Reader`."""
        return ends_step()

    def is_summed(self) -> bool:
        """See :class:`graphplan.tensors.deferred.Reader`."""
        is_summed = _SUMS_DIFFER and not is_operator()
        self._is_lost |= is_summed
        return is_summed

    def settle(self, result: Any, changes: Changes, after: Walk, assigned: set[str]) -> Any:
        """Put real numbers in the places of those in ``changes``, whose walk is ``after``, and in ``result``, which is
        returned. Attributes that are ``assigned`` do not have their own value among the operands.
        """
        for path, (old, new) in changes.scalars.items():
            if type(new) is DeferredNumber:
                scalar = after.scalars[path]
                changes.scalars[path] = old, form_of(new, None if scalar.key in assigned else old)[0]
                if isinstance(scalar.container, tuple):
                    self._is_lost = True
                else:
                    scalar.container[scalar.key] = value_of(new)
        for path, items in changes.appended.items():
            for number, item in enumerate(items, -len(items)):
                if has_numbers(item):
                    after.lists[path][number] = pytree.tree_map_only(DeferredNumber, value_of, item)
            changes.appended[path] = pytree.tree_map_only(DeferredNumber, lambda it: form_of(it)[0], items)
        if has_numbers(result):
            leaves, structure = flatten_result(result)
            result = rebuild(structure, list(map(value_of, leaves)))
        return result

    def are_over(self) -> bool:
        """Whether no number is anywhere, nor was one where this could not follow it."""
        if any(number() is not None for number in self._made):
            # Cycles that the step has left are young.
            gc.collect(1)
        return not self._is_lost and all(number() is None for number in self._made)


def has_numbers(tree: Any) -> bool:
    """Return True if deferred numbers are among the leaves."""
    return any(type(leaf) is DeferredNumber for leaf in flatten_result(tree)[0])
