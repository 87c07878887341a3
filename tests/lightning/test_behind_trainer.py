"""What a step comes to through the Trainer: compared before each replay, and repeated by it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader

from graphplan.owners.values import ValueWalker
from tests.facts import assert_same, flatten
from tests.lightning.parts import (
    Observer,
    ignore_lightning_warnings,
    loaders,
    sized_loader,
    tape,
    trainer_of,
    with_step,
)

BATCHES, WHEN = 24, 10
Use = Callable[[Any, Tensor], Any]


class _Data(L.LightningDataModule):
    """Has a number in its class, and others in a dictionary, a list and a tensor."""

    weight: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"weight": 1.0}
        self.seen = 0
        self.losses: list[Any] = []
        self.factor = torch.ones(())

    def train_dataloader(self) -> DataLoader[Any]:
        return sized_loader([8] * BATCHES)

    def val_dataloader(self) -> DataLoader[Any]:
        return loaders()[1]


class _Custom(Callback):
    """Changes something after one batch."""

    def __init__(self, prepare: Callable[[Any], None], change: Callable[[Any], None]) -> None:
        self.weight, self.seen = 1.0, 0
        self._prepare, self._change = prepare, change

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._prepare(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WHEN and trainer.current_epoch == 0:
            self._change(trainer)


def _nothing(trainer: Any) -> None:
    """Changes nothing."""


def _run(
    folder: Path, step: Use, prepare: Callable[[Any], None], change: Callable[[Any], None], callback: Any = None
) -> tuple[Any, ...]:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return step(self, self.loss_of(batch))

    torch.manual_seed(0)
    module, data, observer = with_step(training_step)(), _Data(), Observer()
    callbacks = [_Custom(prepare, change), EarlyStopping("val_loss"), observer, *([callback] if callback else [])]
    trainer = trainer_of(folder, callbacks, max_epochs=2)
    with warnings.catch_warnings():
        ignore_lightning_warnings()
        trainer.fit(module, data)
    return module, trainer, data, observer


def _custom(trainer: Any) -> Any:
    return next(callback for callback in trainer.callbacks if isinstance(callback, _Custom))


def _set(lead: Callable[[Any], Any], **values: Any) -> Callable[[Any], None]:
    def change(trainer: Any) -> None:
        vars(lead(trainer)).update(values)

    return change


def _itself(trainer: Any) -> Any:
    return trainer


READ: dict[str, tuple[Use, Callable[[Any], None], Callable[[Any], None]]] = {
    "a datamodule's number": (
        lambda module, loss: loss * module.trainer.datamodule.weight,
        _nothing,
        _set(lambda trainer: trainer.datamodule, weight=0.5),
    ),
    "a datamodule's dictionary": (
        lambda module, loss: loss * module.trainer.datamodule.settings["weight"],
        _nothing,
        lambda trainer: trainer.datamodule.settings.update(weight=0.5),
    ),
    "a datamodule's tensor": (
        lambda module, loss: loss * module.trainer.datamodule.factor,
        _nothing,
        _set(lambda trainer: trainer.datamodule, factor=torch.tensor(0.5)),
    ),
    "the Trainer's attribute": (
        lambda module, loss: loss * module.trainer.weight,
        _set(_itself, weight=1.0),
        _set(_itself, weight=0.5),
    ),
    "the Trainer's setting": (
        lambda module, loss: loss * module.trainer.limit_val_batches,
        _set(_itself, limit_val_batches=1.0),
        _set(_itself, limit_val_batches=0.5),
    ),
    "a callback": (
        lambda module, loss: loss * module.trainer.callbacks[0].weight,
        _nothing,
        _set(_custom, weight=0.5),
    ),
    "early stopping": (
        lambda module, loss: loss * module.trainer.early_stopping_callback.patience,
        _nothing,
        _set(lambda trainer: trainer.early_stopping_callback, patience=4),
    ),
    "the checkpoint": (
        lambda module, loss: loss * (2.0 if module.trainer.checkpoint_callback.best_model_path else 1.0),
        _nothing,
        _nothing,
    ),
    "the logger": (
        lambda module, loss: loss * module.logger.weight,
        _set(lambda trainer: trainer.logger, weight=1.0),
        _set(lambda trainer: trainer.logger, weight=0.5),
    ),
    "the strategy": (
        lambda module, loss: loss * module.trainer.strategy.weight,
        _set(lambda trainer: trainer.strategy, weight=1.0),
        _set(lambda trainer: trainer.strategy, weight=0.5),
    ),
    "the precision": (
        lambda module, loss: loss * module.trainer.precision_plugin.weight,
        _set(lambda trainer: trainer.precision_plugin, weight=1.0),
        _set(lambda trainer: trainer.precision_plugin, weight=0.5),
    ),
    "the dataset": (
        lambda module, loss: loss * module.trainer.train_dataloader.dataset.weight,
        _set(lambda trainer: trainer.train_dataloader.dataset, weight=1.0),
        _set(lambda trainer: trainer.train_dataloader.dataset, weight=0.5),
    ),
    "the sampler": (
        lambda module, loss: loss * module.trainer.train_dataloader.sampler.weight,
        _set(lambda trainer: trainer.train_dataloader.sampler, weight=1.0),
        _set(lambda trainer: trainer.train_dataloader.sampler, weight=0.5),
    ),
    "the least number of epochs": (
        lambda module, loss: loss * (0.5 if module.trainer.min_epochs else 1.0),
        _nothing,
        _set(lambda trainer: trainer.fit_loop, min_epochs=2),
    ),
}


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fit ends with in which nothing changes."""
    module, _, _, _ = _run(tmp_path_factory.mktemp("unchanged"), lambda module, loss: loss, _nothing, _nothing)
    return flatten(module=module)


@pytest.mark.parametrize("name", READ)
@pytest.mark.crossed(2)
def test_a_change_reaches_the_next_step(name: str, unchanged: dict[str, Any], tmp_path: Path) -> None:
    """Without checks, so that it is guards that see it."""
    step, prepare, change = READ[name]
    module, _, _, seen = _run(tmp_path / "eager", step, prepare, change)
    callback = tape(verify="off")
    found, _, _, observed = _run(tmp_path / "graphed", step, prepare, change, callback)
    assert_same(flatten(module=module, batches=seen.batches), flatten(module=found, batches=observed.batches))
    # A tensor's new value is copied to where the old one lay.
    assert callback.stats.captured == (1 if "tensor" in name else 2)
    assert callback.stats.replayed >= 2 * BATCHES - 12
    with pytest.raises(AssertionError):
        assert_same(unchanged, flatten(module=found))


COUNTS: list[Callable[[Any], Any]] = [
    lambda loop: loop._batches_that_stepped,
    lambda loop: loop.automatic_optimization.optim_progress.optimizer_steps,
]


@pytest.mark.parametrize("count", COUNTS, ids=["batches", "steps"])
def test_a_count_of_the_loops_decides(count: Callable[[Any], Any], tmp_path: Path) -> None:
    """It is another number in each step: each outcome has a program."""

    def step(module: Any, loss: Tensor) -> Tensor:
        return loss * 2 if count(module.trainer.fit_loop.epoch_loop) > WHEN else loss

    module, _, _, seen = _run(tmp_path / "eager", step, _nothing, _nothing)
    callback = tape()
    found, _, _, observed = _run(tmp_path / "graphed", step, _nothing, _nothing, callback)
    assert_same(flatten(module=module, batches=seen.batches), flatten(module=found, batches=observed.batches))
    assert callback.stats.captured == 2 and callback.stats.replayed > 0
    assert "guarded: how the step branches on 1 numbers" in str(callback.plan)


def _count(lead: Callable[[Any], Any]) -> Use:
    def step(module: Any, loss: Tensor) -> Tensor:
        lead(module.trainer).seen += 1
        return loss

    return step


def _append(module: Any, loss: Tensor) -> Tensor:
    module.trainer.datamodule.losses.append(loss.detach())
    return loss


def _leave(module: Any, loss: Tensor) -> Tensor:
    module.trainer.last = loss.detach()
    return loss


DONE: dict[str, tuple[Use, Callable[[Any], None], Callable[[Any, Any], Any]]] = {
    "a count on the datamodule": (
        _count(lambda trainer: trainer.datamodule),
        _nothing,
        lambda trainer, data: data.seen,
    ),
    "a count on the Trainer": (_count(_itself), _set(_itself, seen=0), lambda trainer, data: trainer.seen),
    "a count on a callback": (
        _count(lambda trainer: trainer.callbacks[0]),
        _nothing,
        lambda trainer, data: _custom(trainer).seen,
    ),
    "a list of the datamodule's": (_append, _nothing, lambda trainer, data: data.losses),
    "a tensor on the Trainer": (_leave, _nothing, lambda trainer, data: trainer.last),
}


@pytest.mark.parametrize("name", DONE)
def test_what_a_step_leaves_there(name: str, tmp_path: Path) -> None:
    """Replays count, append and bind as the step does."""
    step, prepare, left = DONE[name]
    _, trainer, data, _ = _run(tmp_path / "eager", step, prepare, _nothing)
    callback = tape()
    _, graphed, found, _ = _run(tmp_path / "graphed", step, prepare, _nothing, callback)
    assert_same(flatten(left=left(trainer, data)), flatten(left=left(graphed, found)))
    assert left(trainer, data) not in (0, [])
    assert callback.stats.replayed >= 2 * BATCHES - 6


def test_a_datamodule_that_is_not_named_is_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold a whole dataset; one that is named is walked, and its tensors are not copied."""

    class Held:
        pass

    walked: list[type] = []
    walk = ValueWalker._object
    monkeypatch.setattr(
        ValueWalker,
        "_object",
        lambda self, thing, *args, **kwargs: walked.append(type(thing)) or walk(self, thing, *args, **kwargs),
    )
    prepare = _set(lambda trainer: trainer.datamodule, held=[Held()])
    _run(tmp_path / "unnamed", lambda module, loss: loss, prepare, _nothing, tape())
    assert Held not in walked
    _run(tmp_path / "named", READ["a datamodule's number"][0], prepare, _nothing, tape())
    assert Held in walked


def test_a_dataset_takes_no_part_in_checks(tmp_path: Path) -> None:
    """Only what the step computes with is copied."""
    prepare = _set(lambda trainer: trainer.datamodule, everything=torch.zeros(int(1e6)))
    callback = tape()
    _run(tmp_path, READ["a datamodule's tensor"][0], prepare, _nothing, callback)
    assert callback.stats.verified >= 4
    assert 0 < callback.stats.bytes_verified < 1e6


@pytest.mark.parametrize("allow", [(), ("ExperimentWriter.log_metrics", "CSVLogger.log_metrics")])
def test_a_step_that_writes_to_its_logger(allow: tuple[str, ...], tmp_path: Path) -> None:
    """Only eager calls do, and that is told."""

    def step(module: Any, loss: Tensor) -> Tensor:
        module.logger.log_metrics({"one": 1.0})
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run(tmp_path, step, _nothing, _nothing, tape(allow=allow))
    text = (
        r"log_metrics at test_behind_trainer\.py.*so only eager calls write\. Return the values and "
        r"write them after the step"
    )
    told = [warning for warning in caught if re.search(text, str(warning.message))]
    assert bool(told) is (not allow), [str(one.message) for one in told]
