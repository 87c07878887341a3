"""One call of ``self.log``, apart from the value that it logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from graphplan.observe.source import Source

NOWHERE = Source("", 0, "", "step")


@dataclass(frozen=True)
class LogCall:
    """One call of the result collection's ``log`` without its value. ``source`` is the line that made it, and ``dtype``
    torch's default there, which precision plugins set while a step runs; ``is_plain`` says that its sums are done
    already, and ``size`` the batch size that it counts with in a mean.
    """

    fx: str
    name: str
    options: tuple[tuple[str, Any], ...]
    source: Source = field(compare=False)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    is_plain: bool = False
    size: int | None = None

    @cached_property
    def key(self) -> str:
        """Lightning's key for its metric in training, where batches come from one loader."""
        return f"{self.fx}.{self.name}"

    def __repr__(self) -> str:
        return f"self.log({self.name!r}) in {self.fx}"


@contextmanager
def as_in_step(call: LogCall) -> Iterator[None]:
    """After a step: Lightning makes metrics, and casts values, of the default dtype that the call was made under; and
    errors tell where in the step that was.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(call.dtype)
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
    finally:
        torch.set_default_dtype(dtype)
