"""Reads of numbers and copies to the host that a traced or captured step defers until code needs a value.

While :class:`DeferredReads` is entered, ``tensor.item()`` returns a :class:`graphplan.tensors.deferred.DeferredNumber`,
and ``tensor.cpu()`` a :class:`graphplan.tensors.deferred.HostCopy`. After the step, they may be in its result, in lists
that it has appended to, or, numbers only, in its owners' attributes. Real ones replace them there, and the trace
records how numbers were computed. One that is kept elsewhere cannot be followed: the step is undone, and run again
with immediate reads.
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
from graphplan.trace.host_reads import CodePosition, ends_step, find_place, is_torchs, sums_otherwise
from graphplan.trace.operator_schemas import AS_ON_DEVICE
from graphplan.trace.symbolic_numbers import SymbolicNumbers

_item, _to, _numpy = torch._C.TensorBase.item, torch._C.TensorBase.to, torch._C.TensorBase.numpy
_NO_NUMBERS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)
"""Dtypes whose reads are not deferred: code may ask whether a truth value *is* ``True``."""


class DeferredReads:
    """A context that defers the host reads of its thread. If it ``fills`` host copies, they hold the values of their
    sources: a capture cannot do that. ``symbolic`` are the stand-ins for owners' numbers; ``defers=False`` leaves only
    these. ``int(tensor)`` is deferred only at ``integer_places``: most integers go to C code, which needs real ones.
    """

    def __init__(
        self,
        *,
        fills: bool = True,
        defers: bool = True,
        symbolic: SymbolicNumbers | None = None,
        integer_places: Collection[CodePosition] = (),
    ) -> None:
        self._thread = self._modes = 0
        self._fills, self.defers, self.integer_places = fills, defers, frozenset(integer_places)
        self._made: list[weakref.ref[Any]] = []
        self._memories: list[StorageWeakRef] = []
        self._is_lost = False
        self._reads = False
        self._is_over = False
        self.computes = False
        """Whether operators have worked with deferred numbers, where eager steps use values."""
        self._begins_slices = self._needs_whole = False
        """Whether code has written to slices that begin at deferred numbers, and whether it has needed the value of a
        number that was read at the places ``integer_places``.
        """
        self._whole: set[int] = set()
        """Ids of the tensors that are read there."""
        self._has_replaced = False
        """Whether code got a host copy, or a stacked tensor or a truth value in place of other reads."""
        self.copies: dict[int, tuple[HostCopy, Tensor]] = {}
        """Host copies whose values were not needed, and their sources, by the id of the copy."""
        self._moved: set[int] = set()
        self._derived: set[int] = set()
        """Ids of host copies that are part of autograd's graph in an eager step."""
        self._real_copies: dict[int, Tensor] = {}
        self.symbolic = SymbolicNumbers() if symbolic is None else symbolic
        deferring = Conversions(
            on_item=self._defer, on_copy=self._copy, on_list=self._stack, on_bool=self._ask,
            on_int=self._defer_whole if integer_places else None,
        )  # fmt: skip
        conversions = deferring if defers else Conversions()
        # Keep torch's own methods for compiled code, which only gets stand-ins for arguments.
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
        return bool(self._made or self._is_lost or self._has_replaced)

    @property
    def shows_more(self) -> bool:
        """Whether code got more than deferred numbers with which no operator has worked."""
        return self.computes or self._is_lost or self._has_replaced

    @property
    def has_stand_ins(self) -> bool:
        """Whether code got anything in place of a real number or tensor."""
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
        """Return ``torch.tensor(numbers)`` as a host copy, or as a tensor for which the host reads no value."""
        kinds = {(each.dtype, each.device) for each in numbers}
        if len(kinds) > 1 or is_torchs() or not all(map(_is_plain, numbers)):
            return None
        self._has_replaced = True
        with torch.no_grad():
            stacked = torch.stack([each.detach() for each in numbers])
        is_on_device = stacked.device.type != "cpu" or AS_ON_DEVICE.get()
        return self._copy_of(stacked) if is_on_device else stacked

    def _ask(self, truth: Tensor) -> bool:
        """Return a truth value in place of another read: replays can compare it."""
        self._has_replaced = True
        return bool(truth)

    def _copy_of(self, source: Tensor) -> Tensor:
        with _disable_current_modes():
            memory = _to(source, "cpu", copy=True) if self._fills else torch.empty_like(source, device="cpu")
            copy = HostCopy.of(source, memory, self)
        self.copies[id(copy)] = copy, source
        self._has_replaced = True
        return copy

    def move(self, copy: HostCopy, function: Callable[[Tensor], Tensor], *, detaches: bool) -> Tensor:
        """Return ``function`` of ``copy``, computed from its source. It may detach values from autograd's graph."""
        source = function(copy.source)
        if source is copy.source:
            return copy
        moved = self._copy_of(source)
        self._moved |= {id(copy), id(moved)}
        if id(copy) in self._derived and not detaches:
            self._derived.add(id(moved))
        return moved

    def need(self, copy: HostCopy) -> None:
        """Give ``copy`` its values, since code needs them: from now on it is an ordinary tensor."""
        # Copies that share its memory in an eager step would not see writes to it.
        self._is_lost |= id(copy) in self._moved or id(copy) in self._derived or get_ident() != self._thread
        # Inside the dispatch mode, C code has already passed the memory to an operator: the trace records no read.
        self._is_lost |= torch._C._len_torch_dispatch_stack() < self._modes
        _, source = self.copies.pop(id(copy))
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
            # A replay reads no host memory: it needs a copy on its device.
            copy = _to(copy, device) if is_elsewhere else copy.clone()
        number = DeferredNumber(float if copy.dtype.is_floating_point else int, self, copy)
        self._made.append(weakref.ref(number))
        return number

    def _defer_whole(self, tensor: Tensor) -> Any:
        number = self._defer(tensor) if find_place() in self.integer_places else None
        if is_deferred(number):
            self._whole.add(id(number._source))
        return number

    def array_of(self, copy: HostCopy) -> Any:
        """Return the result of ``copy.numpy()``, deferred unless the copy is part of autograd's graph."""
        if id(copy) in self._derived:
            self.need(copy)
            return copy.numpy()
        with _disable_current_modes():
            # For dtypes that NumPy lacks, this raises torch's error.
            kind = type(_numpy(torch.empty(0, dtype=copy.dtype, device="cpu")))
        self._moved.add(id(copy))
        array = DeferredArray(kind, self, copy.source)
        self._made.append(weakref.ref(array))
        return array

    def read(self, tensor: Tensor, kind: type) -> Any:
        """Read a tensor's only element, or all as an array if that is the ``kind``. This is called each time that code
        needs a value: a read that is allowed for one purpose may not be for another.
        """
        if kind not in (bool, int, float):
            # Code may write to the array.
            self._is_lost |= not self._is_over
            return _numpy(_to(tensor, "cpu", copy=True))
        # A trace does not see the Python code of other threads.
        self._is_lost |= get_ident() != self._thread
        self._needs_whole |= id(tensor) in self._whole and not self._is_over
        return _item(tensor)

    def tensor_of(
        self, number: DeferredNumber, dtype: torch.dtype, device: torch.device, *, is_operand: bool = False
    ) -> Tensor | None:
        """Return a scalar tensor with the value; None if the step computes elsewhere, or other code would see it."""
        if self.symbolic.is_seen() or get_ident() != self._thread:
            return None
        made = on_device(number, dtype)
        return made if made.device == device else None

    def fits(self, begin: Tensor, length: int, size: int) -> bool:
        """Return True if a slice lies within ``size``, as far as that can be read here, and no code of the step catches
        the error of one that does not. Note that the step writes to such a slice.
        """
        with _disable_current_modes():
            first = _item(begin) if self._fills or self.symbolic.may_fill else 0
        does = (0 <= first <= size - length or -size <= first < -length) and ends_step(Exception)
        self._begins_slices |= does
        return does

    @property
    def deferring_helps(self) -> bool:
        """Whether deferred integers begin slices, and code has needed the value of none."""
        return self._begins_slices and not self._needs_whole

    def may_fail(self) -> bool:
        """Return True if no code of the step would catch an error of a computation: it may be deferred then."""
        return ends_step(ArithmeticError, TypeError, ValueError)

    def is_summed(self) -> bool:
        """Return True if ``sum()`` is adding the numbers, and rounds differently from ``+``."""
        is_summed = sums_otherwise()
        self._is_lost |= is_summed
        return is_summed

    def settle(self, result: Any, changes: Changes, after: Walk, assigned: Container[str]) -> tuple[Any, bool]:
        """Replace deferred numbers and host copies by real ones in ``result``, and in ``changes`` and the places that
        the walk ``after`` has for them. Attributes that are ``assigned`` do not have their own old value among the
        operands. Return the result, and whether anything was replaced.
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
                # C code may keep its memory without the tensor: ``held.data = copy``.
                self._memories.append(StorageWeakRef(copy.untyped_storage()))
        self.copies, self._real_copies = {}, {}
        return result, has_put

    def _settle_flags(self, changes: Changes, after: Walk) -> None:
        """Replace deferred flags. Replays compute owners' numbers there (a learning rate), and keep other flags."""
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
        """Return the real number or tensor for a deferred one; anything else as it is."""
        if id(leaf) not in self.copies:
            return value_of(leaf)
        # Replays would not set attributes that code has given the copy.
        self._is_lost |= bool(vars(leaf))
        # All places that hold the copy get the same tensor.
        return self._real_copies.setdefault(id(leaf), leaf.detach())

    def are_over(self) -> bool:
        """Return True if no deferred number is left, and none was where it could not be followed."""
        return not self.are_kept() and not self._is_lost

    def are_kept(self) -> bool:
        """Return True if anything still refers to a deferred number."""
        if self._is_anywhere():
            # Reference cycles that the step left are in young generations.
            gc.collect(1)
        return self._is_anywhere()

    def _is_anywhere(self) -> bool:
        is_kept = any(number() is not None for number in self._made)
        return is_kept or not all(memory.expired() for memory in self._memories)


def _is_plain(tensor: Tensor) -> bool:
    is_dense = type(tensor) in PLAIN_KINDS and tensor.layout is torch.strided and tensor.device.type != "meta"
    return is_dense and torch._C._functorch.peek_interpreter_stack() is None
