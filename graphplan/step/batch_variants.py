"""Batch variants: programs of one key that are chosen by reads of the batch (:mod:`graphplan.trace.batch_reads`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from graphplan.errors import HostSyncError
from graphplan.feed.call_arguments import BATCH_READS
from graphplan.feed.signature import Feed, flatten, leaf_key
from graphplan.owners.slots import Slot
from graphplan.trace.batch_reads import BatchReads, Search, reads_in

_MOST = 8
"""Maximum batch variants of one key. Finding that a batch matches none costs more with each variant."""
_UNPROVEN = 3  # Maximum batch variants of a key until a batch matches one of them again.
MOST_GUESSES = 6  # Maximum of such unproven variants for all keys of a step.
_MISSES = 16  # Consecutive batches without a match, after which the key is refused.
_LOOKS = 64  # After this many searches, the key is refused if less than a third of the batches were replayed.


class BatchVariants:
    """The batch variants of one key, the most recent first. ``error`` is the refusal if the batches differ too much."""

    def __init__(self, error: HostSyncError) -> None:
        self._error = error
        self._known: list[BatchReads] = []
        self._misses = self._taken = self._replayed_before = self._found = self._progress = 0
        self.looks = 0
        """How many of the latest batches were searched for."""
        self._is_over = False

    def add(self, reads: BatchReads) -> None:
        """Add a variant."""
        self._known.insert(0, reads)

    def is_in(self, slots: Mapping[str, Slot]) -> bool:
        """Return True if the reads use the owners' tensors that are in ``slots`` (by path) now."""
        return all(reads.is_in(slots) for reads in self._known)

    @property
    def guesses(self) -> int:
        """The number of variants if no batch has matched one of them again; else 0."""
        return 0 if any(reads.taken for reads in self._known) else len(self._known)

    @property
    def is_full(self) -> bool:
        """Return True if no further variant may be added."""
        return len(self._known) >= (_UNPROVEN if self.guesses else _MOST)

    @property
    def refusal(self) -> HostSyncError | None:
        """The error once the batches differ too much."""
        if self._misses < _MISSES and not self._is_over:
            return None
        share = f"{_MISSES} in a row" if self._misses >= _MISSES else "most of them"
        first, *others = self._known
        what = f"{first.what.removesuffix(' on the host')} on the host"
        error = next(filter(None, map(first.differs_from, others)), self._error)
        return HostSyncError(
            f"the values that the step reads of {what} differ too much from call to call: {share} did not match the "
            f"traced ones. {error}",
            component=error.component,
        )

    @property
    def has_turned(self) -> bool:
        """Whether none of the latest batches matched a variant: the values that are read may have changed for good."""
        return self._misses >= _MISSES // 2

    def extend(self, feed: Feed, replayed: int) -> Feed | None:
        """Return ``feed`` extended by its reads; None if these match no variant. ``replayed``: replays so far."""
        taken, search = sum(reads.taken for reads in self._known), Search(feed.leaves)
        if taken != self._taken:
            # The fast path counts matches too, without calling this method.
            self._misses, self._taken = 0, taken
        if self.looks == _LOOKS:
            # Count replays, since a matched variant may still wait for a program, or have no room for one.
            now = max(0, replayed - self._replayed_before)
            self._is_over = 3 * now < self.looks - self._found + now
            self.looks = self._found = 0
            self._replayed_before = replayed
        self.looks += 1
        for reads in self._known:
            tensors = None if reads.is_outdated else reads.find(search)
            if tensors is not None:
                self._found += 1
                self._known.remove(reads)
                self._known.insert(0, reads)
                return extended(feed, reads, tensors)
        return None

    def miss(self, progress: int | None) -> None:
        """Count a batch that matches no variant. If new variants wait for savings, ``progress`` is the number of
        captures and replays: the batch does not count as a miss as long as that number grows.
        """
        self._misses += progress in (None, self._progress)
        self._progress = progress or 0

    def guess(self, feed: Feed) -> Feed | None:
        """Return ``feed`` extended by the reads of the latest variant, made on this batch, and add them as a variant
        without a trace. None if the code may make other reads on this batch, or after a wrong guess.
        """
        search = Search(feed.leaves)
        reads = None if any(known.is_outdated for known in self._known) else self._known[0].of(search)
        tensors = None if reads is None else reads.find(search)
        if reads is None or tensors is None:
            return None
        reads.taken = 0
        self.add(reads)
        return extended(feed, reads, tensors)


def extended(feed: Feed, reads: BatchReads, tensors: Sequence[Tensor]) -> Feed:
    """The ``feed`` extended by the ``tensors`` that the ``reads`` have found."""
    assert feed.given is not None
    args, kwargs = feed.rebuild(feed.leaves) if feed.is_moved else feed.given
    read = (reads.number, *tensors)
    keys = [*feed.key[1:], *map(leaf_key, read)]
    return flatten(args, {**kwargs, BATCH_READS: read}, lambda structure, leaves: (keys, feed.unread))


def reads_of(feed: Feed) -> BatchReads | None:
    """The reads of the batch that were made before the call of ``feed``, if there are any."""
    found = None if feed.given is None else reads_in(feed.given[1])
    return None if found is None else found[0]
