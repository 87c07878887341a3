"""Checks of a step or a fit. Run a few real steps on the CPU under CUDA's rules, and list what they found."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from itertools import cycle, islice
from typing import Any

from torch import Tensor

from graphplan.effects.host import LEAVES_OUT
from graphplan.errors import HostSyncError, RefusalError, SkipReason
from graphplan.observe.conversions import Conversions
from graphplan.observe.replacements import Replacements
from graphplan.observe.source import find_source
from graphplan.plan.plan import Plan
from graphplan.report.figures import CLOSED
from graphplan.report.stats import Stats
from graphplan.specs.roles import Role
from graphplan.step.graphed_step import graph_step
from graphplan.step.planner import ALWAYS_TWO_TRACES
from graphplan.trace.mode import refuse_trace
from graphplan.trace.operator_schemas import AS_ON_DEVICE
from graphplan.trace.records import collecting

_WIDTH = 100
Facts = dict[str, Any]
STEPS = 16  # Steps of each run: enough for a warm-up, repeated traces, a capture and a few replays.
_NO_REFUSALS = {SkipReason.SHAPE, SkipReason.EAGER_IF, SkipReason.UNBORN, SkipReason.MAX_GRAPHS}
"""Reasons for eager calls that are no refusals: calls before a capture have them, too."""
Ran = tuple[Stats, Plan | None, list[str]]
"""Counts of a run's training steps, their latest plan, and notes on the replayed parts."""


_COPIES = ("cpu", "to")  # Tensor methods that copy to the host. Reads of values are refused on the CPU, too.


@contextmanager
def cuda_rules() -> Iterator[None]:
    """Refuse host copies and host reads in steps traced in the block, although all tensors are on the CPU."""
    rules = Replacements(lambda: [(Tensor, name, _copier(name)) for name in _COPIES])
    token = AS_ON_DEVICE.set(True)
    rules.enter(token)
    try:
        yield
    finally:
        rules.leave(token)
        AS_ON_DEVICE.reset(token)


def _copier(name: str) -> Callable[..., Any]:
    original = getattr(Tensor, name)

    @wraps(original)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        targets = (*args, *kwargs.values())
        # The name ``cpu`` copies to the host on any device; a target such as ``self.device`` does not.
        if name == "cpu" or any(isinstance(target, str) and target == "cpu" for target in targets):
            # Code that only keeps the copy can get it after the step.
            copy = Conversions.copy_of(self, args, kwargs)
            if copy is not None:
                return copy
            refuse_trace(
                HostSyncError,
                f"the step copies a tensor to the host (.cpu(), .to()), and uses its values at {find_source()}: on a "
                "CUDA device, this waits for all earlier work, and a replay runs no Python that could use the copy. "
                "Return the tensor and copy it after the step. (A copy that the step only returns or appends is "
                "allowed: it is made after the replay.)",
            )
        return original(self, *args, **kwargs)

    return method


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a check.

    Attributes:
        name: the name of the checked step or fit.
        blockers: the reasons why the step cannot be replayed as a whole, each a text with file, line and what to do;
            empty if it can.
        warnings: Python effects that replays would leave out.
        replayed: a text that says which part of the step would be replayed now.
        plan: facts of the plan, :func:`facts_of`; None if no plan could be made.
    """

    name: str
    blockers: tuple[str, ...]
    warnings: tuple[str, ...]
    replayed: str
    plan: Facts | None

    def data(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)

    def text(self) -> str:
        """Return the result as text for people."""
        lines = [f"{self.name}: {self.replayed}"]
        if self.plan is not None:
            mib = {name: nbytes / 2**20 for name, nbytes in self.plan["bytes"].items()}
            lines.append(
                f"  {self.plan['launches']} launches per step would be one; inputs {mib['input']:.1f} MiB, parameters "
                f"{mib['param']:.1f} MiB, state {mib['state']:.1f} MiB, intermediates about "
                f"{mib['intermediates']:.1f} MiB"
            )
        count = len(self.blockers)
        lines.append(f"  {count} blocker{'' if count == 1 else 's'}{':' if count else ''}")
        for number, blocker in enumerate(self.blockers, 1):
            lines.append(textwrap.fill(f"{number}. {blocker}", _WIDTH, initial_indent="  ", subsequent_indent="     "))
        lines += [
            textwrap.fill(f"warning: {text}", _WIDTH, subsequent_indent="    ", initial_indent="  ")
            for text in self.warnings
        ]
        return "\n".join(lines)


def check_step(
    fn: Callable[..., Any],
    calls: Iterable[tuple[Any, ...]],
    *,
    owners: Mapping[str, Any] | Sequence[Any] | None = None,
    name: str = "step",
) -> Result:
    """Run a step a few times on the CPU, and list everything that keeps it from being one replay.

    The steps are real: they train the models.

    Examples:
        >>> import torch
        >>> from graphplan import check_step
        >>> model = torch.nn.Linear(4, 1)
        >>> def step(x):
        ...     loss = model(x).square().mean()
        ...     if float(loss.detach()) > 1e9:
        ...         loss = loss / 2
        ...     return loss.tolist()
        >>> len(check_step(step, [(torch.randn(8, 4),)], owners={"model": model}).blockers)
        2

    Args:
        fn: the step.
        calls: the positional arguments of each call. They are used again from the start if there are too few.
        owners: objects whose tensors the step uses, as for :func:`graph_step`.
        name: the heading of the result.

    Returns:
        The result. ``print(result.text())`` lists the blockers.

    Raises:
        ValueError: if there are no calls.
    """
    every = list(calls)
    if not every:
        raise ValueError("calls is empty; expected the arguments of one call at least")

    def run() -> Ran:
        step = graph_step(fn, owners=owners, backend="tape", on_failure="eager")
        for args in islice(cycle(every), STEPS):
            step(*args)
        stats, plan = step.stats, step.plan
        step.close()
        return stats, plan, []

    return check(run, name)


def check(run: Callable[[], Ran], name: str) -> Result:
    """Return the result of two short runs on the tape that do not raise. One collects refusals, one is normal."""
    token = ALWAYS_TWO_TRACES.set(True)
    try:
        return _check(run, name)
    finally:
        ALWAYS_TWO_TRACES.reset(token)


def _check(run: Callable[[], Ran], name: str) -> Result:
    # A refused step continues here, so that it gets a plan.
    with warnings.catch_warnings(), collecting() as found, cuda_rules():
        warnings.simplefilter("ignore")
        _, collected_plan, _ = run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats, plan, notes = run()
    refused = {reason for reason in stats.skipped if reason not in _NO_REFUSALS}
    closed = tuple(note for note in notes if note.startswith(CLOSED))
    blockers = (*closed, *blockers_of(found.values(), stats if refused else Stats()))
    best = plan or collected_plan
    told = [str(each.message) for each in caught]
    texts = [text.removeprefix(LEAVES_OUT) for text in told if text.startswith(LEAVES_OUT)]
    return Result(
        name=name,
        blockers=blockers,
        warnings=tuple(dict.fromkeys(texts)),
        replayed=_replayed(stats, notes, is_blocked=bool(blockers)),
        plan=None if best is None else facts_of(best),
    )


def _replayed(stats: Stats, notes: Sequence[str], *, is_blocked: bool) -> str:
    parts = next((note for note in notes if "eagerly" in note), None)
    if not stats.replayed:
        return "nothing would be replayed" if is_blocked else "no step was replayed in so few of them"
    if parts is not None:
        return f"a part of each step would be replayed ({parts})"
    return "replayed on the CPU, and not on a CUDA device" if is_blocked else "each step would be one replay"


def blockers_of(collected: Iterable[RefusalError], stats: Stats) -> tuple[str, ...]:
    """Return the texts of collected refusals, and of those that a run without collecting counted, each once."""
    texts = [*map(str, collected), *stats.reasons]
    found: dict[str, str] = {}
    for text in texts:
        found.setdefault(_WITHOUT_NUMBERS.sub("#", text), text)
    return tuple(found.values())


_WITHOUT_NUMBERS = re.compile(r"(?<![\w:])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
"""Matches numbers that may differ from run to run, but not line numbers."""


def facts_of(plan: Plan) -> Facts:
    """Return the roles, operators, launches, guards and memory of a plan, ready to be written as JSON."""
    return {
        "roles": {external.name: f"{external.role} {external.spec}" for external in plan.externals},
        "operators": dict(sorted(plan.operators.items())),
        "launches": plan.launches,
        "guards": sorted({*plan.reads.values, *plan.reads.metadata}),
        "bytes": {
            **{str(role): sum(e.spec.nbytes for e in plan.by_role(role)) for role in Role},
            "intermediates": plan.footprint.peak,
        },
    }
