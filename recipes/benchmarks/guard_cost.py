"""What the checks before every replay cost on the host: ``python -m recipes.benchmarks.guard_cost [--json PATH]``.

Three chains of linear layers on the CPU, with 60, 200 and 1,000 parameters; each with SGD, whose step has no other
tensors, and with AdamW, which adds three per parameter. Measured is what a call does before
it copies its inputs: it compares the feed, modes, flags, hyper-parameters, slots, addresses and Python values, in C++
where ``python -m graphplan.compare`` has built that (``GRAPHPLAN_NATIVE=0`` leaves it out).
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from graphplan import graph_step
from graphplan.compare.comparing import Tensors

_REPEATS, _ROUNDS = 200, 15


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """A step with next to nothing in it but the model."""

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def _microseconds(call: Callable[[], Any]) -> float:
    """Median over rounds of the mean time of one call."""
    rounds = []
    for _ in range(_ROUNDS):
        start = perf_counter()
        for _ in range(_REPEATS):
            call()
        rounds.append((perf_counter() - start) / _REPEATS * 1e6)
    return median(rounds)


def measure(layers: int, kind: type[torch.optim.Optimizer], width: int = 4) -> dict[str, Any]:
    """Cost of the checks for a chain of ``layers`` linear layers: counts, and microseconds per call."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = kind(model.parameters(), lr=0.01, fused=True)  # type: ignore[call-arg]
    step = graph_step(step_of(model, optimizer), owners={"model": model, "optimizer": optimizer}, verify="off")
    x = torch.randn(2, width)
    for _ in range(8):
        step(x)
    assert step.stats.replayed, step.report()
    # The call that a replayed step makes before anything is copied.
    assert step.machine.fast_path.find((x,)) is not None
    cost = _microseconds(lambda: step.machine.fast_path.find((x,)))
    tensors = len([e for e in step.plan.externals if e.path is not None]) if step.plan is not None else 0
    counts = {"parameters": 2 * layers, "modules": layers, "optimizer": kind.__name__, "tensors": tensors}
    return {**counts, "microseconds": round(cost, 2)}


def main() -> None:
    """Measure, print a table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(layers, kind) for layers in (30, 100, 500) for kind in (torch.optim.SGD, torch.optim.AdamW)]
    guards = "Python" if Tensors is None else "C++"
    print(f"guards in {guards}")
    for row in rows:
        print(
            f"{row['parameters']} parameters in {row['modules']} modules, {row['optimizer']}: "
            f"{row['tensors']} tensors, {row['microseconds']} µs"
        )
    if arguments.json is not None:
        facts = {"torch": torch.__version__, "machine": platform.machine(), "date": date.today().isoformat()}
        facts["guards"] = guards
        facts["command"] = "python -m recipes.benchmarks.guard_cost"
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
