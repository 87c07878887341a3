"""What a graphed function did with the shapes that it was called with."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ShapeStats:
    """``hits`` were replayed, ``misses`` ran in some other way. ``shapes`` are the sizes that calls came with, and
    ``capture_sizes`` those that they were rounded up to: as many programs as without and with padding.

    Elements are those of the padded inputs: what calls brought, and what they were padded to.
    """

    hits: int = 0
    misses: int = 0
    checked: int = 0
    shapes: set[Hashable] = field(default_factory=set)
    capture_sizes: set[Hashable] = field(default_factory=set)
    unpadded_elements: int = 0
    padded_elements: int = 0

    @property
    def padding(self) -> float:
        """Padded elements for each element that was fed."""
        return self.padded_elements / self.unpadded_elements if self.unpadded_elements else 1.0

    def data(self) -> dict[str, Any]:
        """The counts as plain data."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "checked": self.checked,
            "shapes": len(self.shapes),
            "capture_sizes": len(self.capture_sizes),
            "unpadded_elements": self.unpadded_elements,
            "padded_elements": self.padded_elements,
            "padding": self.padding,
        }


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they are for. ``input`` is one allocation per input for all shapes, ``param`` what the programs use
    of the owners' or copy of it, ``state`` what they carry, ``output`` what is lent (``outputs="static"``), ``pool``
    what the programs compute in.
    """

    input: int
    param: int
    state: int
    output: int
    pool: int
