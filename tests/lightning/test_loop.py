"""The loop seam: used where nothing speaks against it, with a named reason where something does, and the same run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, IterableDataset

from graphplan import HostEffectError
from tests.lightning.parts import LitDigits, assert_same_fits, fit, loaders, tape, trainer_of, with_step

OTHER = "Lightning's own loop: "


class Inspections(Callback):
    """Counts how often Lightning looks at the training step's signature, which it does for every batch of its own."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop

        def build(*args: Any) -> Any:
            self.count += 1
            return _TrainingEpochLoop._build_kwargs(loop, *args)

        loop._build_kwargs = build


def reasons(callback: Any) -> list[str]:
    """Why the stock loop was used, as the report has it."""
    return [line.strip() for line in callback.report().splitlines() if OTHER in line]


@pytest.mark.parametrize("manual", [False, True])
def test_nothing_of_the_stock_loop_runs(manual: bool, tmp_path: Path) -> None:
    inspections = Inspections()
    found = fit(partial(_Manual if manual else LitDigits), tmp_path, tape(), more=[inspections])
    assert found.callback.stats.replayed >= 14
    assert reasons(found.callback) == []
    assert inspections.count == 2, "the first batch, and once for all others"


class _Manual(LitDigits):
    def __init__(self) -> None:
        super().__init__(schedule=None)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss_of(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class _Transfers(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loaders()[0]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class _OwnDevice(SingleDeviceStrategy):
    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return batch


class _OwnLoop(Callback):
    """Puts something in the place of the loop's method before the seam comes."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        loop.advance = lambda fetcher: _TrainingEpochLoop.advance(loop, fetcher)


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"callback": {"loop": "stock"}}, "loop='stock'"),
    "profiler": ({"profiler": "simple"}, "the SimpleProfiler records the calls of Lightning's loop"),
    "start": (
        {"module": with_step(LitDigits.training_step, on_train_batch_start=lambda self, batch, batch_idx: None)},
        "Variant.on_train_batch_start may end the epoch",
    ),
    "transfer": (
        {"module": with_step(LitDigits.training_step, on_before_batch_transfer=lambda self, batch, index: batch)},
        "Variant.on_before_batch_transfer is overridden",
    ),
    "data module": ({"data": _Transfers}, "_Transfers.on_after_batch_transfer is overridden"),
    "precision": ({"precision": "64-true"}, "the DoublePrecision converts batches"),
    "strategy": ({"strategy": lambda: _OwnDevice("cpu")}, "the _OwnDevice has hooks for batches"),
    "loop": ({"more": [_OwnLoop()]}, "the training loop's advance is not Lightning's own"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_needs_the_stock_loop(name: str, tmp_path: Path) -> None:
    """Each reason is in the report, and steps are replayed all the same where there is a batch to replay on."""
    given, reason = dict(REASONS[name][0]), REASONS[name][1]
    callback = tape(on_failure="eager", **given.pop("callback", {}))
    module, data, more = given.pop("module", LitDigits)(), given.pop("data", None), given.pop("more", [])
    options = {key: value() if callable(value) else value for key, value in given.items()}
    trainer = trainer_of(tmp_path, [callback, *more], max_epochs=1, limit_val_batches=0, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, **({"datamodule": data()} if data else {"train_dataloaders": loaders()[0]}))
    assert reasons(callback) == [OTHER + reason]
    assert callback.stats.replayed >= (0 if name == "iterator" else 3), callback.report()


class _Guest(Callback):
    """Notes the batches it sees."""

    def __init__(self, seen: list[Any], name: str) -> None:
        self._seen, self._name = seen, name

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._seen.append((self._name, module._current_fx_name, trainer.global_step, batch_idx))


class _Host(Callback):
    """Brings hooks along in the middle of an epoch: a callback's, an instance's own, the module's."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._guest = _Guest(self.seen, "guest")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        note = lambda name: lambda *args: self.seen.append((name, module._current_fx_name, args[-1]))  # noqa: E731
        if (trainer.current_epoch, batch_idx) == (1, 2):
            trainer.callbacks.append(self._guest)
        if (trainer.current_epoch, batch_idx) == (1, 4):
            vars(self)["on_train_batch_end"] = note("own")
            module.on_train_batch_end = note("module")
        if (trainer.current_epoch, batch_idx) == (1, 7):
            trainer.callbacks.remove(self._guest)
            del module.on_train_batch_end


def test_hooks_that_come_and_go(tmp_path: Path) -> None:
    runs = []
    for name, callback in {"eager": None, "graphed": tape()}.items():
        host = _Host()
        runs.append((fit(LitDigits, tmp_path / name, callback, more=[host]), host.seen))
    (expected, eager), (found, graphed) = runs
    assert reasons(found.callback) == []
    assert eager == graphed
    assert {name for name, *_ in eager} == {"guest", "own", "module"}
    assert_same_fits(expected, found)


class _Batches(IterableDataset[Any]):
    """Batches without a length, one of which is None."""

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(loaders()[0]):
            yield None if index == 6 else batch


class _Kept:
    """The same lists in each epoch."""

    def __init__(self) -> None:
        self._batches = [list(batch) for batch in loaders()[0]]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class _Halves(Callback):
    """Changes each batch where it stands."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch[0] = batch[0] * 0.5


def _trained(data: Callable[[], Any], callback: Any, folder: Path, *more: Callback) -> LitDigits:
    torch.manual_seed(0)
    module = LitDigits()
    callbacks = [*more, callback] if callback else list(more)
    trainer = trainer_of(folder, callbacks, max_epochs=2, limit_val_batches=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data())
    return module


def _assert_same_training(folder: Path, data: Callable[[], Any], *more: Callback) -> None:
    expected = _trained(data, None, folder / "eager", *more)
    callback = tape()
    found = _trained(data, callback, folder / "graphed", *more)
    assert reasons(callback) == []
    assert callback.stats.replayed >= 8
    for left, right in zip(expected.parameters(), found.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_batch_that_is_none(tmp_path: Path) -> None:
    _assert_same_training(tmp_path, lambda: DataLoader(_Batches(), batch_size=None))


def test_a_list_that_the_loader_keeps(tmp_path: Path) -> None:
    """Hooks are given a list of their own, as by Lightning: what they put into it is not there in the next epoch."""
    _assert_same_training(tmp_path, _Kept, _Halves())


def test_the_loop_is_left_as_it_was(tmp_path: Path) -> None:
    found = fit(LitDigits, tmp_path, tape(), max_epochs=1)
    loop: Any = found.trainer.fit_loop.epoch_loop
    assert not {"advance", "on_advance_end", "_on_before_fetch", "_on_after_fetch"} & vars(loop).keys()


class _Counts:
    """A hook that is an object."""

    def __init__(self) -> None:
        self.call_count = 0

    def __call__(self, *args: Any) -> None:
        self.call_count += 1


def _with_objects() -> Any:
    callback: Any = Callback()
    for name in ("on_train_batch_start", "on_train_batch_end", "on_after_backward"):
        setattr(callback, name, _Counts())
    return callback


def _mocked() -> Any:
    callback = Mock(spec=Callback)
    callback.state_key = "mock"
    callback.state_dict.return_value = {}
    return callback


def test_hooks_that_are_objects(tmp_path: Path) -> None:
    """Are called for each batch, or what they count in the step is counted."""
    watching = _with_objects()
    found = fit(LitDigits, tmp_path, tape(), more=[watching], max_epochs=2)
    assert found.callback.stats.replayed >= 8
    hooks = watching.on_train_batch_start, watching.on_train_batch_end, watching.on_after_backward
    assert [hook.call_count for hook in hooks] == [20, 20, 20]


def test_hooks_that_are_mocks(tmp_path: Path) -> None:
    """Keep every call of theirs, in the step too, which a replay does not make: refused, or eager with all calls."""
    with pytest.raises(HostEffectError, match=r"callbacks\[Mock\]\._mock_mock_calls"):
        fit(LitDigits, tmp_path / "refused", tape(), more=[_mocked()])
    watching = _mocked()
    with pytest.warns(UserWarning, match="graphplan runs this step eagerly"):
        fit(LitDigits, tmp_path / "eager", tape(on_failure="eager"), more=[watching], max_epochs=2)
    hooks = watching.on_train_batch_start, watching.on_train_batch_end, watching.on_after_backward
    assert [hook.call_count for hook in hooks] == [20, 20, 20]
