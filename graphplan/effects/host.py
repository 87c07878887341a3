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
            f"the step does not make the same random draws on the host as the step before ({other.path} with "
            f"{other.given}), but a replay repeats the same ones. Draw before the step and pass the result as an "
            "argument. In a Trainer, run an environment that draws (reinforcement learning) in on_train_batch_start "
            "or in an IterableDataset",
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
                f"the step draws from {name}{place}, or seeds it, and a replay cannot repeat that: it draws only "
                "single numbers again (random.random(), np.random.beta(1, 1)). Draw single numbers, draw with torch "
                "on the step's device, or draw before the step and pass the result as an argument. In a Trainer, run "
                "an environment that draws (reinforcement learning) in on_train_batch_start or in an IterableDataset. "
                f"Or, {allowing(name)}",
                path=name,
            )


def check_threads(trace: Trace, allow: Iterable[str]) -> None:
    """Refuse a step that runs work in another thread or process."""
    for name, source in trace.executed.threads.items():
        if not is_allowed(name, allow):
            raise HostEffectError(
                f"the step calls {name} at {source}: work in another thread or process is not recorded, so replays "
                "would leave it out. Run it in the step's own thread, or before or after the step, or, "
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
                f"the step takes the next item of {path} (a {kind.__name__}), but a replay runs no Python and would "
                "take none. Let the data loader yield these items (lightning.pytorch.utilities.CombinedLoader "
                "combines loaders), or take the item before the step and pass it as an argument",
                path=path,
            )
    return None


def check_gradients(pair: TracePair) -> None:
    """Refuse a step that leaves a new ``.grad`` on a tensor that is not a parameter and was not fed."""
    made = (f"{path}.grad, of a tensor that the step creates in each call" for t in pair.both for path in t.gradients)
    unowned = (f"{name}, which is neither a parameter nor an owner" for t in pair.both for name in t.unowned_gradients)
    for what in (*made, *unowned):
        if not pair.allows(what.partition(", ")[0].removesuffix(".grad")):
            raise HostEffectError(
                f"the step leaves a gradient at {what}; a replay would leave None there, or an earlier gradient. "
                "Expected gradients only of parameters, owners and arguments. Name the tensor (owners={'w': w, ...}), "
                "or keep or return the gradient itself (from torch.autograd.grad or a hook of the tensor). If the "
                "gradient is not needed, remove retain_grad(), and detach the tensors that the step keeps"
            )


LEAVES_OUT = "graphplan leaves something out of replays: "
"""The beginning of each warning from :func:`omissions`."""


def omissions(trace: Trace, allow: Iterable[str]) -> Iterator[str]:
    """Yield warnings of what replays leave out although no number changes: prints, writes, calls of extensions."""
    if trace.prints and not is_allowed("print", allow):
        yield (
            f"the step prints at {trace.prints[0]}, but a replay runs no Python, so only eager calls print. Return "
            "the value and print it after the step, or pass allow=('print',) to accept this"
        )
    for name, source in trace.executed.writers.items():
        if not is_allowed(name, allow):
            yield (
                f"the step calls {name} at {source}, but a replay runs no Python, so only eager calls write. Return "
                "the values and write them after the step (in a Trainer: with self.log or in a hook), or pass "
                f"allow=({name!r},) to accept this"
            )
    for name, source in trace.executed.extensions.items():
        if not is_allowed(name, allow):
            yield (
                f"the step calls {name}, a function of an extension module, at {source}: only checks compare its "
                "internal state, and a replay repeats the kernels that it launches, but not its work on memory or on "
                "the host. Register it as a torch operator (torch.library), or, if its results depend only on its "
                f"arguments, pass allow=({name!r},)"
            )
