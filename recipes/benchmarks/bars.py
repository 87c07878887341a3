"""The figures that graphplan is held to: how near to a hand-written graph, and how much faster than without it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from recipes.benchmarks.catalogue import Contender

Row = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """A bound on two contenders of one workload.

    Attributes:
        workload: whose steps are timed.
        contender: whose time counts.
        against: whose time it is compared with; of an ``at_least``, the contender's base.
        at_most: the most that it may take, as a multiple of the other's time; or None.
        at_least: how many times as fast as the other it has to be; or None.
    """

    workload: str
    contender: str
    against: str
    at_most: float | None = None
    at_least: float | None = None


def _near(contender: str, bounds: dict[str, float]) -> list[Bar]:
    return [Bar(name, contender, Contender(contender).floor, at_most=bound) for name, bound in bounds.items()]


def _faster(contender: str, bounds: dict[str, float]) -> list[Bar]:
    return [Bar(name, contender, Contender(contender).base, at_least=bound) for name, bound in bounds.items()]


GPU_BARS = [
    *_near("graph_step", {"mlp": 1.05, "gpt": 1.02, "resnet": 1.02, "gpt2": 1.02}),
    *_near("typical_callback", {"mlp": 1.10, "gpt": 1.02, "resnet": 1.02, "gpt2": 1.02}),
    *_near("typical_callback+fuse", {"mlp": 1.10, "gpt": 1.02}),
    *_near("typical_callback+compile", {"gpt": 1.03, "resnet": 1.03}),
    *_faster("typical_callback", {"mlp": 14, "gpt": 2.4, "resnet": 3.3}),
    *_faster("typical_callback+compile+fuse", {"mlp": 20, "gpt": 4.2, "resnet": 4}),
]
CPU_BARS = _faster("graph_step", {"mlp2": 1.5, "transformer4": 1.0})
"""On a CPU the tape alone is held to something."""
NEVER_BELOW = 0.99
"""No workload may become slower by the callback; a hundredth is left to noise."""


def bars(rows: list[Row], *, cpu: bool) -> list[Row]:
    """Hold rows that were measured, or that failed, to the bars of their machine."""
    held = list(CPU_BARS if cpu else GPU_BARS)
    if not cpu:
        for workload in dict.fromkeys(row["workload"] for row in rows):
            for contender in ("trainer_callback", "typical_callback"):
                held += _faster(contender, {workload: NEVER_BELOW})
    by_name = {(row["workload"], row["contender"]): row for row in rows}
    return [_judge(bar, by_name) for bar in held if (bar.workload, bar.contender) in by_name]


def _judge(bar: Bar, rows: dict[tuple[str, str], Row]) -> Row:
    own, other = rows[bar.workload, bar.contender], rows.get((bar.workload, bar.against), {})
    value = None
    if "us" in own and "us" in other:
        # Not computed anew: where two contenders took turns, the row's speed-up was computed turn by turn.
        value = own["us"] / other["us"] if bar.at_most is not None else own["speedup"]
    if value is None:
        verdict = "not measured"
    else:
        met = value <= bar.at_most if bar.at_most is not None else value >= (bar.at_least or 0)
        verdict = "met" if met else "missed"
    return {**asdict(bar), "value": value, "verdict": verdict}
