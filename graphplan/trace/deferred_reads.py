"""Reads of numbers and copies to the host that wait until a value is needed, in a step that is traced or captured.

While :class:`DeferredReads` is entered, ``tensor.item()`` gives a :class:`graphplan.tensors.deferred.DeferredNumber`,
and ``tensor.cpu()`` a :class:`graphplan.tensors.deferred.HostCopy`. When the step is over, they are in what it returns,
in lists that it has appended to, or, numbers only, in its owners' attributes. There real ones are put, and the trace
notes how numbers were computed. What is kept elsewhere cannot be followed: the step is undone, and run again with
each read at once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Container, Sequence
from contextlib import nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from graphplan.observe.conversions import Conversions
from graphplan.owners.flags import Flags
from graphplan.owners.slots import Walk
from graphplan.tensors.attributes import PLAIN_KINDS
from graphplan.tensors.deferred import (
    DeferredArray,
    DeferredNumber,
    HostCopy,
    form_of,
    instead,
    is_deferred,
    on_device,
    value_of,
)
from graphplan.tensors.trees import flatten_result, rebuild
from graphplan.trace.changes import Changes
from graphplan.trace.host_reads import Place, ends_step, find_place, is_torchs, sums_otherwise
from graphplan.trace.operator_schemas import AS_ON_DEVICE
from graphplan.trace.symbolic_numbers import SymbolicNumbers

_item, _to, _numpy = torch._C.TensorBase.item, torch._C.TensorBase.to, torch._C.TensorBase.numpy
_NO_NUMBERS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)
"""Code may ask whether a truth value *is* ``True``."""


class DeferredReads:
    """Defers the reads of the code that runs in the thread which enters it. Copies hold what they are copies of if it
    ``fills`` them: a capture cannot. ``symbolic`` are the stand-ins for owners' numbers; with ``defers=False`` nothing
    else waits. ``int(tensor)`` waits at the places ``whole`` alone: C code takes no stand-in for what most of it gives.
    """

    def __init__(
        self,
        *,
        fills: bool = True,
        defers: bool = True,
        symbolic: SymbolicNumbers | None = None,
        whole: Collection[Place] = (),
    ) -> None:
        self._thread = self._modes = 0
        self._fills, self.defers, self.whole = fills, defers, frozenset(whole)
        self._made: list[weakref.ref[Any]] = []
        self._memories: list[StorageWeakRef] = []
        self._is_lost = False
        self._reads = False
        self._is_over = False
        self.computes = False
        """Whether operators have worked with numbers of which eager steps have values."""
        self._begins_slices = self._needs_whole = False
        """Whether code has written to slices that begin at such numbers, and whether it has needed what waits at the
        places ``whole``.
        """
        self._whole: set[int] = set()
        """What is read there, by identity."""
        self._has_copied = False
        self._has_replaced = False
        """Whether code has needed copies, or was given tensors of lists, or truth values in place of other reads."""
        self.copies: dict[int, tuple[HostCopy, Tensor]] = {}
        """Copies whose values were not needed and what they are copies of, by the identity of the copy."""
        self._moved: set[int] = set()
        self._derived: set[int] = set()
        """Those from which autograd would lead back."""
        self._real_copies: dict[int, Tensor] = {}
        self.symbolic = SymbolicNumbers() if symbolic is None else symbolic
        deferring = Conversions(
            on_item=self._defer, on_copy=self._copy, on_list=self._stack, on_truth=self._ask,
            on_whole=self._defer_whole if whole else None,
        )  # fmt: skip
        conversions = deferring if defers else Conversions()
        # Compiled code, which gets stand-ins for arguments alone, is best left with torch's own methods.
        self._conversions = conversions if defers or self.symbolic.may_be_there else nullcontext()

    def __enter__(self) -> DeferredReads:
        self._thread = get_ident()
        self._modes = torch._C._len_torch_dispatch_stack()
        self.symbolic.__enter__()
        self._conversions.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._conversions.__exit__(*exc)
        try:
            self.symbolic.__exit__(*exc)
        finally:
            for copy, _ in self.copies.values():
                copy.settle()

    def __bool__(self) -> bool:
        return bool(self._made or self.copies or self._is_lost or self._has_replaced)

    @property
    def shows_more(self) -> bool:
        """Whether code was given more than numbers of which nothing else was made on the device."""
        return self.computes or self._has_copied or self._is_lost or self._has_replaced

    @property
    def has_stand_ins(self) -> bool:
        """Whether code was given what is no real number or tensor."""
        return bool(self) or self.symbolic.are_there

    def _copy(self, tensor: Tensor) -> Tensor | None:
        if type(tensor) is HostCopy:
            return tensor
        is_on_device = tensor.device.type != "cpu" or AS_ON_DEVICE.get()
        if self._reads or not is_on_device or not _is_plain(tensor) or is_torchs():
            return None
        with torch.no_grad():
            copy = self._copy_of(tensor.detach().clone())
        if tensor.requires_grad and torch.is_grad_enabled():
            self._derived.add(id(copy))
        return copy

    def _stack(self, numbers: Sequence[Tensor]) -> Tensor | None:
        """What ``torch.tensor(numbers)`` gives: a copy that waits, or a tensor for which the host reads no value."""
        kinds = {(each.dtype, each.device) for each in numbers}
        if len(kinds) > 1 or is_torchs() or not all(map(_is_plain, numbers)):
            return None
        self._has_replaced = True
        with torch.no_grad():
            stacked = torch.stack([each.detach() for each in numbers])
        is_on_device = stacked.device.type != "cpu" or AS_ON_DEVICE.get()
        return self._copy_of(stacked) if is_on_device else stacked

    def _ask(self, truth: Tensor) -> bool:
        """A truth value in place of another read: replays can compare it."""
        self._has_replaced = True
        return bool(truth)

    def _copy_of(self, source: Tensor) -> Tensor:
        with _disable_current_modes():
            memory = _to(source, "cpu", copy=True) if self._fills else torch.empty_like(source, device="cpu")
            copy = HostCopy.of(source, memory, self)
        self.copies[id(copy)] = copy, source
        self._has_copied = True
        return copy

    def move(self, copy: HostCopy, function: Callable[[Tensor], Tensor], *, detaches: bool) -> Tensor:
        """What ``function`` makes of ``copy``, made of its source; it may detach values from autograd's graph."""
        source = function(copy.source)
        if source is copy.source:
            return copy
        moved = self._copy_of(source)
        self._moved |= {id(copy), id(moved)}
        if id(copy) in self._derived and not detaches:
            self._derived.add(id(moved))
        return moved

    def need(self, copy: HostCopy) -> None:
        """Code is about to look at what ``copy`` holds: from now on it is a tensor like any other."""
        # Others that lie in its memory would not see what is written to it.
        self._is_lost |= id(copy) in self._moved or id(copy) in self._derived or get_ident() != self._thread
        # C code has passed its memory to an operator already: the trace, which is being told of that, hears of no read.
        self._is_lost |= torch._C._len_torch_dispatch_stack() < self._modes
        _, source = self.copies.pop(id(copy))
        self._has_replaced = True
        copy.settle()
        self._reads = True
        try:
            copy.data = source.cpu()
        finally:
            self._reads = False

    def _defer(self, tensor: Tensor) -> Any:
        if type(tensor) is HostCopy:
            tensor = tensor.source
        is_number = tensor.numel() == 1 and tensor.dtype not in _NO_NUMBERS and not tensor.is_quantized
        if not (_is_plain(tensor) and is_number) or is_torchs():
            return _item(tensor)
        device = self.symbolic.device
        is_elsewhere = device is not None and device.type != tensor.device.type == "cpu"
        with torch.no_grad(), instead("operators"):
            copy = tensor if tensor.dim() == 0 else tensor.reshape(())
            # A replay reads no host memory: it has a copy where it computes.
            copy = _to(copy, device) if is_elsewhere else copy.clone()
        number = DeferredNumber(float if copy.dtype.is_floating_point else int, self, copy)
        self._made.append(weakref.ref(number))
        return number

    def _defer_whole(self, tensor: Tensor) -> Any:
        number = self._defer(tensor) if find_place() in self.whole else None
        if is_deferred(number):
            self._whole.add(id(number._source))
        return number

    def array_of(self, copy: HostCopy) -> Any:
        """What ``copy.numpy()`` gives."""
        if id(copy) in self._derived:
            self.need(copy)
            return copy.numpy()
        with _disable_current_modes():
            # There are none of some dtypes.
            kind = type(_numpy(torch.empty(0, dtype=copy.dtype, device="cpu")))
        self._moved.add(id(copy))
        array = DeferredArray(kind, self, copy.source)
        self._made.append(weakref.ref(array))
        return array

    def read(self, tensor: Tensor, kind: type) -> Any:
        """A tensor's only element, or all as an array if that is the ``kind``. It is asked each time that a value is
        needed: what may be read for one purpose may not be for another.
        """
        if kind not in (bool, int, float):
            # Code may write to what it is given.
            self._is_lost |= not self._is_over
            return _numpy(_to(tensor, "cpu", copy=True))
        # No trace hears of what other threads do.
        self._is_lost |= get_ident() != self._thread
        self._needs_whole |= id(tensor) in self._whole and not self._is_over
        return _item(tensor)

    def tensor_of(
        self, number: DeferredNumber, dtype: torch.dtype, device: torch.device, *, is_operand: bool = False
    ) -> Tensor | None:
        """A scalar tensor with the value; None if that is not where the step computes, or other code would see it."""
        if self.symbolic.is_seen() or get_ident() != self._thread:
            return None
        made = on_device(number, dtype)
        return made if made.device == device else None

    def fits(self, begin: Tensor, length: int, size: int) -> bool:
        """Whether a slice lies within ``size``, where that can be looked at, and no code of the step catches the error
        of one that does not. Notes that the step writes to one.
        """
        with _disable_current_modes():
            first = _item(begin) if self._fills or self.symbolic.may_fill else 0
        does = (0 <= first <= size - length or -size <= first < -length) and ends_step(Exception)
        self._begins_slices |= does
        return does

    @property
    def waits_for_good(self) -> bool:
        """Whether integers that wait begin slices, and code has needed none of them."""
        return self._begins_slices and not self._needs_whole

    def may_fail(self) -> bool:
        """Whether a computation may wait that raises an exception for some values: no code catches that."""
        return ends_step(ArithmeticError, TypeError, ValueError)

    def is_summed(self) -> bool:
        """Whether numbers are added that ``sum()`` is given, where that does not round as ``+`` does."""
        is_summed = sums_otherwise()
        self._is_lost |= is_summed
        return is_summed

    def settle(self, result: Any, changes: Changes, after: Walk, assigned: Container[str]) -> tuple[Any, bool]:
        """Put real numbers in the places of those in ``changes``, whose walk is ``after``, and in ``result``, which is
        returned, with whether anything was put anywhere. Attributes that are ``assigned`` do not have their own value
        among the operands.
        """
        self._is_over = True
        has_put = bool(self)
        for path, (old, new) in changes.scalars.items():
            if is_deferred(new):
                self._is_lost |= new.is_array
                scalar = after.scalars[path]
                own = None if scalar.key in assigned else old
                changes.scalars[path] = (
                    old,
                    self.symbolic.settle(path, new, own) if new.is_symbolic else form_of(new, own)[0],
                )
                if isinstance(scalar.container, tuple):
                    self._is_lost = True
                else:
                    scalar.container[scalar.key] = value_of(new)
                    has_put = True
        self._settle_flags(changes, after)
        for path, items in changes.appended.items():
            held = after.lists[path]
            for number in range(-len(items), 0):
                if self._is_among(held[number]):
                    has_put = True
                    held[number] = pytree.tree_map_only((DeferredNumber, Tensor), self._real, held[number])
            changes.appended[path] = pytree.tree_map_only(DeferredNumber, lambda it: form_of(it)[0], items)
        if self._is_among(result):
            leaves, structure = flatten_result(result)
            result = rebuild(structure, list(map(self._real, leaves)))
        for copy, _ in self.copies.values():
            self._made.append(weakref.ref(copy))
            if id(copy) not in self._real_copies:
                # C code may have taken it without the tensor: ``held.data = copy``.
                self._memories.append(StorageWeakRef(copy.untyped_storage()))
        self.copies, self._real_copies = {}, {}
        return result, has_put

    def _settle_flags(self, changes: Changes, after: Walk) -> None:
        """Replays compute owners' numbers there, a learning rate say; of others they leave the traced steps' values."""
        flags = {path: new for path, (_, new) in changes.flags.items() if is_deferred(new)}
        for path, number in flags.items():
            self._is_lost |= not number.is_symbolic
            form = form_of(number)[0] if number.is_symbolic else value_of(number)
            changes.flags[path] = changes.flags[path][0], form
        if flags:
            Flags(after).assign({path: value_of(number) for path, number in flags.items()})

    def _is_among(self, tree: Any) -> bool:
        return any(is_deferred(leaf) or id(leaf) in self.copies for leaf in flatten_result(tree)[0])

    def _real(self, leaf: Any) -> Any:
        """The number or the tensor for what was deferred; others as they are."""
        if id(leaf) not in self.copies:
            return value_of(leaf)
        # Replays would have none of the attributes that code has given it.
        self._is_lost |= bool(vars(leaf))
        # One for all places that have it.
        return self._real_copies.setdefault(id(leaf), leaf.detach())

    def are_over(self) -> bool:
        """Whether no number is anywhere, nor was one where this could not follow it."""
        return not self.are_kept() and not self._is_lost

    def are_kept(self) -> bool:
        """Whether a number is still anywhere."""
        if self._is_anywhere():
            # Cycles that the step has left are young.
            gc.collect(1)
        return self._is_anywhere()

    def _is_anywhere(self) -> bool:
        is_kept = any(number() is not None for number in self._made)
        return is_kept or not all(memory.expired() for memory in self._memories)


def _is_plain(tensor: Tensor) -> bool:
    is_dense = type(tensor) in PLAIN_KINDS and tensor.layout is torch.strided and tensor.device.type != "meta"
    return is_dense and torch._C._functorch.peek_interpreter_stack() is None
