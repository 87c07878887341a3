"""``eval=True``: validation, test and prediction steps are replayed, in a fit and alone, with the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from graphplan import GraphPlanCallback, HostSyncError, RefusalError, UncoveredRoleError
from tests.crossing import each
from tests.facts import assert_same, flatten
from tests.lightning.parts import (
    LitDigits,
    assert_same_fits,
    digits,
    fit,
    ignore_lightning_warnings,
    tape,
    trainer_of,
)
from tests.lightning.test_other_optimizers import Halves
from tests.twins import by_chance, keep


class Evaluated(LitDigits):
    """Logs losses and a metric object in validation and test, and predicts classes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.accuracy = MulticlassAccuracy(10, average="micro", validate_args=False)

    def evaluate(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log(f"{name}_loss", F.cross_entropy(logits, y), on_step=True, on_epoch=True)
        self.log(f"{name}_acc", self.accuracy)
        return logits

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self.evaluate(batch, "val")}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, f"test{dataloader_idx}")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)


SILENT: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Outputs(Callback):
    """Keeps what evaluation steps hand to callbacks."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.kept.append(keep([outputs, dict(trainer.callback_metrics), module.training]))

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.kept.append(keep(outputs))


def loader(size: int = 20) -> DataLoader[Any]:
    return DataLoader(digits()[0], size)


def quiet(run: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        ignore_lightning_warnings()
        for text in ("recommended to use `self.log", "You are using the `dataloader_iter`", "Found `dataloader_iter`"):
            warnings.filterwarnings("ignore", message=f".*{text}.*")
        return run()


@pytest.mark.parametrize("make", [LitDigits, Evaluated])
@pytest.mark.twice
def test_validation_in_a_fit(make: type[LitDigits], tmp_path: Path) -> None:
    """One program for all epochs: the weights that training updates in place are its own."""
    batch = 10
    options: dict[str, Any] = {"num_sanity_val_steps": 0, "max_epochs": 4, "val_check_interval": 0.5}
    loaders = lambda: (DataLoader(digits()[0], 30), DataLoader(digits()[1], batch))  # noqa: E731

    def run(callback: GraphPlanCallback | None, folder: Path) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module, seen = make(), Outputs()
        trainer = trainer_of(folder, [seen, *([callback] if callback else [])], **options)
        quiet(lambda: trainer.fit(module, *loaders()))
        return flatten(module=module, seen=seen.kept, logged=dict(trainer.logged_metrics)), trainer

    expected, _ = run(None, tmp_path / "eager")
    callback = tape(eval=True)
    found, _ = run(callback, tmp_path / "graphed")
    assert_same(expected, found)
    stats = callback.eval_stats
    assert stats.calls == 4 * 2 * 10
    assert (stats.captured, stats.recaptured) == (1, 0), callback.report()
    assert stats.replayed == 80 - 6, callback.report()
    assert callback.stats.replayed >= 40 - 7
    assert "evaluation:" in callback.report()


class Trains(Callback):
    """Brings hooks into the fit that no evaluation calls, and a validation step if it ``replaces`` that."""

    def __init__(self, *, replaces: bool) -> None:
        self._replaces = replaces

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 2:
            trainer.callbacks.append(Halves())
        if trainer.current_epoch == 2 and self._replaces:
            plain = module.validation_step
            module.validation_step = lambda batch, batch_idx: plain((batch[0] * 2, batch[1]), batch_idx)


@pytest.mark.parametrize("replaces", [False, True])
def test_hooks_and_a_validation_step_that_come(replaces: bool, tmp_path: Path) -> None:
    expected = fit(Evaluated, tmp_path / "eager", max_epochs=4, more=[Trains(replaces=replaces)])
    callback = tape(eval=True, verify="off", warmup_steps=1, on_failure="eager")
    with pytest.warns(UserWarning, match="graphplan leaves the rest of the run to Lightning") as told:
        found = fit(Evaluated, tmp_path / "graphed", callback, max_epochs=4, more=[Trains(replaces=replaces)])
    assert_same_fits(expected, found)
    assert len([each for each in told if "graphplan leaves" in str(each.message)]) == 1 + replaces
    assert replaces or callback.eval_stats.replayed >= 4


def test_a_fit_with_everything_else_is_the_same(tmp_path: Path) -> None:
    expected = fit(Evaluated, tmp_path / "eager", max_epochs=4)
    found = fit(Evaluated, tmp_path / "graphed", tape(eval=True, warmup_steps=1), max_epochs=4)
    assert_same_fits(expected, found)
    assert found.callback.eval_stats.replayed >= 4, found.callback.report()


@each(inference_mode=[True, False], what=["validate", "test", "predict"])
@pytest.mark.twice
def test_evaluation_on_its_own(what: str, inference_mode: bool, tmp_path: Path) -> None:
    def run(callback: GraphPlanCallback | None, folder: Path) -> Any:
        torch.manual_seed(0)
        module, seen = Evaluated(), Outputs()
        callbacks = [seen, *([callback] if callback else [])]
        trainer = trainer_of(folder, callbacks, inference_mode=inference_mode)
        results = quiet(lambda: getattr(trainer, what)(module, loader()))
        again = quiet(lambda: getattr(trainer, what)(module, loader()))
        return flatten(results=results, again=again, seen=seen.kept, metrics=dict(trainer.callback_metrics))

    callback = tape(eval=True)
    assert_same(run(None, tmp_path / "eager"), run(callback, tmp_path / "graphed"))
    assert callback.eval_stats.replayed == 15 - 6, callback.report()
    assert callback.stats.calls == 0


def test_two_loaders_have_a_program_each(tmp_path: Path) -> None:
    def run(callback: GraphPlanCallback | None, folder: Path) -> Any:
        torch.manual_seed(0)
        trainer = trainer_of(folder, [callback] if callback else [])
        module = Evaluated()
        return flatten(results=quiet(lambda: trainer.test(module, [loader(20), loader(20)])))

    callback = tape(eval=True)
    assert_same(run(None, tmp_path / "eager"), run(callback, tmp_path / "graphed"))
    assert (callback.eval_stats.traced, callback.eval_stats.captured) == (2, 2)
    assert callback.eval_stats.replayed == 2 * (15 - 5), callback.report()


class TwoLoaders(Evaluated):
    """Has one metric for two loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, "val")


def test_a_metric_of_two_loaders_is_not_captured_in_each_run(tmp_path: Path) -> None:
    """Lightning computes it for one loader after it was reset for the other: one step of each run finds it computed."""

    def run(callback: GraphPlanCallback | None, folder: Path) -> Any:
        torch.manual_seed(0)
        options: dict[str, Any] = {"max_epochs": 6, "enable_checkpointing": False, "logger": False, **SILENT}
        trainer = L.Trainer(callbacks=[callback] if callback else [], default_root_dir=folder, **options)
        quiet(lambda: trainer.fit(TwoLoaders(), loader(60), [loader(20), loader(60)]))
        return flatten(metrics=dict(trainer.callback_metrics))

    callback = tape(eval=True)
    assert_same(run(None, tmp_path / "eager"), run(callback, tmp_path / "graphed"))
    assert callback.eval_stats.recaptured == 0, callback.report()
    assert "eager for one step: model.accuracy._computed was None and is a Tensor" in callback.report()


class Writer(BasePredictionWriter):
    """Keeps predictions as a writer to files would."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
        self.written.append(keep(prediction))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.written.append(keep(predictions))


@pytest.mark.twice
def test_prediction_writers(tmp_path: Path) -> None:
    def run(callback: GraphPlanCallback | None, folder: Path) -> Any:
        torch.manual_seed(0)
        writer = Writer()
        trainer = trainer_of(folder, [writer, *([callback] if callback else [])])
        quiet(lambda: trainer.predict(Evaluated(), loader()))
        return flatten(written=writer.written)

    callback = tape(eval=True)
    assert_same(run(None, tmp_path / "eager"), run(callback, tmp_path / "graphed"))
    assert callback.eval_stats.replayed == 9


class FromTheLoader(Evaluated):
    """Takes batches from the loader itself."""

    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        self.log("val_loss", self.loss_of(batch), batch_size=20)


def test_steps_that_take_the_loader_stay_lightnings(tmp_path: Path) -> None:
    callback = tape(eval=True)
    results = []
    for extra in ([], [callback]):
        torch.manual_seed(0)
        trainer = trainer_of(tmp_path, list(extra))
        module = FromTheLoader()
        results.append(quiet(lambda: trainer.validate(module, loader())))  # noqa: B023
    assert results[0] == results[1]
    assert callback.eval_stats.calls == 0


class Reading(Evaluated):
    """Reads its loss on the host."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", complex(by_chance(self.loss_of(batch))).real)


def test_a_step_that_cannot_be_captured_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [tape(eval=True)])
    with pytest.raises(HostSyncError, match=r"complex\(by_chance\(self\.loss_of\(batch\)\)\)\.real"):
        quiet(lambda: trainer.validate(Reading(), loader()))


def test_a_step_that_cannot_be_captured_runs_eagerly_where_that_is_allowed(tmp_path: Path) -> None:
    expected = trainer_of(tmp_path, [])
    callback = tape(eval=True, on_failure="eager")
    found = trainer_of(tmp_path, [callback])
    torch.manual_seed(0)
    module = Reading()
    with pytest.warns(UserWarning, match="graphplan runs this step eagerly"):
        result = found.validate(module, loader())
    assert quiet(lambda: expected.validate(module, loader())) == result
    assert callback.eval_stats.replayed == 0


def test_a_policy_without_state_refuses_metrics(tmp_path: Path) -> None:
    policies = {"inference": {"static_roles": ["input", "param"], "copy_roles": ["input"]}}
    trainer = trainer_of(tmp_path, [tape(eval=True, policies=policies)])
    with pytest.raises(UncoveredRoleError, match="accuracy"):
        quiet(lambda: trainer.validate(Evaluated(), loader()))


def test_weights_may_be_copied_in(tmp_path: Path) -> None:
    policies = {"inference": {"static_roles": ["input", "param", "state"], "copy_roles": ["input", "param"]}}
    callback = tape(eval=True, policies=policies)
    results = []
    for extra in ([], [callback]):
        torch.manual_seed(0)
        module = Evaluated()
        trainer = trainer_of(tmp_path, list(extra))
        results.append(quiet(lambda: trainer.validate(module, loader())))  # noqa: B023
    assert results[0] == results[1]
    assert (callback.eval_stats.traced, callback.eval_stats.replayed) == (1, 10)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [tape(eval=True)])
    module = Evaluated()
    for what in ("validate", "predict"):
        quiet(lambda: getattr(trainer, what)(module, loader()))  # noqa: B023
        assert not {"validation_step", "test_step", "predict_step"} & set(vars(trainer.strategy))


def test_evaluation_is_left_alone_by_default(tmp_path: Path) -> None:
    callback = tape()
    trainer = trainer_of(tmp_path, [callback])
    quiet(lambda: trainer.validate(Reading(), loader()))
    assert callback.eval_stats.calls == 0
    assert issubclass(HostSyncError, RefusalError)
    assert isinstance(trainer, L.Trainer)


class Keeping(Evaluated):
    """Keeps what its steps return until the end of the epoch, as Lightning's guide to hooks has it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(self.evaluate(batch, "val"))
        return self.kept[-1]

    def on_validation_epoch_end(self) -> None:
        self.log("largest", torch.cat(self.kept).max())
        self.kept.clear()


def test_outputs_that_are_kept_for_the_end_of_the_epoch(tmp_path: Path) -> None:
    """Hooks get the batch's own output, though it lay elsewhere in the list when the step was traced."""
    seen = [Outputs(), Outputs()]
    callback = tape(eval=True, warmup_steps=1, verify="off")
    expected = fit(Keeping, tmp_path / "eager", more=[seen[0]], max_epochs=5)
    found = fit(Keeping, tmp_path / "graphed", callback, more=[seen[1]], max_epochs=5)
    assert_same_fits(expected, found)
    assert_same(flatten(kept=seen[0].kept), flatten(kept=seen[1].kept))
    assert callback.eval_stats.replayed > 0
