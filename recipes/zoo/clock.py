"""The zoo's clock: a loader that times the consumer of its batches, alone on the machine while it does so."""

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
"""Steps between two looks at the clock in the timed half, on the CPU. On CUDA a look waits for the device, which no
training loop does after every few steps: there it is three times as many.
"""
CHUNK = 10
"""Steps before that for which the device is shared without a break: nothing waits for it in between."""


class Turns:
    """Timed work excludes all other work on the device, in every process that was given the same folder.

    Work that is not timed shares the device. A process that waits for it alone is not overtaken, since all pass the
    gate. Enrolled processes are stopped (SIGSTOP) while another has the device alone: what they do without asking for
    the device, such as imports and building models, would take its time as well (13 % of a BERT step, eight at a time).
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: set[IO[str]] = set()

    def drop(self) -> None:
        """Let go of what a loop holds that an error has ended: its feed may live on."""
        while self._held:
            self._held.pop().close()
        if self._folder is not None:
            self.signal_others(signal.SIGCONT)

    @contextmanager
    def taken(self, *, alone: bool) -> Iterator[None]:
        """Hold the device, ``alone`` or beside others."""
        with ExitStack() as held:
            if self._folder is not None:
                with self._locked("gate", fcntl.LOCK_EX):
                    held.enter_context(self._locked("device", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
                if alone:
                    held.callback(self.signal_others, signal.SIGCONT)
                    self.signal_others(signal.SIGSTOP)
            yield

    def enroll(self, pid: int) -> None:
        """Have a process stopped while another has the device alone."""
        if self._folder is not None:
            (self._folder / f"{pid}.pid").touch()

    def signal_others(self, number: int) -> None:
        """Send a signal to all enrolled processes but this one."""
        assert self._folder is not None
        for path in self._folder.glob("*.pid"):
            if path.stem != str(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(int(path.stem), number)

    def dismiss(self, pid: int) -> None:
        """Take an ended process off the list, and let those go on that it may have stopped."""
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
    """Seconds of the wall once the device is idle; on the CPU, of this process's own CPU time."""
    if not gpu:
        return process_time()
    torch.cuda.synchronize()
    return perf_counter()


@dataclass
class Feed:
    """Batches for ``warm`` steps that do not count and ``steps`` that are timed, and one that nothing is asked after.

    ``replays`` says how many replays there have been, for the first one's time and the share of the timed steps. With
    ``alone``, steps that do not count have the device to themselves as well: graphplan times some of them.
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
        """Steps between two looks at the clock."""
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
        """As a loader gives it: new containers, and where there are names of files, other ones each time."""
        batch = self.batches[index % len(self.batches)]
        if any(isinstance(leaf, str) for leaf in tree_leaves(batch)):
            return tree_map_only(str, lambda text: f"{index}/{text}", batch)
        return batch if isinstance(batch, torch.Tensor) else copy.copy(batch)

    def facts(self) -> dict[str, Any]:
        """Microseconds from end to end of a step (the median over blocks), the share of replays, the first replay."""
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
