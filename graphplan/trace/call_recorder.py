"""Writes down, in a trace, operators that can be run again without the step: see :class:`CallRecorder`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphplan.feed.signature import is_dense
from graphplan.tensors.storages import storage_id
from graphplan.trace.batch_reads import Call, Read, TensorSlot
from graphplan.trace.changes import place_of
from graphplan.trace.operator_schemas import OF_GEOMETRY, OperatorCall, tensors_in

RESTORE = "restore"
"""The name of what puts a generator's state back."""


class CallRecorder:
    """Follows what is computed from known tensors alone."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        """By memory and geometry: views of other views, and what autograd unpacks, are the same tensor."""
        self._known: set[int | None] = set()
        self._calls: list[Call] = []
        self._dtype = torch.get_default_dtype()
        self._outside: set[int | None] = set()
        """Memory that the step does not make, and of which something is or was known."""

    def _begin_with(self, tensor: Tensor) -> int:
        self._known.add(storage_id(tensor))
        self._outside.add(storage_id(tensor))
        return self._number(tensor)

    def _leading_to(self, is_asked: Callable[[Call], bool], needed: Iterable[int | None] = ()) -> list[Call]:
        """The operators that are asked for, and those that lead to them, or to the storages ``needed``."""
        needed = set(needed)
        calls: list[Call] = []
        for call in reversed(self._calls):
            if is_asked(call) or not needed.isdisjoint(call.changed):
                calls.append(call)
                needed |= call.given | call.changed
        return calls[::-1]

    def _may_repeat(self, call: OperatorCall, made: Sequence[Tensor]) -> bool:
        """Return True for operators that give the same when they are run again on the same."""
        return call.schema.is_certain

    def note(self, call: OperatorCall, made: list[Tensor], given: list[Tensor]) -> None:
        """Take in an operator that is no read, after it has run: it was ``given`` tensors, and ``made`` some."""
        schema = call.schema
        if schema.name in OF_GEOMETRY and not self.has(call.args[0]) and is_dense(call.args[0]):
            self._note_filled(call, made[0])
            return
        written = list(map(storage_id, call.written())) if schema.may_write else []
        if not self._outside.isdisjoint(written):
            self._let_go(written)
            return
        follows = self._may_repeat(call, made) and all(map(self.has, given))
        # By now, what has another shape in place is no longer what the operator was given.
        is_kept = torch.get_default_dtype() == self._dtype and not schema.turns
        if not (follows and is_kept and all(map(is_dense, made))):
            self._let_go(written)
        elif made or written:
            is_random = schema.is_random
            self._add(
                schema.call, schema.name, call.args, call.kwargs, made, written, has_effect=is_random, draws=is_random
            )

    def _let_go(self, written: Collection[int | None]) -> None:
        """Nothing is known any more of memory that was ``written``."""
        self._known.difference_update(written)

    def note_saved(self, state: Tensor) -> None:
        """Take in a state of the host's generator that the step saves."""
        self._add(torch.default_generator.get_state, "save", (), {}, [state])

    def note_restored(self, state: Tensor) -> None:
        """Take in a state of its own that the step puts back, as recomputed activations do."""
        self._add(torch.default_generator.set_state, RESTORE, (state,), {}, [], has_effect=True)

    def _note_filled(self, call: OperatorCall, made: Tensor) -> None:
        """Take in a tensor of equal numbers that is like another one, which need not be there: ``zeros_like(p)``."""
        schema, (given, *others) = call.schema, call.args
        with torch._C._DisableTorchDispatch():
            like = torch.empty_strided(given.size(), given.stride(), dtype=given.dtype, device="meta")
        named = {**call.kwargs, "device": made.device}
        name = f"{schema.name} {like.dtype} {tuple(like.size())} {like.stride()} {others} {named}"
        self._add(partial(schema.call, like, *others, **named), name, (), {}, [made])

    def note_constant(self, made: Tensor, value: Tensor) -> None:
        """Take in a tensor that was made of Python's numbers."""
        name = f"constant {value.dtype} {value.device} {tuple(value.shape)} {value.tolist()}"
        self._add(value.clone, name, (), {}, [made])

    def has(self, tensor: Tensor) -> bool:
        """Return True if it is known how ``tensor`` was made."""
        is_known = storage_id(tensor) in self._known and is_dense(tensor)
        return is_known and place_of(tensor) in self._numbers

    def _number(self, tensor: Tensor) -> int:
        return self._numbers.setdefault(place_of(tensor), len(self._numbers))

    def _slotted(self, given: Any) -> Any:
        """``given`` with numbers for its tensors. What torch maps trees with is watched and takes ten times as long."""
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
        has_effect: bool = False,
        draws: bool = False,
    ) -> None:
        given = frozenset(map(storage_id, tensors_in([*args, *kwargs.values()])))
        named = {name: self._slotted(value) for name, value in kwargs.items()}
        changed = frozenset((*map(storage_id, made), *written))
        self._known |= changed
        numbers = tuple(map(self._number, made))
        slotted, writes = self._slotted(args), bool(written)
        self._calls.append(Call(run, name, slotted, named, numbers, given, changed, writes, read, has_effect, draws))
