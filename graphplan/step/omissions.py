"""What replays leave out that changes no number of the step's, and that somebody may miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphplan.effects.finding import is_allowed
from graphplan.trace.records import Trace


def omissions(trace: Trace, allow: Sequence[str]) -> Iterator[str]:
    """Warnings about what only the step's Python does: prints, calls of loggers, writes to files and queues, calls of
    extension modules, unless ``allow`` has them.
    """
    if trace.prints and not is_allowed("print", allow):
        yield (
            f"the step prints at {trace.prints[0]}, and a replay runs no Python: only eager calls will "
            "print. Print what the step returns, outside it, or pass allow=('print',)"
        )
    for name, source in trace.ran.writers.items():
        if not is_allowed(name, allow):
            yield (
                f"the step calls {name} at {source}, and a replay runs no Python: only eager calls will write. Write "
                f"after the step what it returns (in a Trainer: self.log, or a hook), or pass allow=({name!r},)"
            )
    for name, source in trace.ran.extensions.items():
        if not is_allowed(name, allow):
            yield (
                f"the step calls {name}, a function of an extension module, at {source}: what it remembers is "
                "compared by checks alone, and what it does to memory or on the host is not in a replay unless it "
                "launches kernels. Register it as a torch operator (torch.library), or, if its results follow from "
                f"its arguments, pass allow=({name!r},)"
            )
