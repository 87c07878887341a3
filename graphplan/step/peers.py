"""Agreement of ranks on captures through the process group's store: a collective would mix with the step's own."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from time import monotonic, sleep
from typing import Any

from torch import distributed

from graphplan.errors import PeerError, RefusalError

_PATIENCE, _PAUSE = 10.0, 0.002
"""Seconds that a rank waits for the others, which are usually only a moment behind, and between two queries."""
_SHORT = 2.0
"""The same if correctness does not depend on it: a rank whose batches have other shapes may be waiting for this one."""
_numbers = count()


class Peers:
    """The other ranks of one step. Each rank must create the same number of instances, in the same order."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._prefix = f"graphplan/{next(_numbers)}"
        self._store = store
        self._own = f"{self._prefix}/{rank}"
        self._keys = [f"{self._prefix}/{other}" for other in range(world_size)]
        self._all_ready = False
        self._asked = False
        self._apart = False

    def meet(self, stage: str) -> None:
        """Wait until the others end ``stage``, unless one was late before. Raises PeerError if another rank refuses."""
        if self._apart:
            self.check()
        else:
            self._apart = not self._wait(stage)

    def may_advance(self, is_planned: bool) -> bool:
        """Return True if this rank may trace or, with a plan, all ranks may capture. Raises PeerError on a refusal."""
        if is_planned and self._all_ready:
            return True
        self.check()
        if is_planned:
            self._all_ready = self._wait("ready", 0 if self._asked else _SHORT)
            self._asked = True
        return self._all_ready or not is_planned

    def _wait(self, stage: str, patience: float = _SHORT) -> bool:
        """Return True if every rank reaches ``stage`` in time. The others may be waiting for this step."""
        self._store.set(f"{self._own}/{stage}", "1")
        return self._come([f"{key}/{stage}" for key in self._keys], patience)

    def _come(self, keys: list[str], patience: float) -> bool:
        """Return True if all ``keys`` exist within ``patience`` seconds. Raises PeerError if a rank refuses."""
        end = monotonic() + patience
        while not self._store.check(keys):
            self.check()
            if monotonic() >= end:
                return False
            sleep(_PAUSE)
        return True

    def refuse(self, error: RefusalError) -> None:
        """Publish the reason why this rank cannot capture."""
        if not isinstance(error, PeerError):
            self._store.set(self._own, str(error))

    def check(self) -> None:
        """Raise PeerError, with the rank and its reason, if another rank cannot capture."""
        for rank, key in enumerate(self._keys):
            if key != self._own and self._store.check([key]):
                said = self._store.get(key).decode()
                raise PeerError(f"rank {rank} cannot capture this step, so no rank does: {said}")

    def vote(self, question: str, answer: bool, patience: float = _PATIENCE, *, together: bool = False) -> bool | None:
        """Return True if all ranks vote yes, None if not all vote within ``patience`` seconds. A no decides at once,
        unless ranks wait ``together``. All ranks get the same result.
        """
        key, decision = f"{self._prefix}/{question}", "no"
        if not answer:
            self._store.add(f"{key}/no", 1)
        if answer or together:
            if self._store.add(f"{key}/asked", 1) < len(self._keys):
                decision = "late"
                # A refusal of another rank is raised by :meth:`check`, not by a vote.
                with suppress(PeerError):
                    self._come([key], patience)
            elif not self._store.add(f"{key}/no", 0):
                decision = "yes"
        decided = self._store.compare_set(key, "", decision)
        return {b"yes": True, b"no": False}.get(decided)

    def settle(self, question: str, number: int) -> int:
        """Return the ``number`` of the first rank that asks ``question``, without waiting."""
        return int(self._store.compare_set(f"{self._prefix}/{question}", "", str(number)))


def find_peers() -> Peers | None:
    """The other ranks of the default process group; None if this process trains alone."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    store = distributed.distributed_c10d._get_default_store()
    return Peers(store, distributed.get_rank(), distributed.get_world_size())
