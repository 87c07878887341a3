"""A recorder, for a trace, of operators that can be run again without the step: see :class:`CallRecorder`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphplan.feed.signature import is_dense
from graphplan.tensors.storages import place_of, storage_id
from graphplan.trace.batch_reads import RESTORE, Call, Read, TensorSlot
from graphplan.trace.operator_schemas import LIKE_OPERATORS, OperatorCall, tensors_in


class CallRecorder:
    """A recorder of operators whose tensor arguments are all known."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        """Tensor numbers by memory and geometry: equal views, and tensors that autograd unpacks, get one number."""
        self._known: set[int | None] = set()
        self._calls: list[Call] = []
        self._dtype = torch.get_default_dtype()
        self._outside: set[int | None] = set()
        """Storages from outside the step whose contents are or were known."""

    def _begin_with(self, tensor: Tensor) -> int:
        self._known.add(storage_id(tensor))
        self._outside.add(storage_id(tensor))
        return self._number(tensor)

    def _leading_to(self, is_asked: Callable[[Call], bool], needed: Iterable[int | None] = ()) -> list[Call]:
        """Return the calls that ``is_asked`` selects or that change ``needed`` storages, and those they depend on."""
        needed = set(needed)
        calls: list[Call] = []
        for call in reversed(self._calls):
            if is_asked(call) or not needed.isdisjoint(call.changed):
                calls.append(call)
                needed |= call.given | call.changed
        return calls[::-1]

    def _may_repeat(self, call: OperatorCall, made: Sequence[Tensor]) -> bool:
        """Return True if the operator gives the same results when it runs again on the same tensors."""
        return call.schema.is_certain

    def note(self, call: OperatorCall, made: list[Tensor], given: list[Tensor]) -> None:
        """Record an operator that is no read after it has run. It got the tensors ``given`` and returned ``made``."""
        schema = call.schema
        if schema.name in LIKE_OPERATORS and not self.has(call.args[0]) and is_dense(call.args[0]):
            self._note_filled(call, made[0])
            return
        written = list(map(storage_id, call.written())) if schema.may_write else []
        if not self._outside.isdisjoint(written):
            self._let_go(written)
            return
        follows = self._may_repeat(call, made) and all(map(self.has, given))
        # An in-place view operator has already changed the argument's shape: the call could not be repeated.
        is_kept = torch.get_default_dtype() == self._dtype and not schema.is_inplace_view
        if not (follows and is_kept and all(map(is_dense, made))):
            self._let_go(written)
        elif made or written:
            self._add(schema.call, schema.name, call.args, call.kwargs, made, written, draws=schema.is_random)

    def _let_go(self, written: Collection[int | None]) -> None:
        """Forget the ``written`` storages: their contents are no longer known."""
        self._known.difference_update(written)

    def note_saved(self, state: Tensor) -> None:
        """Record that the step saves a state of the host's generator."""
        self._add(torch.default_generator.get_state, "save", (), {}, [state])

    def note_restored(self, state: Tensor) -> None:
        """Record that the step restores a state that it saved itself, as activation checkpointing does."""
        self._add(torch.default_generator.set_state, RESTORE, (state,), {}, [])

    def _note_filled(self, call: OperatorCall, made: Tensor) -> None:
        """Record ``zeros_like(p)`` and the like. A meta tensor takes the place of ``p``: only its geometry matters."""
        schema, (given, *others) = call.schema, call.args
        with torch._C._DisableTorchDispatch():
            like = torch.empty_strided(given.size(), given.stride(), dtype=given.dtype, device="meta")
        named = {**call.kwargs, "device": made.device}
        name = f"{schema.name} {like.dtype} {tuple(like.size())} {like.stride()} {others} {named}"
        self._add(partial(schema.call, like, *others, **named), name, (), {}, [made])

    def note_constant(self, made: Tensor, value: Tensor) -> None:
        """Record a tensor that was made from Python numbers."""
        name = f"constant {value.dtype} {value.device} {tuple(value.shape)} {value.tolist()}"
        self._add(value.clone, name, (), {}, [made])

    def has(self, tensor: Tensor) -> bool:
        """Return True if the recorder knows how ``tensor`` was computed."""
        is_known = storage_id(tensor) in self._known and is_dense(tensor)
        return is_known and place_of(tensor) in self._numbers

    def _number(self, tensor: Tensor) -> int:
        return self._numbers.setdefault(place_of(tensor), len(self._numbers))

    def _slotted(self, given: Any) -> Any:
        """Replace tensors by their numbers. torch's ``tree_map`` would be watched, and take ten times as long."""
        if isinstance(given, Tensor):
            return TensorSlot(self._number(given))
        if type(given) is list or type(given) is tuple:
            return type(given)([self._slotted(item) for item in given])
        return given

    def _add(
        self,
        run: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        made: Sequence[Tensor],
        written: Collection[int | None] = (),
        read: Read | None = None,
        *,
        draws: bool = False,
    ) -> None:
        given = frozenset(map(storage_id, tensors_in([*args, *kwargs.values()])))
        named = {name: self._slotted(value) for name, value in kwargs.items()}
        changed = frozenset((*map(storage_id, made), *written))
        self._known |= changed
        numbers = tuple(map(self._number, made))
        slotted, writes = self._slotted(args), bool(written)
        self._calls.append(Call(run, name, slotted, named, numbers, given, changed, writes, read, draws))
