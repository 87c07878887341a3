"""From a feed to its entry and its program: the key, the guards, and what is done where one of them says no."""

from __future__ import annotations

from operator import is_not
from typing import Any

import torch

from graphplan.environment.collector import no_collections
from graphplan.feed.signature import Feed, check_feed, key_anywhere
from graphplan.program.program import Program
from graphplan.step.managed import Managed
from graphplan.step.options import Options
from graphplan.step.programs import Entry, Key, Programs
from graphplan.step.runner import Runner


class Lookup:
    """Looks up feeds for one step.

    Attributes:
        is_moved: whether what is fed may lie on another device than the step's, and is moved there.
    """

    def __init__(self, runner: Runner, managed: Managed, programs: Programs, options: Options) -> None:
        self._runner = runner
        self._managed = managed
        self._programs = programs
        self._modes = managed.modes
        self._stats = runner.stats
        self._warmup_steps = options.warmup_steps
        self._feed_device = options.feed_device
        self.is_moved = self._feed_device is not None and self._feed_device.type != "cpu"

    def find(self, feed: Feed) -> tuple[Entry, Program | None]:
        """The feed's entry, and its program if that is ready and fits."""
        looked = False
        self._managed.sharding.settle()
        while True:
            entry = self._entry(feed)
            program = entry.select(self._managed.grad_presence)
            if program is None and not entry.eager_calls and self._programs.is_further(entry):
                # One eager step, for which nothing needs to be known.
                return entry, None
            if program is None and not looked:
                # Owners' containers may have been replaced since they were last looked at (a loaded checkpoint).
                looked = True
                with no_collections():
                    self._managed.look_again()
                continue
            if program is None or program.fits():
                return entry, program
            # Following what moved may bring other hyper-parameters with it (a loaded checkpoint), hence another key.
            if not self._follow(program, entry):
                return self._entry(feed), None

    def _entry(self, feed: Feed) -> Entry:
        key = self._key(feed, self._managed.next_fingerprint())
        entry = self._programs.get(key)
        if entry is None:
            check_feed(feed, self._home())
            if self._programs.knows(self.geometry(feed)):
                self._stats.note(f"another program: {self._managed.why_changed()}")
            wants_grad = any(leaf.requires_grad for _, leaf in feed.tensors())
            entry = self._programs.add(key, Entry(wants_grad=wants_grad, warm=self._warmth(key)))
        elif entry.wants_grad:
            # Leaves of one key that ask for gradients may still differ in whether they have a grad_fn.
            check_feed(feed, self._home())
        return entry

    def _key(self, feed: Feed, fingerprint: int) -> Key:
        return (self.geometry(feed), self._modes.now(), fingerprint)

    def geometry(self, feed: Feed) -> tuple[Any, ...]:
        """The feed's key and alignments; where tensors are moved to the step's device, that gives them new ones."""
        return (feed.key, () if self.is_moved else feed.alignments())

    def _warmth(self, key: Key) -> int:
        """How warm the step is for a new key: Lightning moves a fit's first batch itself, and leaves the others."""
        return min(self._programs.warmed.get(_anywhere(key), 0), self._warmup_steps - 1)

    def _home(self) -> torch.device | None:
        return None if self._feed_device is not None else self._runner.device

    def moved(self, feed: Feed) -> Feed:
        """The feed with its tensors on the step's device, if ``device=`` asks for that."""
        home = self._feed_device
        if home is None:
            return feed
        leaves = list(feed.leaves)
        for index, leaf in feed.tensors():
            leaves[index] = leaf.to(home, non_blocking=True)
        return feed.replaced(leaves) if any(map(is_not, leaves, feed.leaves)) else feed

    def _follow(self, program: Program, entry: Entry) -> bool:
        """Let the program follow what moved; one that cannot is dropped."""
        reason = program.resync()
        self._managed.refresh()
        if reason is None:
            happened = self._managed.take_events()
            if happened:
                self._stats.note(f"followed{happened}")
            return True
        self._programs.drop(entry, f"{reason}{self._managed.take_events()}")
        # A replaced parameter may have no optimizer state yet, which only an eager step can make.
        entry.warm = min(entry.warm, self._warmup_steps - 1)
        return False

    def keep(self, feed: Feed, entry: Entry) -> None:
        """After one of the first steps, which makes owners known on which the key depends: keep ``entry`` under the
        feed's new key, if that has none.
        """
        key = self._key(feed, self._managed.fingerprint())
        if self.is_moved:
            self._programs.warmed = {_anywhere(key): entry.warm}
        if self._programs.get(key) is None:
            self._programs.add(key, entry)


def _anywhere(key: Key) -> Key:
    """A call's key without the devices that its tensors are fed from."""
    ((of_feed, alignments), *others) = key
    return (key_anywhere(of_feed), alignments, *others)
