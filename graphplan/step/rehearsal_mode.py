"""Running a step that is undone afterwards, without dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphplan.environment.devices import default_generators
from graphplan.observe.source import find_source
from graphplan.observe.watching import Aside
from graphplan.owners.snapshot import host_generators
from graphplan.tensors.attributes import is_freed
from graphplan.tensors.dtensors import is_imagined
from graphplan.tensors.storages import storage_id
from graphplan.trace.composites import OperatorMode
from graphplan.trace.operator_schemas import Schema, schema_of, tensors_in, written_tensors
from graphplan.trace.records import rounding_of

_SHARE = "dropout_p"
"""The argument of attention's operators, and of their derivatives."""
_NOISE, _NATIVE = "aten.bernoulli_.float", "aten.native_dropout.default"


class RehearsalMode(OperatorMode):
    """Runs a step of which dropout keeps everything and draws nothing, and notes what its undoing takes.

    Args:
        copied: storages of which there are copies.

    Attributes:
        written: storages of others that it has written to.
        draws: what draws random numbers otherwise, and where.
    """

    def __init__(self, copied: set[int | None]) -> None:
        super().__init__()
        self._copied = copied
        self._made: set[int | None] = set()
        self._dtypes: set[torch.dtype] = set()
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._states = [(generator, generator.get_state()) for generator in default_generators()]
        self._host_states = host_generators()
        self._places: dict[str, None] = {}
        self.written: set[int | None] = set()

    def operate(self, aside: Aside, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, unless it is dropout."""
        schema = schema_of(func)
        if schema.written or schema.hidden:
            self._save(schema, args, kwargs)
        out = self._run(aside, func, schema, args, kwargs)
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            self._made.add(storage_id(tensor))
            self._dtypes.add(tensor.dtype)
        return out

    def _run(self, aside: Aside, func: Any, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if schema.name == _NOISE:
            # A mask of what is kept, which is divided by its share: by itself, then.
            share = schema.given(args, kwargs, 1)
            return args[0].fill_(0.5 if share is None else share)
        if schema.name == _NATIVE:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if _SHARE in schema.arguments:
            at = schema.arguments.index(_SHARE)
            args = (*args[:at], 0.0, *args[at + 1 :]) if at < len(args) else args
            kwargs = kwargs if at < len(args) else {**kwargs, _SHARE: 0.0}
        elif schema.is_random and not is_imagined():
            own = kwargs.get("generator")
            if own is not None and all(own is not known for known, _ in self._states):
                self._states.append((own, own.get_state()))
            self._places[f"at {find_source()}"] = None
        return aside.run(func, args, kwargs)

    def _save(self, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy what is about to be written and neither has a copy nor was made by the step."""
        for tensor in written_tensors(schema, args, kwargs):
            storage = storage_id(tensor)
            is_known = storage in self._made or storage in self._copied or storage in self.written
            if storage is not None and not is_known:
                self.written.add(storage)
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                self._saved.append((whole, whole.clone()))

    @property
    def rounding(self) -> float:
        """Of the coarsest floating-point type that operators gave."""
        return rounding_of(self._dtypes)

    @property
    def draws(self) -> list[str]:
        """What has drawn random numbers; empty if no generator was moved."""
        host = host_generators()
        moved = [name for name, state in host.items() if state != self._host_states.get(name, state)]
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._states):
            moved += self._places
        return moved

    def undo(self) -> None:
        """Put back what no snapshot has."""
        with torch.no_grad():
            for tensor, value in self._saved:
                if not is_freed(tensor):
                    tensor.copy_(value)
        for generator, state in self._states:
            generator.set_state(state)
