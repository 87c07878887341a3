"""One call of ``self.log``, apart from the value that it logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from graphplan.tracer import Source


@dataclass(frozen=True)
class LogCall:
    """One call of the result collection's ``log`` without its value. ``source`` is the line that made it; ``is_plain``
    says that its sums are done already, and ``size`` the batch size that it counts with in a mean.
    """

    fx: str
    name: str
    options: tuple[tuple[str, Any], ...]
    source: Source = field(compare=False)
    is_plain: bool = False
    size: int | None = None

    @cached_property
    def key(self) -> str:
        """Lightning's key for its metric in training, where batches come from one loader."""
        return f"{self.fx}.{self.name}"

    def __repr__(self) -> str:
        return f"self.log({self.name!r}) in {self.fx}"


@contextmanager
def naming(call: LogCall) -> Iterator[None]:
    """Have errors, which come after the step, tell where in it the call was made."""
    try:
        yield
    except Exception as error:
        text = f"{call}, called at {call.source}"
        add_note: Any = getattr(error, "add_note", None)
        if add_note is not None:
            add_note(text)
        else:
            # Python 3.10 has no notes.
            error.args = ("\n".join([*map(str, error.args[:1]), text]), *error.args[1:])
        raise
