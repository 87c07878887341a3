"""Takes what traces have read of their batches: see :mod:`graphplan.trace.batch_reads`."""

from __future__ import annotations

from graphplan.feed.signature import Feed
from graphplan.step.batch_variants import MOST_GUESSES, BatchVariants, extended, reads_of
from graphplan.step.lookup import Lookup
from graphplan.step.reasons import Call
from graphplan.step.runner import Parts
from graphplan.tensors.storages import storage_id
from graphplan.trace.batch_reads import BatchReads
from graphplan.trace.batch_recorder import BatchRecorder, EarlierReads, recorder_of
from graphplan.trace.host_reads import Place
from graphplan.trace.records import Trace


class FoundReads:
    """What the traces of one step have read of what it was fed."""

    def __init__(self, parts: Parts, lookup: Lookup) -> None:
        self._programs, self._stats, self._lookup = parts.programs, parts.runner.stats, lookup
        self._earlier = EarlierReads()

    def recorder_of(self, feed: Feed) -> BatchRecorder:
        """A recorder for the next trace."""
        return recorder_of(feed, self._earlier)

    @property
    def waiting(self) -> frozenset[Place]:
        """Where integers that the step reads wait."""
        return frozenset(self._earlier.waiting)

    def stop_waiting(self) -> bool:
        """Have integers that the step reads wait no more. Return True if any did."""
        return self._earlier.stop_waiting()

    def take(self, call: Call, batch: BatchRecorder, facts: Trace, *, may_turn: bool) -> bool:
        """Take in what a trace has read of its batch. False if other traces have to follow, with that read before. If
        it ``may_turn``, the call becomes one that has it read before where its trace shows what such a call does.
        Raises HostSyncError.
        """
        reads, found = batch.reads(), reads_of(call.feed)
        if found is not None and (found.is_outdated or batch.is_outdated):
            found.is_outdated = True
            return False
        if reads is None:
            return True
        if reads.error is not None and reads.is_among(facts.host_reads):
            raise reads.error
        if reads.error is not None and found is not None:
            # This way reads more than the one that the reads were found on.
            found.is_outdated = True
            return False
        if found is None:
            assert reads.error is not None
            if self._programs.guesses >= MOST_GUESSES:
                raise self._programs.never_again(reads.error)
            call.entry.batch = call.entry.batch or BatchVariants(reads.error)
            call.entry.batch.add(reads)
            self._stats.note(f"read before the step: {reads.what}, first at {reads.error.where}", "traces")
            return may_turn and self._turn(call, reads, batch, facts)
        found.is_outdated = not reads.begins(found)
        return not found.is_outdated

    def _turn(self, call: Call, reads: BatchReads, batch: BatchRecorder, facts: Trace) -> bool:
        tensors = batch.found(reads)
        if tensors is None or not facts.output_storages.isdisjoint(map(storage_id, tensors)):
            return False
        feed = call.feed = extended(call.feed, reads, tensors)
        storages = ((index, storage_id(leaf)) for index, leaf in feed.tensors())
        facts.leaf_storages.update((index, storage) for index, storage in storages if storage is not None)
        call.entry = self._lookup.enter(feed, call.entry)
        call.line = call.entry.line(call.variant)
        self._programs.count_new()
        return True
