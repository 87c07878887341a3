"""Optimizer state that a step makes each time, since it is emptied between two steps."""

from __future__ import annotations

from collections.abc import Iterable

from graphplan.effects.allowed import is_allowed
from graphplan.errors import HostEffectError
from graphplan.owners.slots import Walk
from graphplan.trace.records import Trace


def check_made_state(first: Trace, second: Trace, walk: Walk, allow: Iterable[str]) -> None:
    """Refuse a step that found an optimizer without state twice, and made it. ``walk`` is over the owners after the
    second trace.

    A recording has the values that state begins with among its constants: it would begin anew in each replay, whatever
    state there is by then, and leave none where eager steps do.

    Raises:
        HostEffectError: naming the state.
    """
    made = [path for path in _made(first) if path in _made(second) and not is_allowed(path, allow)]
    for name in walk.optimizers:
        own = [path for path in made if path.startswith(f"{name}.state[")]
        if own:
            more = f" (and {len(own) - 1} more)" if own[1:] else ""
            raise HostEffectError(
                f"the step makes {own[0]}{more} in each call, since {name}.state is emptied before it "
                "(state.clear(), another dictionary, a state dict without state); a replay would begin anew for ever, "
                "also where nothing was emptied. Expected state that is there when the step begins. Reset it "
                f"in place (for s in {name}.state.values(): for t in s.values(): t.zero_()), or load a state dict that "
                "was saved with its state",
                component="optimizer",
            )


def _made(trace: Trace) -> list[str]:
    """Slots that held no tensor before the step, and hold one after it."""
    changes = trace.changes.rebindings.items()
    return [path for path, change in changes if change.before is None and change.after is not None]
