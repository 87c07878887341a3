"""Memory that a padded call has in common with its caller: what is fed from there, and what is handed out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphplan.feed.signature import Feed
from graphplan.program.leases import StaticOutput
from graphplan.program.program import Program
from graphplan.step.padding.layout import Layout
from graphplan.tensors.storages import storage_id


def out_of_reach(feed: Feed, program: Program) -> Feed:
    """``feed`` as it is before ``program`` runs: with copies of what lies where that lends its results."""
    lent = {storage_id(lease.tensor) for lease in program.lent}
    within = {index for index, leaf in feed.tensors() if storage_id(leaf) in lent} if lent else set()
    if not within:
        return feed
    leaves = [leaf.clone() if index in within else leaf for index, leaf in enumerate(feed.leaves)]
    return Feed(leaves, feed.structure, feed.key)


def handed_on(leaf: Any, layout: Layout, feed: Feed) -> Any:
    """What the caller may have of a padded call: its own tensor where the function returns it, and nothing that lies
    in memory which the next call overwrites.
    """
    if not isinstance(leaf, Tensor) or isinstance(leaf, StaticOutput):
        return leaf
    for index, memory in layout.staged.items():
        if leaf is memory:
            return feed.leaves[index]
        if storage_id(leaf) == storage_id(memory):
            return leaf.clone()
    return leaf
