"""Find the program of a call: on the fast path, by comparison with earlier calls, or by its key."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_not
from time import perf_counter
from typing import Any

from torch import Tensor

from graphplan.compare.comparing import Checks, Row, facts_of, lie
from graphplan.environment.collector import no_collections
from graphplan.feed.signature import Feed, alignment_unit, check_feed, is_keyed_by_identity, leaf_key
from graphplan.observe.host_draws import LookAhead
from graphplan.owners.slots import Walk
from graphplan.program.program import Program
from graphplan.step.batch_variants import reads_of
from graphplan.step.entries import Entry, Key, Variant
from graphplan.step.managed import Managed
from graphplan.step.runner import StepContext
from graphplan.tensors.attributes import attributes_on
from graphplan.tensors.trees import PLAIN_LEAVES, flatten_arguments, take_leaves
from graphplan.trace.batch_reads import Search

_KINDS = 8
"""Maximum known calls with tensors of the same shapes: as many as there may be batch variants of one key."""
_SHAPES = 256  # Maximum combinations of tensor shapes in one layout whose calls are remembered.
_COMPARABLE = PLAIN_LEAVES | {type}
"""Types of leaves whose comparison runs no user code. Classes are among them, since records hold classes."""


class Lookup:
    """The lookup of entries and programs by the key of a call, for one step."""

    def __init__(self, parts: StepContext) -> None:
        self._runner, self._managed, self._programs = parts.runner, parts.managed, parts.programs
        self._modes, self._stats = parts.managed.modes, parts.runner.stats
        self._warmup_steps, self._feed_device = parts.options.warmup_steps, parts.options.feed_device
        self._trains = parts.options.mode == "train"
        self._moves = self._feed_device is not None and self._feed_device.type != "cpu"

    def find(self, feed: Feed, base: Entry | None = None) -> tuple[Entry, Program | None]:
        """Find the feed's entry, and a program that fits. ``base``: the entry without reads of the batch."""
        self._managed.sharding.settle()
        start = perf_counter()
        with LookAhead():
            entry, program = self._find(feed, base)
        if program is not None:
            self._stats.lookups += perf_counter() - start
        return entry, program

    def _find(self, feed: Feed, base: Entry | None) -> tuple[Entry, Program | None]:
        looked = False
        while True:
            entry = self._entry(feed, base)
            if entry.batch is not None or entry.refusal is not None:
                # The programs belong to the entries of the batch's reads, or there are none.
                return entry, None
            program = entry.select(self._managed.grad_presence, self._stats.calls)
            if program is None:
                is_first = not entry.eager_calls and self._programs.is_further(entry)
                is_eager = entry.code_path.refusal is not None or entry.lacks_value
                is_eager = is_eager or bool(self._programs.waits(entry) or self._programs.limit_reason(entry))
                if looked or is_first or is_eager:
                    # The call will be eager, so a walk over the owners would be wasted.
                    return entry, None
                # Owners' containers may have been replaced since the last walk (a loaded checkpoint).
                looked = True
                if self._managed.fingerprint() >= 0:
                    with no_collections():
                        self._managed.refresh()
            elif program.fits():
                return entry, program
            else:
                walk = self._managed.walk()
                if not looked and entry.relocate(walk.scalars):
                    # An object that holds a number which decides between ways was replaced.
                    looked = True
                # The resync may also have found other hyper-parameters (a loaded checkpoint), a part of the key.
                elif not self._follow(program, entry, base, walk):
                    return self._entry(feed, base), None

    def _entry(self, feed: Feed, base: Entry | None) -> Entry:
        key = self._key(feed, self._managed.next_fingerprint())
        entry = self._programs.get(key)
        if entry is None or entry.wants_grad:
            # Leaves that require gradients can have equal keys, and still differ in whether they have a grad_fn.
            check_feed(feed, self._runner.device if self._feed_device is None else None)
        if entry is not None:
            return entry
        if self._programs.knows(key[0]):
            self._stats.note(f"another program: {self._managed.why_changed()}", "guards")
        return self._programs.add(key, Entry.of(feed, base))

    def enter(self, feed: Feed, base: Entry) -> Entry:
        """Add an entry for ``feed``, a call of ``base`` together with the reads of its batch."""
        return self._programs.add((self._geometry(feed), *base.key[1:]), Entry.of(feed, base))

    def _key(self, feed: Feed, fingerprint: int) -> Key:
        return (self._geometry(feed), self._modes.now(), fingerprint)

    def _geometry(self, feed: Feed) -> tuple[Any, ...]:
        # A copy to the step's device has an alignment of its own, whatever the fed tensor's is.
        return (feed.key, () if self._moves else feed.alignments())

    def moved(self, feed: Feed) -> Feed:
        """The feed with its tensors moved to the step's device, if ``device=`` is given."""
        home = self._feed_device
        if home is None:
            return feed
        leaves = list(feed.leaves)
        for index, leaf in feed.tensors():
            leaves[index] = leaf.to(home, non_blocking=True)
        return feed.replaced(leaves) if any(map(is_not, leaves, feed.leaves)) else feed

    def _follow(self, program: Program, entry: Entry, base: Entry | None, walk: Walk) -> bool:
        """Re-synchronise the program with rebound tensors, which a current ``walk`` has found; drop it if that is
        impossible.
        """
        reason = program.resync(walk)
        self._managed.refresh(walk)
        if base is not None and base.batch is not None and not base.batch.is_in(self._managed.walk_before().slots):
            base.batch = None
            reason = reason or "the values that the step reads on the host are in other containers"
        if reason is None:
            return True
        changes = self._trains or bool(program.plan.state)
        if changes and entry.may_pause(program, reason, tries=not self._trains):
            self._stats.note(f"eager for one step: {reason}", "guards")
            return False
        if not program.has_paused:
            # A replaced parameter may have no optimizer state yet, which only an eager step can make.
            entry.warm = min(entry.warm, self._warmup_steps - 1)
        self._programs.drop(entry, reason)
        return False

    def keep(self, feed: Feed, entry: Entry) -> None:
        """Keep ``entry`` under the feed's new key: the first step discovered owners, which changes the fingerprint."""
        key = self._key(feed, self._managed.fingerprint())
        if self._programs.get(key) is None:
            self._programs.add(key, entry)


class Layout:
    """The structure of a call's arguments, and the known ``calls`` with this structure, by shapes of tensors."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.structures = [flatten_arguments(arg)[1] for arg in args]
        self._is_flat = not any(self.structures)
        self.calls: dict[Any, list[KnownCall]] = {}
        self.latest: KnownCall | None = None

    def leaves(self, args: Sequence[Any]) -> list[Any] | None:
        """The leaves of ``args``; None if their structure differs."""
        if len(args) != len(self.structures):
            return None
        if self._is_flat:
            return list(args)
        leaves: list[Any] = []
        return leaves if all(map(take_leaves, args, self.structures, repeat(leaves))) else None


class KnownCall:
    """A remembered call: its leaves (tensors, literals or classes) and the ``entry`` and ``program`` that it found.
    ``checks`` compare everything else that the key depends on, except for the ``variant``: which gradients exist, or
    None if the program serves every variant.
    """

    def __init__(self, feed: Feed, entry: Entry, program: Program, *, checks: Any, variant: Variant | None) -> None:
        self.entry = entry
        self.program = program
        self.checks = checks
        self.variant = variant
        self._reads, self._ask = reads_of(feed), program.adopted.guards.ask
        self._kinds = list(map(type, feed.leaves))
        # Keep only metadata of the tensors: a reference would keep the batch alive.
        self._tensors = [index for index, _ in feed.tensors()]
        tensors = [leaf for _, leaf in feed.tensors()]
        self._fit = facts_of(tensors, placed=False).fit
        (_, alignments), *_ = entry.key
        # The key has no alignments if tensors are moved to the step's device.
        self._units: list[int] = list(map(alignment_unit, tensors)) if alignments else [1] * len(tensors)
        self._alignments = list(alignments) or [0] * len(tensors)
        self._adopted = list(program.inputs.adopted.items())
        self._literals = [
            (index, leaf, leaf_key(leaf))
            for index, leaf in enumerate(feed.leaves)
            if index not in feed.unread and not isinstance(leaf, Tensor)
        ]

    def take(self, search: Search) -> Sequence[Any] | None:
        """The leaves of an equal call, with the reads of its batch; None if the call differs."""
        leaves = search.leaves
        if self._reads is not None:
            tensors = self._reads.find(search)
            if tensors is None:
                return None
            leaves = [*leaves, self._reads.number, *tensors]
        return leaves if self._has(leaves) else None

    def _has(self, leaves: Sequence[Any]) -> bool:
        if list(map(type, leaves)) != self._kinds or (self._ask is not None and not self._ask()):
            return False
        for index, literal, key in self._literals:
            if leaves[index] is not literal and leaf_key(leaves[index]) != key:
                return False
        tensors = [leaves[index] for index in self._tensors]
        written = self.program.written
        if written is None or not self._fit(tensors) or not lie(tensors, self._units, self._alignments, written):
            return False
        return not self._adopted or all(leaves[index].data_ptr() == at for index, at in self._adopted)


def _shapes(leaves: Sequence[Any]) -> Any:
    """The shapes of the tensors among ``leaves``, as a key for known calls."""
    try:
        return tuple([leaf.shape if type(leaf) is Tensor else None for leaf in leaves])
    except RuntimeError:
        # A nested tensor has no shape. It cannot be replayed either.
        return None


class FastPath:
    """A cache that finds the programs of calls that equal earlier ones, without making their keys."""

    def __init__(self, managed: Managed) -> None:
        self._managed = managed
        self._modes = managed.modes
        self._layouts: list[Layout] = []
        self._draws = False  # A step branches on numbers that it draws on the host.
        self.knows = False
        """Whether the latest call equals a known one, even if its program may not be replayed at once."""

    def find(self, args: Sequence[Any]) -> tuple[KnownCall, Sequence[Any]] | None:
        """Find an equal known call whose program may be replayed at once, and the leaves of this call."""
        try:
            if self._draws:
                with LookAhead():
                    found = self._search(args)
            else:
                found = self._search(args)
            self.knows = found is not None
            if found is None:
                return None
            call, program = found[0], found[0].program
            if program.replay_count.replays + 1 >= program.replay_count.due:
                return None
            if call.variant is not None and self._managed.grad_presence() != call.variant:
                return None
            holds = call.checks.hold() or (program.adopted.take_gradients() and call.checks.hold())
            return found if holds else None
        except Exception:  # noqa: BLE001 - something is gone, or an object raises: the long way says what
            self.knows = False
            return None

    def _search(self, args: Sequence[Any]) -> tuple[KnownCall, Sequence[Any]] | None:
        for layout in self._layouts:
            leaves = layout.leaves(args)
            if leaves is None:
                continue
            latest, search = layout.latest, Search(leaves)
            if latest is not None and (taken := latest.take(search)) is not None:
                return latest, taken
            for call in layout.calls.get(_shapes(leaves), ()):
                if call is not latest and (taken := call.take(search)) is not None:
                    layout.latest = call
                    return call, taken
        return None

    def remember(self, args: Sequence[Any], feed: Feed, entry: Entry, program: Program) -> None:
        """Remember a call, if everything that its key depends on can be compared without user code."""
        read = [leaf for index, leaf in enumerate(feed.leaves) if index not in feed.unread]
        is_plain = (
            all(type(leaf) in _COMPARABLE or is_keyed_by_identity(leaf) for leaf in read) and not entry.wants_grad
        )
        if not is_plain or any(attributes_on(leaf) for _, leaf in feed.tensors()):
            return
        self._managed.fingerprint()
        self._modes.now()
        modes, owners = self._modes.rows(), self._managed.rows(program.adopted.guards.compared)
        if modes is None or owners is None:
            return
        variant = self._managed.grad_presence() if program.plan.tells_gradients else None
        is_refused: Row = ("same_attributes", [entry], ["refusal"], [entry.refusal])
        checks = Checks([is_refused, program.row(), *owners, *modes, *program.adopted.guards.rows])
        layout = Layout(args)
        layout = next((known for known in self._layouts if known.structures == layout.structures), layout)
        self._layouts = [layout, *(known for known in self._layouts if known is not layout)][:_KINDS]
        leaves = layout.leaves(args)
        if leaves is None or any(map(is_not, leaves, feed.leaves)):
            return
        call = KnownCall(feed, entry, program, checks=checks, variant=variant)
        self._draws |= bool(program.plan.drawn)
        search = Search(leaves)
        if call.take(search) is not None:
            shapes = _shapes(leaves)
            others = [known for known in layout.calls.pop(shapes, ()) if known.take(search) is None]
            layout.calls[shapes] = [call, *others][:_KINDS]
            layout.latest = call
            if len(layout.calls) > _SHAPES:
                del layout.calls[next(iter(layout.calls))]

    def forget(self) -> None:
        """Forget calls whose programs were closed."""
        for layout in self._layouts:
            layout.latest = None
            alive = {key: [call for call in calls if call.program.is_open] for key, calls in layout.calls.items()}
            layout.calls = {shapes: calls for shapes, calls in alive.items() if calls}
