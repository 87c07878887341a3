"""What a step has the host do that no replay does or could repeat: random draws, work for other threads."""

from __future__ import annotations

from collections.abc import Iterable

from graphplan.effects.allowed import is_allowed
from graphplan.errors import HostEffectError, HostScalarError
from graphplan.observe.source import find_load
from graphplan.trace.records import Trace


def check_draws(first: Trace, second: Trace, allow: Iterable[str]) -> None:
    """Refuse a step that draws from a generator of Python or NumPy, even if no operator gets what it drew.

    Raises:
        HostScalarError: naming the generator.
    """
    for name in [*first.draws, *second.draws]:
        if not is_allowed(name, allow):
            source = find_load((code for code, _ in second.reads.codes), "random")
            place = f" at {source}" if source is not None else ""
            raise HostScalarError(
                f"the step draws from {name}{place}, and a replay draws nothing: what it decides by chance would be "
                "decided once. Draw with torch on the step's device, or draw before the step and feed the result; or, "
                f"if the step's results do not depend on it, pass allow=({name!r},)",
                path=name,
            )


def check_threads(trace: Trace, allow: Iterable[str]) -> None:
    """Refuse a step that has something run in another thread or process.

    Raises:
        HostEffectError: naming the call.
    """
    for name, source in trace.ran.threads.items():
        if not is_allowed(name, allow):
            raise HostEffectError(
                f"the step calls {name} at {source}: what runs in another thread or process is not recorded, and "
                "replays would leave it out. Run it in the step's own thread, or before or after the step, or, if the "
                f"step's results do not depend on it, pass allow=({name!r},)",
                component=source.component,
                path=name,
            )
