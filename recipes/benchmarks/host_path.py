"""What a Trainer's step costs on the host beside the replay: ``python -m recipes.benchmarks.host_path [--json PATH]``.

A model with next to nothing in it, a linear layer of eight inputs and one output, on the CPU and one thread: what is
left of a step is Python. Compared are a program's replay, ``graph_step``, and Trainers with and without the callback:
bare, and typical (five values logged for step and epoch, a CSV logger, checkpoints). Of each, the time that the work
itself takes is told apart: a replay with its copies in and out, or the same step in a plain eager loop.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from recipes.benchmarks.guard_cost import step_of

WARMUP, STEPS = 30, 400
"""Batches of a fit: the first lead to a program; the time of the others is what counts."""


class Batches:
    """The same few batches again and again, and a clock that is read when each is asked for."""

    def __init__(self) -> None:
        self._pool = [torch.randn(4, 8) for _ in range(16)]
        self.marks: list[float] = []

    def __len__(self) -> int:
        return WARMUP + STEPS + 1

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(len(self)):
            self.marks.append(perf_counter())
            yield self._pool[index % len(self._pool)]

    def us(self) -> float:
        """Median microseconds between two batches after the warm-up."""
        marks = self.marks[WARMUP:]
        return median(end - start for start, end in pairwise(marks)) * 1e6


@contextmanager
def replays_timed() -> Iterator[list[float]]:
    """Seconds of every replay of a program, copies in and out included."""
    from graphplan.program.program import Program

    run, times = Program.run, []

    def timed(self: Program, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        result = run(self, *args, **kwargs)
        times.append(perf_counter() - start)
        return result

    with patch.object(Program, "run", timed):
        yield times


class Figures(NamedTuple):
    """Microseconds of a step, and of the work in it: a replay, or the step in a plain loop."""

    us: float
    work: float


def _make() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)


def _loop(call: Callable[[Tensor], Any]) -> float:
    batches = Batches()
    for batch in batches:
        call(batch)
    return batches.us()


def eager(*, typical: bool) -> float:
    """The step of the Trainers in a plain loop: nothing is logged, but what would be is computed."""
    model, optimizer = _make()

    def step(batch: Tensor) -> None:
        loss = model(batch).square().mean()
        values = [loss * index for index in range(5 if typical else 0)]
        del values
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return _loop(step)


def replay() -> Figures:
    """The program alone: inputs copied in, operators run, outputs cloned."""
    from graphplan import capture, compile_plan

    model, optimizer = _make()
    train_step, x = step_of(model, optimizer), torch.randn(4, 8)
    plan = compile_plan(train_step, x, owners={"model": model, "optimizer": optimizer})
    program = capture(plan, feed=(x,), backend="tape")
    us = _loop(lambda batch: program.run([batch]))
    return Figures(us, us)


def graphed() -> Figures:
    """The same through ``graph_step``, with its checks."""
    from graphplan import graph_step

    model, optimizer = _make()
    step = graph_step(step_of(model, optimizer), owners={"model": model, "optimizer": optimizer}, backend="tape")
    with replays_timed() as times:
        us = _loop(step)
    return Figures(us, median(times) * 1e6)


def trainer(*, typical: bool, callback: bool, folder: Path) -> Figures:
    """A Trainer's step."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from graphplan import GraphPlanCallback

    model, optimizer = _make()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.model(batch).square().mean()
            for index in range(5 if typical else 0):
                self.log(f"value_{index}", loss * index, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer

    callbacks: list[Any] = [GraphPlanCallback(backend="tape")] if callback else []
    run = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=folder,
        callbacks=[*callbacks, *([ModelCheckpoint(folder)] if typical else [])],
        logger=CSVLogger(folder) if typical else False,
        enable_checkpointing=typical,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = Batches()
    with warnings.catch_warnings(), replays_timed() as times:
        warnings.simplefilter("ignore")
        run.fit(Module(), batches)
    assert not callback or len(times) > STEPS, callbacks[0].report()
    return Figures(batches.us(), median(times) * 1e6 if callback else eager(typical=typical))


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """All contenders in turns; for each the medians of its rounds."""
    contenders: dict[str, Callable[[], Figures]] = {"program": replay, "graph_step": graphed}
    for typical in (False, True):
        kind = "typical" if typical else "bare"
        for name, callback in {f"Trainer, {kind}": False, f"Trainer with the callback, {kind}": True}.items():
            contenders[name] = lambda typical=typical, callback=callback: trainer(  # type: ignore[misc]
                typical=typical, callback=callback, folder=folder
            )
    found: dict[str, list[Figures]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            found[name].append(run())
    return [
        {
            "contender": name,
            "us": round(median(figures.us for figures in own), 1),
            "work_us": round(median(figures.work for figures in own), 1),
            "host_us": round(median(figures.us - figures.work for figures in own), 1),
        }
        for name, own in found.items()
    ]


def main() -> None:
    """Measure, print a table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender is run, in turns")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.rounds)
    for row in rows:
        print(
            f"{row['contender']:<36} {row['us']:>8.1f} µs/step, {row['work_us']:>7.1f} of them work, "
            f"{row['host_us']:>7.1f} beside it"
        )
    if arguments.json is not None:
        facts = {"torch": torch.__version__, "machine": platform.machine(), "date": date.today().isoformat()}
        facts["command"] = f"python -m recipes.benchmarks.host_path --rounds {arguments.rounds}"
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
