"""What a recording consists of: its nodes, each with a type, a name and the nodes that it comes after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """One piece of recorded work.

    ``type`` is ``"Operator"`` on the tape, and on CUDA what CUDA calls it (``"Kernel"``, ``"Memcpy"``, …). ``name`` is
    the operator's or the kernel's, empty where there is none. ``after`` are numbers of nodes: those whose results an
    operator reads, or those that a CUDA graph has it wait for.
    """

    type: str
    name: str = ""
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of one recording in their order; ``missing`` says what is not known of them, and why."""

    all: tuple[Node, ...] = ()
    missing: str = ""

    def types(self) -> Counter[str]:
        """How many nodes there are of each type."""
        return Counter(node.type for node in self.all)

    def names(self) -> Counter[str]:
        """How often each operator or kernel is run."""
        return Counter(node.name for node in self.all if node.name)


def link(names: Sequence[str], reads: Sequence[Iterable[int | None]], writes: Sequence[Iterable[int | None]]) -> Nodes:
    """Operators in their order, each after those that last wrote the storages that it reads."""
    writers: dict[int | None, int] = {}
    nodes = []
    for number, (name, read, written) in enumerate(zip(names, reads, writes, strict=True)):
        after = {writers[storage] for storage in read if storage in writers}
        nodes.append(Node("Operator", name, tuple(sorted(after))))
        # What has no storage (a sparse tensor) cannot be followed.
        writers.update((storage, number) for storage in written if storage is not None)
    return Nodes(tuple(nodes))
