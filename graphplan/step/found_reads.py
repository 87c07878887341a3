"""The transfer of batch reads from traces to entries: see :mod:`graphplan.trace.batch_reads`."""

from __future__ import annotations

from graphplan.step.batch_variants import MOST_GUESSES, BatchVariants, extended, reads_of
from graphplan.step.lookup import Lookup
from graphplan.step.reasons import Call
from graphplan.step.runner import StepContext
from graphplan.tensors.storages import storage_id
from graphplan.trace.batch_reads import BatchReads
from graphplan.trace.batch_recorder import BatchRecorder, EarlierReads
from graphplan.trace.records import Trace


class FoundReads:
    """The reads of fed tensors that the traces of one step have found."""

    def __init__(self, parts: StepContext, lookup: Lookup) -> None:
        self._programs, self._stats, self._lookup = parts.programs, parts.runner.stats, lookup
        self.earlier = EarlierReads()
        """What the traces so far have learnt for the next one."""

    def take(self, call: Call, batch: BatchRecorder, facts: Trace, *, may_turn: bool) -> bool:
        """Record the reads of the batch in a trace. Return False if further traces have to follow, which make the reads
        before the step. If it ``may_turn`` and the trace is valid for it, turn the call into one that made the reads
        before the step, and return True. Raises HostSyncError if the reads refuse the step.
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
            # The step reads more in this call than in the one in which the reads were found.
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
