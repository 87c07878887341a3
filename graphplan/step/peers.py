"""Ranks that train together agree on whether to capture: one that cannot keeps all of them eager.

They tell each other through the process group's store, never through a collective: a rank whose batches have other
shapes gets to its capture later, and a collective in between would meet the step's own.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any

from torch import distributed

from graphplan.errors import PeerError, RefusalError

_READY = "ready"
_PATIENCE = timedelta(seconds=10)
"""How long a rank waits once for the others, which most often are only a moment behind."""
_numbers = count()


class Peers:
    """The other ranks of one step. Every rank has to make as many of these, in the same order.

    Args:
        store: where the process group's ranks met.
        rank: this one.
        world_size: how many there are.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        prefix = f"graphplan/{next(_numbers)}"
        self._store = store
        self._own = f"{prefix}/{rank}"
        self._keys = [f"{prefix}/{other}" for other in range(world_size)]
        self._all_ready = False
        self._has_waited = False
        self._told = False

    def are_ready(self) -> bool:
        """Say that this rank can capture, and ask whether all can by now. The steps go on eagerly until then.

        Raises:
            PeerError: if one cannot.
        """
        if self._all_ready:
            return True
        if not self._told:
            self._told = True
            self._store.set(self._own, _READY)
        if not self._has_waited:
            self._has_waited = True
            try:
                self._store.wait(self._keys, _PATIENCE)
            except RuntimeError:
                # They have not come that far; what they wait for may be this very step.
                return False
        self.check()
        self._all_ready = self._store.check(self._keys)
        return self._all_ready

    def refuse(self, error: RefusalError) -> None:
        """Tell the others why this rank cannot."""
        if not isinstance(error, PeerError):
            self._told = True
            self._store.set(self._own, str(error))

    def check(self) -> None:
        """Look whether a rank has told that it cannot.

        Raises:
            PeerError: naming the rank, and why.
        """
        for rank, key in enumerate(self._keys):
            if key == self._own or not self._store.check([key]):
                continue
            said = self._store.get(key).decode()
            if said != _READY:
                raise PeerError(
                    f"rank {rank} cannot capture this step, so no rank does: {said} (one alone would gain nothing)"
                )

    def vote(self, question: str, answer: bool) -> list[bool] | None:
        """Every rank's answer to ``question``, or None if not all of them ask it in time."""
        keys = [f"{key}/{question}" for key in self._keys]
        self._store.set(f"{self._own}/{question}", str(int(answer)))
        try:
            self._store.wait(keys, _PATIENCE)
        except RuntimeError:
            return None
        return [self._store.get(key) == b"1" for key in keys]


def find_peers() -> Peers | None:
    """The other ranks of the default process group; None where this process trains alone."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    store = distributed.distributed_c10d._get_default_store()
    return Peers(store, distributed.get_rank(), distributed.get_world_size())
