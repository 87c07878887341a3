"""Capture sizes: ladders of sizes to which sizes are rounded up, and the ladder with the least padding for lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphplan.errors import OptionError
from graphplan.specs.options import is_count


def _parse_ladder(dim: int, sizes: Any) -> tuple[int, ...]:
    what = "buckets" if dim == 0 else f"buckets[{dim}]"
    if isinstance(sizes, Fit):
        sizes = sizes.sizes
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise OptionError(f"{what} is {sizes!r}; expected capture sizes, such as [1, 2, 4, 8]")
    ladder = tuple(sizes)
    if not ladder:
        raise OptionError(f"{what} has no sizes; expected at least one, such as [1, 2, 4, 8]")
    wrong = [size for size in ladder if not is_count(size)]
    if wrong:
        raise OptionError(f"{what} has the size {wrong[0]!r}; expected integers from 1 on")
    return tuple(sorted(set(ladder)))


class Ladders:
    """Capture sizes by dimension, given for dimension 0 or for several. Raises OptionError for invalid sizes."""

    def __init__(self, sizes: Buckets) -> None:
        by_dim = sizes if isinstance(sizes, Mapping) else {0: sizes}
        for dim in by_dim:
            if not is_count(dim, 0):
                raise OptionError(f"buckets has the dimension {dim!r}; expected dimensions counted from 0")
        if not by_dim:
            raise OptionError("buckets has no dimensions; expected capture sizes, such as {0: [1, 2, 4, 8]}")
        self._sizes = {dim: _parse_ladder(dim, given) for dim, given in sorted(by_dim.items())}

    def __str__(self) -> str:
        return "; ".join(f"dimension {dim} at {', '.join(map(str, sizes))}" for dim, sizes in self._sizes.items())

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that have capture sizes."""
        return tuple(self._sizes)

    def sizes(self, dim: int) -> tuple[int, ...]:
        """The capture sizes of a dimension, smallest first."""
        return self._sizes[dim]

    def round_up(self, dim: int, size: int) -> int | None:
        """The smallest capture size of at least ``size``; None if there is none, or if ``size`` is 0."""
        ladder = self._sizes[dim]
        index = bisect_left(ladder, size)
        return ladder[index] if size > 0 and index < len(ladder) else None


@dataclass(frozen=True, slots=True)
class Fit:
    """A ladder for given lengths: its ``sizes``, and the total number of elements without and with padding."""

    sizes: tuple[int, ...]
    unpadded: int
    padded: int

    @property
    def waste(self) -> float:
        """The share of elements that are padding, from 0 to 1."""
        return 1 - self.unpadded / self.padded if self.padded else 0.0

    def __str__(self) -> str:
        return f"{len(self.sizes)} sizes {[*self.sizes]}: {100 * self.waste:.1f} % of the elements are padding"


Dims = int | Sequence[int]
PadValue = float | int | bool
SHAPES = ("exact", "bucket")
Buckets = Sequence[int] | Fit | Mapping[int, Sequence[int] | Fit]


def check_shapes(shapes: str, buckets: Buckets | None, mask: str | None) -> None:
    """Raise OptionError for an unknown ``shapes``, and for missing or unused capture sizes or masks."""
    if shapes not in SHAPES:
        raise OptionError(f"shapes is {shapes!r}; expected one of: {', '.join(SHAPES)}")
    if shapes == "bucket":
        if buckets is None:
            raise OptionError("shapes='bucket' needs capture sizes; expected buckets=[1, 2, 4, 8], or those of fit")
        return
    given = [name for name, value in (("buckets", buckets), ("mask", mask)) if value is not None]
    if given:
        raise OptionError(f"{given[0]} is given with shapes={shapes!r}; expected shapes='bucket' with it")


def fit(lengths: Iterable[int] | Mapping[int, int], max_graphs: int = 8, *, multiple_of: int = 1) -> Fit:
    """Find the ladder of at most ``max_graphs`` sizes with the fewest padded elements.

    Examples:
        >>> from graphplan import buckets
        >>> ladder = buckets.fit([12, 30, 31, 64, 64, 100], max_graphs=3)
        >>> ladder.sizes
        (31, 64, 100)
        >>> print(ladder)
        3 sizes [31, 64, 100]: 6.2 % of the elements are padding

    Args:
        lengths: the lengths that occur, in elements, or how often each of them occurs (``{length: count}``).
        max_graphs: largest number of sizes.
        multiple_of: sizes are multiples of this.

    Returns:
        The ladder, with its ``sizes`` and its ``waste``. Pass it as ``buckets=``.

    Raises:
        OptionError: without lengths, or for invalid values.
    """
    counts = Counter(lengths)
    _check_fit(counts, max_graphs, multiple_of)
    rounded: Counter[int] = Counter()
    for length, count in counts.items():
        rounded[-(-length // multiple_of) * multiple_of] += count
    sizes = sorted(rounded)
    chosen, padded = _minimise(sizes, [rounded[size] for size in sizes], max_graphs)
    unpadded = sum(length * count for length, count in counts.items())
    return Fit(tuple(sizes[index] for index in chosen), unpadded, padded)


def _check_fit(counts: Mapping[int, int], max_graphs: int, multiple_of: int) -> None:
    if not counts:
        raise OptionError("there are no lengths to fit; expected some, or how often each of them comes")
    for length, count in counts.items():
        if not is_count(length) or count < 1:
            raise OptionError(f"length {length!r} comes {count!r} times; expected lengths and counts from 1 on")
    for name, value in (("max_graphs", max_graphs), ("multiple_of", multiple_of)):
        if not is_count(value):
            raise OptionError(f"{name} is {value!r}; expected an int >= 1")


def _minimise(lengths: Sequence[int], counts: Sequence[int], parts: int) -> tuple[list[int], int]:
    """Split sorted lengths into at most ``parts`` runs, each padded to its last length. Return the runs' ends, and the
    number of padded elements. Exact: the best begin of a run never moves down as its end moves up, so the result for
    one end bounds the search for others (divide and conquer).
    """
    total = [0]
    for count in counts:
        total.append(total[-1] + count)
    number = len(lengths)
    best = [lengths[end] * total[end + 1] for end in range(number)]
    rounds = [[0] * number]
    for _ in range(1, min(parts, number)):
        before = [0, *best]
        best, begins = [0] * number, [0] * number
        ranges = [(0, number - 1, 0, number - 1)]
        while ranges:
            low, high, first, last = ranges.pop()
            if low > high:
                continue
            end = (low + high) // 2
            options = range(first, min(last, end) + 1)
            begin = min(options, key=lambda start: before[start] + lengths[end] * (total[end + 1] - total[start]))
            best[end], begins[end] = before[begin] + lengths[end] * (total[end + 1] - total[begin]), begin
            ranges += [(low, end - 1, first, begin), (end + 1, high, begin, last)]
        rounds.append(begins)
    ends = []
    end = number - 1
    for begins in reversed(rounds):
        ends.append(end)
        end = begins[end] - 1
        if end < 0:
            break
    return ends[::-1], best[-1]
