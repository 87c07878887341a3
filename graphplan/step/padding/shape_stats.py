"""What was done with the shapes that calls came with."""

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
    padded_calls: int = 0
    unpadded_elements: int = 0
    padded_elements: int = 0

    def count(self, fed: int, padded: int) -> None:
        """Count one call that brought so many elements, and what they were padded to."""
        self.padded_calls += padded > fed
        self.unpadded_elements += fed
        self.padded_elements += padded

    @property
    def padding(self) -> float:
        """Padded elements for each element that was fed."""
        return self.padded_elements / self.unpadded_elements if self.unpadded_elements else 1.0

    def __str__(self) -> str:
        return (
            f"padding: {len(self.shapes)} shapes on {len(self.capture_sizes)} capture sizes; {self.padded_calls} "
            f"calls padded; {self.padding:.2f} elements for each that was fed; {self.checked} calls compared with "
            "unpadded ones"
        )

    def data(self) -> dict[str, Any]:
        """The counts as plain data."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "checked": self.checked,
            "shapes": len(self.shapes),
            "capture_sizes": len(self.capture_sizes),
            "padded_calls": self.padded_calls,
            "unpadded_elements": self.unpadded_elements,
            "padded_elements": self.padded_elements,
            "padding": self.padding,
        }
