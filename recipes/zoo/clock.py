"""The zoo's clock: a loader that times the consumer of its batches while no other process uses the device."""

from __future__ import annotations

import copy
import fcntl
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import IO, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

BLOCK = 5
"""Steps between two readings of the clock in the timed part, on the CPU. On CUDA there are three times as many, because
a reading synchronizes the device, which training loops do not do every few steps.
"""
CHUNK = 10
"""Untimed steps for which the shared device is held at a time, without a synchronization in between."""


class Turns:
    """Locks that give timed work exclusive use of the device, among all processes that were given the same folder.

    Untimed work shares the device. All processes pass the gate, so none overtakes a process that waits for exclusive
    use. Enrolled processes are stopped (SIGSTOP) during exclusive use: their work without the device, such as imports
    and building models, would slow timed steps as well (by 13 % of a BERT step with eight processes).
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: set[IO[str]] = set()

    def drop(self) -> None:
        """Release all locks after an error has ended a loop: its feed, which holds them, may still be alive."""
        while self._held:
            self._held.pop().close()
        if self._folder is not None:
            self.signal_others(signal.SIGCONT)

    @contextmanager
    def taken(self, *, alone: bool) -> Iterator[None]:
        """Hold the device, ``alone`` or shared."""
        with ExitStack() as held:
            if self._folder is not None:
                with self._locked("gate", fcntl.LOCK_EX):
                    held.enter_context(self._locked("device", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
                if alone:
                    held.callback(self.signal_others, signal.SIGCONT)
                    self.signal_others(signal.SIGSTOP)
            yield

    def enroll(self, pid: int) -> None:
        """Enroll a process, which is then stopped while another one holds the device alone."""
        if self._folder is not None:
            (self._folder / f"{pid}.pid").touch()

    def signal_others(self, number: int) -> None:
        """Send a signal to all other enrolled processes."""
        assert self._folder is not None
        for path in self._folder.glob("*.pid"):
            if path.stem != str(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(int(path.stem), number)

    def dismiss(self, pid: int) -> None:
        """Remove an ended process from the list, and continue the processes that it may have stopped."""
        if self._folder is not None:
            (self._folder / f"{pid}.pid").unlink()
            self.signal_others(signal.SIGCONT)

    @contextmanager
    def _locked(self, name: str, kind: int) -> Iterator[None]:
        assert self._folder is not None
        with (self._folder / name).open("a") as handle:
            self._held.add(handle)
            fcntl.flock(handle, kind)
            yield
            self._held.discard(handle)


def now(*, gpu: bool) -> float:
    """Synchronize the device and return the wall time in seconds; on the CPU return this process's CPU time."""
    if not gpu:
        return process_time()
    torch.cuda.synchronize()
    return perf_counter()


@dataclass
class Feed:
    """A loader of batches for ``warm`` untimed steps, ``steps`` timed ones, and a last step that is not measured.

    ``replays`` returns the number of replays so far, for the time of the first one and the share of replayed steps.
    With ``alone``, untimed steps also have the device exclusively: graphplan times some of them.
    """

    batches: Sequence[Any]
    warm: int
    steps: int
    gpu: bool
    turns: Turns
    replays: Callable[[], int] = lambda: 0
    alone: bool = False
    marks: list[float] = field(default_factory=list)
    first: tuple[int, float] | None = None
    seen: list[int] = field(default_factory=list)
    spent: float = 0.0

    @property
    def block(self) -> int:
        """Steps between two readings of the clock."""
        return 3 * BLOCK if self.gpu else BLOCK

    def __len__(self) -> int:
        return self.warm + self.steps + 1

    def __iter__(self) -> Iterator[Any]:
        if self.alone:
            with self.turns.taken(alone=True):
                yield from self._warming(0, self.warm)
                yield from self._timed()
        else:
            for start in range(0, self.warm, CHUNK):
                with self.turns.taken(alone=False):
                    yield from self._warming(start, min(start + CHUNK, self.warm))
            if self.steps:
                with self.turns.taken(alone=True):
                    yield from self._timed()
        yield self._batch(len(self) - 1)

    def _warming(self, start: int, stop: int) -> Iterator[Any]:
        before = now(gpu=self.gpu) - self.spent
        for index in range(start, stop):
            yield self._batch(index)
            if self.first is None and self.replays():
                self.first = index, now(gpu=self.gpu) - before
        self.spent = now(gpu=self.gpu) - before

    def _timed(self) -> Iterator[Any]:
        self.seen.append(self.replays())
        self.marks.append(now(gpu=self.gpu))
        for index in range(self.steps):
            yield self._batch(self.warm + index)
            if (index + 1) % self.block == 0:
                self.marks.append(now(gpu=self.gpu))
        self.seen.append(self.replays())

    def _batch(self, index: int) -> Any:
        """Return a batch as a loader does: in new containers, and with different file names each time."""
        batch = self.batches[index % len(self.batches)]
        if any(isinstance(leaf, str) for leaf in tree_leaves(batch)):
            return tree_map_only(str, lambda text: f"{index}/{text}", batch)
        return batch if isinstance(batch, torch.Tensor) else copy.copy(batch)

    def facts(self) -> dict[str, Any]:
        """Return the microseconds of a step (median over blocks, and mean), the share of replays, the first replay."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not pairs:
            return {}
        facts: dict[str, Any] = {
            "us": median((end - start) / self.block * 1e6 for start, end in pairs),
            "us_mean": (self.marks[-1] - self.marks[0]) / (self.block * len(pairs)) * 1e6,
            "warm_s": self.spent,
        }
        if self.seen:
            facts["share"] = (self.seen[1] - self.seen[0]) / self.steps
        if self.first is not None:
            facts["first_replay_step"], facts["first_replay_s"] = self.first
        return facts
