"""Counting what is launched: operators one by one, and recordings as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import get_ident
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from graphplan.backends.backend import Recording
from graphplan.program.program import WATCHERS
from graphplan.tensors.dtensors import is_imagined, is_wrapped
from graphplan.tensors.storages import storage_id
from graphplan.trace.operator_schemas import schema_of, tensors_in, written_tensors


class LaunchCounter(TorchDispatchMode):
    """Counts what this thread launches in a ``with`` block.

    Examples:
        >>> import torch
        >>> from graphplan import LaunchCounter, graphed
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> fast = graphed(model, verify="off")
        >>> with torch.inference_mode():
        ...     for _ in range(4):
        ...         y = fast(torch.randn(3, 4))
        ...     with LaunchCounter() as eager:
        ...         y = model(torch.randn(3, 4))
        ...     with LaunchCounter() as replayed:
        ...         y = fast(torch.randn(3, 4))
        >>> eager.replays, replayed.replays
        (0, 1)
        >>> eager.operators["aten.relu.default"], eager.eager > replayed.eager
        (1, True)

    Attributes:
        eager: operators that were launched one by one: not views, and not what only allocates.
        replays: launches of recordings, one for each.
        replayed: operators that these ran; on CUDA, nodes of their graphs.
        operators: the operators by name.
        nodes: nodes of what was replayed by type. On CUDA they are known if its Python bindings are installed.
    """

    changes_nothing = True

    def __init__(self) -> None:
        super().__init__()
        self.eager = 0
        self.replays = 0
        self.replayed = 0
        self.operators: Counter[str] = Counter()
        self.nodes: Counter[str] = Counter()
        self._replaying = False
        self._thread = get_ident()

    @property
    def launches(self) -> int:
        """What the host launched in all."""
        return self.eager + self.replays

    def __enter__(self) -> LaunchCounter:
        self._thread = get_ident()
        WATCHERS.append(self.replay)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        WATCHERS.remove(self.replay)

    def replay(self, recording: Recording) -> None:
        """Count a replay, and leave out what it runs; what other threads replay is not counted."""
        if get_ident() != self._thread:
            recording.replay()
            return
        self.replays += 1
        self.replayed += len(recording.nodes.all)
        self.nodes.update(recording.nodes.types())
        self._replaying = True
        try:
            recording.replay()
        finally:
            self._replaying = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_wrapped(types):
            return NotImplemented
        if self._replaying or is_imagined():
            return func(*args, **kwargs)
        taken = {storage_id(tensor) for tensor in tensors_in([args, list(kwargs.values())])}
        out = func(*args, **kwargs)
        made = any(storage_id(tensor) not in taken for tensor in tensors_in(out))
        schema = schema_of(func)
        if (made or written_tensors(schema, args, kwargs)) and not schema.allocates:
            self.eager += 1
            self.operators[schema.name] += 1
        return out
