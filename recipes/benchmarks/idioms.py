"""Idioms of training steps that read numbers, in a Trainer without and with the callback.

    python -m recipes.benchmarks.idioms [--json PATH]

A small classifier is trained on a GPU if there is one. Each ``training_step`` logs, appends or sums up numbers of
``item()``, keeps copies on the host, does something every few batches, branches on its loss, or updates metrics.
Weights, metrics and what the modules hold have to be the same with the callback. A time is that of a step, from the
end of one to the end of the next.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import warnings
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from graphplan import GraphPlanCallback

FEATURES, CLASSES, BATCH, DEPTH = 64, 10, 64, 6


class Net(pl.LightningModule):
    """Six layers, and what idioms keep numbers in."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(FEATURES, FEATURES), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))
        self.history: list[Any] = []
        self.total = 0.0

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)


class LogsNumbers(Net):
    """``self.log("loss", loss.item())``, and an accuracy that Python divides."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.net(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        hits = (scores.argmax(1) == batch[1]).sum().item()
        self.log_dict({"loss": loss.item(), "accuracy": hits / len(batch[1])}, on_step=True, on_epoch=True)
        return loss


class KeepsNumbers(Net):
    """``self.history.append(loss.item())`` and ``self.total += loss.item()``."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.history.append(loss.item())
        self.total += loss.item()
        return loss


class KeepsCopies(Net):
    """``self.history.append(scores.detach().cpu())``, and an array of guesses."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.net(batch[0])
        self.history.append(scores.detach().cpu())
        self.history.append(scores.argmax(1).cpu().numpy())
        return F.cross_entropy(scores, batch[1])


class LogsANorm(Net):
    """The norm of all gradients, summed up in Python."""

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = 0.0
        for parameter in self.parameters():
            assert parameter.grad is not None
            total += parameter.grad.norm(2).item() ** 2
        self.log("norm", total**0.5)


class EveryFewBatches(Net):
    """Logs when ``batch_idx % 10 == 0``, and weighs the loss by the number of steps."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if batch_idx % 10 == 0:
            self.log("every ten", loss.item())
        return loss * 2 if self.global_step >= 100 else loss


class Accumulates(Net):
    """Manual optimization: ``if (batch_idx + 1) % 4 == 0: optimizer.step()``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = F.cross_entropy(self.net(batch[0]), batch[1]) / 4
        self.manual_backward(loss)
        if (batch_idx + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class SkipsBadLosses(Net):
    """``if not torch.isfinite(loss): return None``."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        if not torch.isfinite(loss):
            return None
        return loss


class Measures(Net):
    """A mean of the loss, accuracy and F1 in the step: they look for NaN, and for how many counts there are."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)
        self.f1 = torchmetrics.classification.MulticlassF1Score(CLASSES)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.net(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        self.mean(loss)
        self.log("loss", self.mean, on_step=True, on_epoch=True)
        for name, metric, predicted in (("accuracy", self.accuracy, scores.argmax(1)), ("f1", self.f1, scores)):
            metric(predicted, batch[1])
            self.log(name, metric, on_step=True, on_epoch=True)
        return loss


IDIOMS: tuple[type[Net], ...] = (
    Net, LogsNumbers, KeepsNumbers, KeepsCopies, LogsANorm, EveryFewBatches, Accumulates, SkipsBadLosses, Measures
)  # fmt: skip


class Clock(pl.Callback):
    """When each batch ended, in seconds."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(perf_counter())


def fit(kind: type[Net], batches: int, warm: int, callback: GraphPlanCallback | None) -> dict[str, Any]:
    """Train; the time of a step after ``warm`` ones in microseconds, and everything that the fit has left."""
    torch.manual_seed(0)
    module, clock = kind(), Clock()
    trainer = pl.Trainer(
        accelerator="auto", devices=1, max_epochs=2, limit_train_batches=batches // 2, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        callbacks=[clock, *([] if callback is None else [callback])],
    )  # fmt: skip
    data = TensorDataset(torch.randn(batches // 2 * BATCH, FEATURES), torch.randint(CLASSES, (batches // 2 * BATCH,)))
    trainer.fit(module, DataLoader(data, BATCH))
    left = {name: tensor.cpu().tolist() for name, tensor in module.state_dict().items()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    spent = (clock.ends[-1] - clock.ends[warm]) / (len(clock.ends) - 1 - warm)
    history = [item if isinstance(item, float) else item.tolist() for item in module.history]
    return {"us": spent * 1e6, "left": (left, metrics, history, module.total)}


def measure(kind: type[Net], batches: int, warm: int) -> dict[str, Any]:
    """One row: times without and with the callback, the share of replays, and whether both fits are the same."""
    callback = GraphPlanCallback(on_failure="eager")
    eager, graphed = fit(kind, batches, warm, None), fit(kind, batches, warm, callback)
    stats = callback.stats
    return {
        "idiom": kind.__name__, "without_us": round(eager["us"]), "with_us": round(graphed["us"]),
        "speed_up": round(eager["us"] / graphed["us"], 2), "replayed": round(stats.replayed / max(1, stats.calls), 3),
        "equal": eager["left"] == graphed["left"],
    }  # fmt: skip


def main() -> None:
    """Print the rows, and save them if asked to."""
    parser = argparse.ArgumentParser(
        "python -m recipes.benchmarks.idioms", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=600)
    parser.add_argument("--warm", type=int, default=200, help="batches before those that are timed")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    rows = []
    for kind in IDIOMS:
        rows.append(measure(kind, args.batches, args.warm))
        print(json.dumps(rows[-1]), flush=True)
    if args.json is not None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {platform.machine()}"
        facts = {
            "date": date.today().isoformat(), "torch": torch.__version__, "device": device,
            "command": "python -m recipes.benchmarks.idioms", "rows": rows,
        }  # fmt: skip
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
