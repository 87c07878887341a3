"""A row of the matrix: how a run differs from the plain one, and the comparison of its two sides."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Subset

from tests.facts import assert_same, flatten
from tests.lightning.parts import TRUSTED, Fit, LitDigits, Observer, digits, tape, trainer_of, with_step
from tests.twins import keep

BATCH, EPOCHS = 24, 3
PER_EPOCH = 6
FULL = EPOCHS * PER_EPOCH - 4
"""Replays with one eager, two traced and one captured step before the first."""
_IN_STEP = {"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"}
_HOOKS = [name for name in vars(Callback) if name.startswith("on_") and name not in _IN_STEP and "point" not in name]


class Watcher(Observer):
    """Also keeps the order of the hooks, what is handed out without copying it, and how long steps take."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[str, int]] = []
        self.held: list[Any] = []
        self.times: list[float] = []
        self._begin = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._begin = perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(perf_counter() - self._begin)
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.held.append([outputs, dict(trainer.callback_metrics), dict(trainer.progress_bar_metrics)])


def _ordered(name: str) -> Callable[..., None]:
    plain = getattr(Watcher, name)

    def hook(self: Watcher, trainer: Any, *args: Any) -> None:
        self.order.append((name, trainer.global_step))
        plain(self, trainer, *args)

    return hook


for _name in _HOOKS:
    setattr(Watcher, _name, _ordered(_name))


@dataclass
class Row:
    """How a run differs from the plain one."""

    make: Callable[[], L.LightningModule] = LitDigits
    replayed: int = FULL
    callbacks: Callable[[], list[Callback]] = list
    collate: Callable[[Any], Any] | None = None
    trainer: Callable[[], dict[str, Any]] | dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    seen: Callable[[Any], Any] = lambda callbacks: None
    """What else is to be equal: read from the row's callbacks after the fit."""
    examples: int = BATCH * PER_EPOCH
    twin: Callable[[], L.LightningModule] | None = None
    """The module of the side without the callback, where that needs its optimizer prepared by hand."""
    run: Callable[[Side], Fit] = lambda side: side.fit()
    shows: Callable[[Fit], object] = lambda fit: True
    """Whether the feature of the row did anything, in the fit with the callback."""
    leaves_out: tuple[str, ...] = ()
    """Parts of paths and of columns that are not compared: measured times, flags of a twin's optimizer."""
    evaluated: int = 0
    """Replays of evaluation steps."""
    says: str = "^$"
    """A pattern of warnings that are given with the callback only."""
    needs: tuple[str, ...] = ()
    """Packages that Lightning asks for there."""


class Side:
    """One of the two runs of a row, with the callback or without."""

    def __init__(self, row: Row, folder: Path, *, graphed: bool) -> None:
        self.row, self.folder, self.graphed = row, folder, graphed
        self.replayed = self.evaluated = self.captured = self.steps = 0
        self.times: list[float] = []
        self.watchers: list[Watcher] = []
        self.seen: list[Any] = []
        self.said: set[str] = set()

    def callback(self) -> Any:
        """A callback of graphplan's, or none on the side without."""
        return tape(**{"warmup_steps": 1, **self.row.options}) if self.graphed else None

    def module(self) -> L.LightningModule:
        """The row's module."""
        torch.manual_seed(0)
        twin = self.row.twin
        return self.row.make() if self.graphed or twin is None else twin()

    def data(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Shuffled training batches, and batches for validation."""
        train, validation = digits()
        shuffle = torch.Generator().manual_seed(5)
        subset = Subset(train, range(self.row.examples))
        train_loader = DataLoader(subset, BATCH, shuffle=True, generator=shuffle, collate_fn=self.row.collate)
        return train_loader, DataLoader(validation, 50)

    def fit(
        self,
        part: str = "",
        *,
        callback: Any = True,
        module: Any = None,
        resume: Path | None = None,
        more: Any = (),
        first: Callable[[Fit], object] = lambda fit: None,
        **options: Any,
    ) -> Fit:
        """Fit once: with the side's callback, with the one given, or without one if that is None. ``first`` is done
        before that with the Trainer.
        """
        callback = self.callback() if callback is True else callback if self.graphed else None
        module, watcher, own = module or self.module(), Watcher(), self.row.callbacks()
        # Before the row's callbacks: they may step on what an ordinary callback would see.
        callbacks = [watcher, *own, *more, *([callback] if callback else [])]
        given = self.row.trainer() if callable(self.row.trainer) else self.row.trainer
        trainer = trainer_of(self.folder / part, callbacks, **{"max_epochs": EPOCHS, **given, **options})
        fit = Fit(module, trainer, watcher, callback, self.folder / part)
        with self.listening():
            first(fit)
        self.go_on(fit, *self.data(), ckpt_path=resume, **TRUSTED)
        self.seen.append(self.row.seen(own))
        return fit

    def go_on(self, fit: Fit, *data: Any, **options: Any) -> None:
        """``trainer.fit``, and count what it did."""
        torch.manual_seed(1)
        try:
            with self.listening():
                fit.trainer.fit(fit.module, *data, **options)
        finally:
            self.count(fit)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep what is said by warnings."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        said = (str(warning.message).replace(str(self.folder), "") for warning in caught)
        self.said |= {re.sub("0x[0-9a-f]+", "", text) for text in said}

    def count(self, fit: Fit) -> None:
        """Add up a fit's steps."""
        watcher: Any = fit.observer
        if watcher not in self.watchers:
            self.watchers.append(watcher)
        self.times += watcher.times
        if fit.callback is not None:
            stats = fit.callback.stats
            assert stats.eager + stats.traced + stats.captured + stats.replayed == stats.calls, fit.callback.report()
            self.replayed += stats.replayed
            self.evaluated += fit.callback.eval_stats.replayed
            self.captured += sum(each.captured for each in (stats, fit.callback.eval_stats))
        self.steps = sum(len(watcher.batches) for watcher in self.watchers)

    def facts(self, fit: Fit) -> dict[str, Any]:
        """Everything that a user could look at."""
        scaler = getattr(fit.trainer.precision_plugin, "scaler", None)
        state = {path: value for path, value in fit.state.items() if not path.startswith("rows")}
        facts = state | flatten(
            order=[watcher.order for watcher in self.watchers],
            held=[watcher.held for watcher in self.watchers],
            scaler=scaler.state_dict() if scaler is not None else None,
            seen=self.seen,
            rows=self._rows(fit.rows),
        )
        for path in [path for path in facts if path.endswith(".keys")]:
            facts[path] = [key for key in facts[path] if not self._is_left_out(key)]
        return {path: value for path, value in facts.items() if not self._is_left_out(path)}

    def _rows(self, text: str) -> list[dict[str, str]]:
        rows = csv.DictReader(io.StringIO(text))
        return [{name: cell for name, cell in row.items() if not self._is_left_out(name)} for row in rows]

    def _is_left_out(self, path: str) -> bool:
        return any(part in path for part in self.row.leaves_out)


@dataclass
class Outcome:
    """What a row came to."""

    steps: int
    replayed: int
    ratio: float
    """Time of an eager step by time of a replayed one, callbacks and checks aside."""


def check(row: Row, folder: Path) -> Outcome:
    """Run a row's two sides, and compare all that they leave."""
    plain, graphed = Side(row, folder / "eager", graphed=False), Side(row, folder / "graphed", graphed=True)
    expected = plain.facts(row.run(plain))
    fit = row.run(graphed)
    assert_same(expected, graphed.facts(fit))
    report = fit.callback.report() if fit.callback is not None else ""
    found, wanted = (graphed.replayed, graphed.evaluated), (row.replayed, row.evaluated)
    # Rows say how many there are if all captures have two traces; where one is enough, its next call is a replay.
    more = [one - other for one, other in zip(found, wanted, strict=True)]
    assert min(more) >= 0 and sum(more) <= graphed.captured, f"replayed {found}, expected {wanted}\n{report}"
    assert graphed.steps == plain.steps
    assert not [text for text in graphed.said - plain.said if not re.match(row.says, text)]
    assert row.shows(fit), report
    late = slice(plain.steps // 2, None)
    return Outcome(graphed.steps, graphed.replayed, median(plain.times[late]) / median(graphed.times[late]))


def variant(base: type[LitDigits] = LitDigits, **members: Any) -> type[LitDigits]:
    """A module class with other hooks."""
    return with_step(members.pop("training_step", base.training_step), base, **members)


def scheduled(schedule: Callable[[Any], Any] | None) -> Callable[[], LitDigits]:
    """A module with another schedule."""
    return partial(LitDigits, schedule=schedule)


def kept(callbacks: list[Any]) -> Any:
    """What the first callback kept."""
    return callbacks[0].kept


class GradientsAndBatches(Callback):
    """Keeps gradients and batches as they are after each batch."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(keep([batch, *(p.grad for p in module.parameters())]))
