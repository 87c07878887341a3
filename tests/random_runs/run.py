"""A random run as plain data, so that a failing one prints as the call that makes it again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, repr=False)
class Run:
    """One random run. ``events`` are ``(after call, name, number)``, ``leaves`` what the step leaves set, each with its
    place in the step; ``sizes`` and ``forms`` repeat.

    The last seven fields before ``events`` are graphplan's options: which owners it is told, and so on.
    """

    family: str
    layers: tuple[str, ...] = ()
    optimizer: str = "adamw"
    fused: bool | None = True
    groups: int = 1
    schedule: str = "none"
    every: int = 1
    clip: str = "none"
    zero: str = "start"
    effects: frozenset[str] = frozenset()
    leaves: tuple[tuple[str, str], ...] = ()
    extras: frozenset[str] = frozenset()
    sizes: tuple[int, ...] = (4,)
    forms: tuple[str, ...] = ("plain",)
    calls: int = 24
    owners: str = "all"
    on_failure: str = "raise"
    verify: str | int = "geometric"
    warmup_steps: int = 1
    prepare_optimizers: bool = True
    eager_if: int | None = None
    max_graphs: int = 16
    events: tuple[tuple[int, str, int], ...] = ()

    @property
    def infers(self) -> bool:
        """Whether it takes no training steps."""
        return not self.extras.isdisjoint(("inference", "inference mode"))

    @property
    def tells_all(self) -> bool:
        """Whether graphplan is told all owners, and prepares the optimizers at once. It has to be where the first call
        is an eager one: nobody looks for owners there, and the optimizer would make it with its own kernel.
        """
        return self.owners == "all" or self.eager_if is not None

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.default != self._of(field)}
        return f"Run({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def _of(self, field: Any) -> Any:
        return getattr(self, field.name)
