"""A digits classifier, its data, and how two fits of it are run and compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from graphplan import GraphPlanCallback
from graphplan.callback.lightning_code import is_known
from tests.facts import assert_same, flatten
from tests.twins import keep

TRAIN, VALIDATION, BATCH = 300, 100, 32
STEPS_PER_EPOCH = 10
"""Nine batches of 32 and a ragged one of 12."""
TRUSTED: dict[str, Any] = {"weights_only": False} if "weights_only" in signature(L.Trainer.fit).parameters else {}
"""Checkpoints of one's own hold more than tensors. Lightning asks since 2.6."""
SUMS_IN_STEP = is_known("logs")
"""Whether an epoch's means are summed in the step. The ragged batch, summed by other kernels, has two traces then."""
FUSED_ADAMW = partial(AdamW, lr=3e-3, fused=True)


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Scikit-learn's digits as a training and a validation set."""
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    end = TRAIN + VALIDATION
    return TensorDataset(x[:TRAIN], y[:TRAIN]), TensorDataset(x[TRAIN:end], y[TRAIN:end])


class LitDigits(L.LightningModule):
    """A small network with batch normalisation and dropout.

    Args:
        make_optimizer: Makes the optimizer from the parameters.
        schedule: Makes a scheduler, or Lightning's dict with one, from the optimizer; None for a constant lr.
    """

    def __init__(
        self,
        make_optimizer: Callable[..., Optimizer] = FUSED_ADAMW,
        schedule: Callable[[Optimizer], Any] | None = lambda optimizer: per_step(CosineAnnealingLR(optimizer, 30)),
    ) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer
        self.schedule = schedule
        layers = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss_of(self, batch: Any) -> Tensor:
        """Cross entropy of one batch."""
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer([p for p in self.parameters() if p.requires_grad])
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


def per_step(scheduler: Any) -> dict[str, Any]:
    """Lightning's way to say that a scheduler steps after every batch."""
    return {"scheduler": scheduler, "interval": "step"}


def with_step(step: Callable[..., Any], base: type[LitDigits] = LitDigits, **members: Any) -> type[LitDigits]:
    """A module class with another ``training_step`` and further members."""
    return type("Variant", (base,), {"training_step": step, **members})


class Observer(Callback):
    """Keeps what an ordinary callback sees after every batch and every epoch."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        lrs = [group.get("lr") for optimizer in trainer.optimizers for group in optimizer.param_groups]
        metrics = {**trainer.callback_metrics, **trainer.logged_metrics}
        self.batches.append(keep({"out": outputs, "seen": metrics, "lr": lrs, "step": trainer.global_step}))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(keep(dict(trainer.callback_metrics)))


@dataclass
class Fit:
    """A finished fit."""

    module: Any
    trainer: L.Trainer
    observer: Observer
    callback: Any
    folder: Path

    @property
    def rows(self) -> str:
        """The logger's CSV file."""
        logger = self.trainer.logger
        path = Path(logger.log_dir or self.folder if logger is not None else self.folder) / "metrics.csv"
        return path.read_text() if path.exists() else ""

    @property
    def checkpoint(self) -> dict[str, Any]:
        """The last checkpoint."""
        return torch.load(self.last, weights_only=False)

    @property
    def last(self) -> Path:
        """Where the last checkpoint is."""
        return self.folder / "last.ckpt"

    @property
    def state(self) -> dict[str, Any]:
        """Everything that a user could look at after the fit."""
        saved = _without(str(self.folder), self.checkpoint) if self.last.exists() else {}
        return flatten(
            module=self.module,
            optimizers=self.trainer.optimizers,
            metrics=dict(self.trainer.callback_metrics),
            logged=dict(self.trainer.logged_metrics),
            rows=self.rows.splitlines(),
            batches=self.observer.batches,
            epochs=self.observer.epochs,
            checkpoint=saved,
            best=self.trainer.checkpoint_callback.best_model_score if self.trainer.checkpoint_callback else None,
            steps=(self.trainer.global_step, self.trainer.current_epoch),
            generator=torch.get_rng_state(),
        )


def _without(folder: str, value: Any) -> Any:
    """``value``, in which no path says which folder the fit wrote to."""
    if isinstance(value, str):
        return value.replace(folder, "")
    if isinstance(value, dict):
        return {_without(folder, key): _without(folder, item) for key, item in value.items()}
    return [_without(folder, item) for item in value] if isinstance(value, list | tuple) else value


def loaders(batch: int = BATCH) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """A shuffled training loader with a ragged last batch, and a validation loader."""
    train, validation = digits()
    shuffle = torch.Generator().manual_seed(5)
    return DataLoader(train, batch, shuffle=True, generator=shuffle), DataLoader(validation, 50)


def sized_loader(sizes: Iterable[int]) -> DataLoader[Any]:
    """A training loader with batches of the given sizes."""
    return DataLoader(digits()[0], batch_sampler=[list(range(size)) for size in sizes])


def trainer_of(folder: Path, callbacks: list[Callback], **options: Any) -> L.Trainer:
    """A trainer with CSV rows for every step and a checkpoint for every epoch; a barebones one has neither."""
    if options.get("barebones"):
        return L.Trainer(callbacks=callbacks, **{"accelerator": "cpu", **options})
    save = ModelCheckpoint(folder, monitor="val_loss", save_last=True, save_top_k=1)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 3,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": CSVLogger(folder, name="logs", version=0),
    }
    return L.Trainer(callbacks=[save, *callbacks], **{**defaults, **options})


def fit(
    make: Callable[[], L.LightningModule],
    folder: Path,
    callback: GraphPlanCallback | None = None,
    *,
    resume: Path | None = None,
    batch: int = BATCH,
    sizes: Iterable[int] | None = None,
    more: Sequence[Callback] = (),
    validates: bool = True,
    **options: Any,
) -> Fit:
    """Seed, build and fit; without ``callback`` this is the eager twin. ``sizes`` gives each batch its own size.
    Without ``validates``, the module has validation loaders of its own, if any.
    """
    torch.manual_seed(0)
    module, observer = make(), Observer()
    trainer = trainer_of(folder, [observer, *more, *([callback] if callback else [])], **options)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        ignore_lightning_warnings()
        data = loaders(batch) if sizes is None else (sized_loader(sizes), loaders()[1])
        trainer.fit(module, *data[: 1 + validates], ckpt_path=resume, **TRUSTED)
    return Fit(module, trainer, observer, callback, folder)


def ignore_lightning_warnings() -> None:
    """Silence Lightning's advice on workers, folders and tips; graphplan's warnings stay."""
    texts = ("does not have many workers", "exists and is not empty", "isinstance\\(treespec")
    for text in (*texts, "dirpath has changed", "requested to overfit"):
        warnings.filterwarnings("ignore", message=f".*{text}.*")


def tape(**options: Any) -> GraphPlanCallback:
    """The callback on the tape backend."""
    return GraphPlanCallback(**{"backend": "tape", **options})


def assert_same_fits(expected: Fit, found: Fit) -> None:
    """Fail unless both fits left the same weights, states, metrics, rows and checkpoints, bit by bit."""
    assert_same(expected.state, found.state)


@cache
def eager_state(make: Callable[[], L.LightningModule], **options: Any) -> dict[str, Any]:
    """The state that fits without the callback end with, run once for all tests that compare with it."""
    with TemporaryDirectory() as folder:
        return fit(make, Path(folder), **options).state


def assert_fit_equals_eager(
    make: Callable[[], L.LightningModule], folder: Path, *, replayed: int, callback: Any = None, **options: Any
) -> Fit:
    """Fit twice, without and with the callback; compare; check that so many batches at least were replayed."""
    is_usual = make is LitDigits and options.keys() <= {"max_epochs"}
    expected = eager_state(make, **options) if is_usual else fit(make, folder / "eager", **options).state
    found = fit(make, folder / "graphed", callback or tape(), **options)
    assert_same(expected, found.state)
    stats = found.callback.stats
    assert stats.replayed >= replayed, found.callback.report()
    batches = len(found.observer.batches)
    assert stats.eager + stats.traced + stats.captured + stats.replayed == batches, found.callback.report()
    return found
