"""What a Trainer's step costs on the host beside the replay: ``python -m recipes.host_path [--json PATH]``.

A model with next to nothing in it, a linear layer of eight inputs and one output, on the CPU and one thread: what is
left of a step is Python. Compared are the bare replay of its program, ``graph_step``, and Trainers with and without the
callback: bare, and typical (five values logged for step and epoch, a CSV logger, checkpoints).
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from recipes.guard_cost import step_of

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


def _make() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)


def _loop(call: Callable[[Tensor], Any]) -> float:
    batches = Batches()
    for batch in batches:
        call(batch)
    return batches.us()


def replay() -> float:
    """The program alone: inputs copied in, operators run, outputs cloned."""
    from graphplan import capture, compile_plan

    model, optimizer = _make()
    train_step, x = step_of(model, optimizer), torch.randn(4, 8)
    plan = compile_plan(train_step, x, owners={"model": model, "optimizer": optimizer})
    program = capture(plan, feed=(x,), backend="tape")
    return _loop(lambda batch: program.replay((batch,)))


def graphed() -> float:
    """The same through ``graph_step``, with its checks."""
    from graphplan import graph_step

    model, optimizer = _make()
    owners = {"model": model, "optimizer": optimizer}
    return _loop(graph_step(step_of(model, optimizer), owners=owners, backend="tape"))


def trainer(*, typical: bool, callback: bool, folder: Path, options: dict[str, Any]) -> float:
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

    callbacks: list[Any] = [GraphPlanCallback(backend="tape", **options)] if callback else []
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(Module(), batches)
    assert not callback or callbacks[0].stats.replayed > STEPS, callbacks[0].report()
    return batches.us()


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """All contenders in turns; for each the median of its rounds, and what it is above the replay of the same round."""
    contenders: dict[str, Callable[[], float]] = {"replay": replay, "graph_step": graphed}
    for typical in (False, True):
        kind = "typical" if typical else "bare"
        for name, callback in {f"Trainer, {kind}": False, f"Trainer with the callback, {kind}": True}.items():
            contenders[name] = lambda typical=typical, callback=callback: trainer(  # type: ignore[misc]
                typical=typical, callback=callback, folder=folder, options={}
            )
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(run())
    floor = times["replay"]
    return [
        {
            "contender": name,
            "us": round(median(own), 1),
            "above_replay_us": round(median(a - b for a, b in zip(own, floor, strict=True)), 1),
        }
        for name, own in times.items()
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
        print(f"{row['contender']:<36} {row['us']:>8.1f} µs/step {row['above_replay_us']:>8.1f} above the replay")
    if arguments.json is not None:
        facts = {"torch": torch.__version__, "machine": platform.machine(), "date": date.today().isoformat()}
        facts["command"] = f"python -m recipes.host_path --rounds {arguments.rounds}"
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
