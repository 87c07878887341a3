"""Refuse or warn of actions that no replay repeats: host random draws, work in other threads, new gradients, output."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import zip_longest

from graphplan.effects.allowed import allowing, is_allowed
from graphplan.effects.trace_pair import TracePair
from graphplan.errors import HostEffectError, HostScalarError
from graphplan.observe.source import find_load
from graphplan.owners.slots import Walk
from graphplan.trace.records import Trace


def check_draws(pair: TracePair) -> None:
    """Refuse host random draws, used or not, that differ from those of the step before or that no replay can repeat."""
    both = zip_longest(*(trace.symbolic.draws for trace in pair.both))
    other = next((new or old for old, new in both if old != new), None)
    if other is not None:
        raise HostScalarError(
            f"the step does not draw the same random numbers on the host as one step before ({other.path} with "
            f"{other.given}), as replays would. Draw before the step and feed the result",
            path=other.generator,
        )
    check_generators(pair)


def check_generators(pair: TracePair) -> None:
    """Refuse a step with draws from Python's or NumPy's generator that replays cannot repeat."""
    for name in (name for trace in pair.both for name in trace.draws):
        if not pair.allows(name):
            source = find_load((code for code, _ in pair.second.reads.codes), "random")
            place = f" at {source}" if source is not None else ""
            raise HostScalarError(
                f"the step draws from {name}{place}, or seeds it, as no replay does: replays draw single numbers again "
                "(random.random(), np.random.beta(1, 1)). Draw those, or with torch on the step's device, or draw "
                "before the step and feed the result; or, "
                f"{allowing(name)}",
                path=name,
            )


def check_threads(trace: Trace, allow: Iterable[str]) -> None:
    """Refuse a step that runs work in another thread or process."""
    for name, source in trace.executed.threads.items():
        if not is_allowed(name, allow):
            raise HostEffectError(
                f"the step calls {name} at {source}: what runs in another thread or process is not recorded, and "
                "replays would leave it out. Run it in the step's own thread, or before or after the step, or, "
                f"{allowing(name)}",
                component=source.component,
                path=name,
            )


def taken_item(walk: Walk, iterated: Collection[str], allow: Iterable[str]) -> HostEffectError | None:
    """Return the error for a step that takes items from an iterator that outlives it: no replay takes one, and undoing
    a step does not put it back. ``iterated`` are the names of objects that the step's code passes to ``next``.
    """
    for path, scalar in walk.scalars.items() if iterated else ():
        kind = type(scalar.get()) if scalar.attribute in iterated else type
        if hasattr(kind, "__next__") and not is_allowed(path, allow):
            return HostEffectError(
                f"the step takes the next item of {path} (a {kind.__name__}), which a replay would not: it runs no "
                "Python. Have the data loader give what it gives (lightning.pytorch.utilities.CombinedLoader joins "
                "loaders), or take it before the step and feed it",
                path=path,
            )
    return None


def check_gradients(pair: TracePair) -> None:
    """Refuse a step that leaves a new ``.grad`` on a tensor that is not a parameter and was not fed."""
    made = (f"{path}.grad, of a tensor that it makes anew in each call" for t in pair.both for path in t.gradients)
    unowned = (f"{name}, which is neither a parameter nor an owner" for t in pair.both for name in t.unowned_gradients)
    for what in (*made, *unowned):
        if not pair.allows(what.partition(", ")[0].removesuffix(".grad")):
            raise HostEffectError(
                f"the step leaves a gradient at {what}; a replay would leave None there, or an earlier gradient. "
                "Expected gradients at parameters, owners and what is fed alone: name the tensor (owners={'w': w, "
                "...}), keep or return the gradient itself (torch.autograd.grad, what a hook of the tensor gets), or, "
                "if it is not needed, leave retain_grad() out, and detached tensors behind"
            )


LEAVES_OUT = "graphplan leaves something out of replays: "
"""The beginning of each warning from :func:`omissions`."""


def omissions(trace: Trace, allow: Iterable[str]) -> Iterator[str]:
    """Yield warnings of what replays leave out although no number changes: prints, writes, calls of extensions."""
    if trace.prints and not is_allowed("print", allow):
        yield (
            f"the step prints at {trace.prints[0]}, and a replay runs no Python: only eager calls will "
            "print. Print what the step returns, outside it, or pass allow=('print',)"
        )
    for name, source in trace.executed.writers.items():
        if not is_allowed(name, allow):
            yield (
                f"the step calls {name} at {source}, and a replay runs no Python: only eager calls will write. Write "
                f"after the step what it returns (in a Trainer: self.log, or a hook), or pass allow=({name!r},)"
            )
    for name, source in trace.executed.extensions.items():
        if not is_allowed(name, allow):
            yield (
                f"the step calls {name}, a function of an extension module, at {source}: what it remembers is "
                "compared by checks alone, and what it does to memory or on the host is not in a replay unless it "
                "launches kernels. Register it as a torch operator (torch.library), or, if its results follow from "
                f"its arguments, pass allow=({name!r},)"
            )
