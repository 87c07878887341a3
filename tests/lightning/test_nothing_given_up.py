"""Fits that worked before the callback was added, and in which user code looks at what Lightning or torch hand out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from graphplan import HostSyncError
from tests.crossing import by_key, each
from tests.facts import assert_same, flatten
from tests.lightning.failing import keeping
from tests.lightning.parts import LitDigits, Observer, assert_fit_equals_eager, assert_same_fits, fit, tape, with_step
from tests.lightning.rows_of_parts import Manual
from tests.twins import prepare_steps

FULL = 21


def _reading_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.log("loss", loss, on_step=True, on_epoch=True)
    self.seen.append(float(self.trainer.callback_metrics["loss"]))
    self.log("twice", loss * 2)
    return loss


def _counting_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    self.log("loss", loss, on_step=False, on_epoch=True)
    self.seen.append(sorted(self.trainer._results))
    return loss


def _reading_hook(self: Any) -> None:
    self.seen.append(dict(self.trainer.logged_metrics))


def _with_seen(kind: type[LitDigits]) -> LitDigits:
    module: Any = kind()
    module.seen = []
    return module


def _scaled_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """It computes with a learning rate: such a traced call is undone, and made once more."""
    loss = self.loss_of(batch)
    self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="sum")
    self.log("mean", loss, on_step=False, on_epoch=True)
    self.seen.append(float(self.trainer.callback_metrics["loss"]))
    return loss * (1.0 + self.trainer.optimizers[0].param_groups[0]["lr"])


READERS = {
    "in the step": with_step(_reading_step),
    "names alone": with_step(_counting_step),
    "in a hook": with_step(LitDigits.training_step, on_after_backward=_reading_hook),
}


@pytest.mark.filterwarnings("ignore:graphplan")
def test_an_undone_step_that_reads_what_it_logged(tmp_path: Path) -> None:
    """What the undone call logged is undone with it: each batch counts once in the epoch's sums."""
    make = partial(_with_seen, with_step(_scaled_step))
    expected = fit(make, tmp_path / "eager")
    found = fit(make, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)
    assert len(found.module.seen) == 30


@pytest.mark.filterwarnings("ignore:graphplan")
@pytest.mark.parametrize("name", READERS)
def test_a_step_that_reads_what_it_logged(name: str, tmp_path: Path) -> None:
    """It finds this batch's values, though logging is put off to the step's end; a replay could not: refused."""
    make = partial(_with_seen, READERS[name])
    with pytest.raises(HostSyncError, match=r"reads logged metrics at .*test_nothing_given_up\.py.*on_train_batch_end"):
        fit(make, tmp_path / "raise", tape())
    expected = fit(make, tmp_path / "eager")
    found = fit(make, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)
    assert_same(flatten(seen=expected.module.seen), flatten(seen=found.module.seen))
    assert len(found.module.seen) == 30
    assert "graphplan removed itself: the rest of the fit ran without it" in found.callback.report()


def _not_a_number(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.log("unknown", float("nan"), on_step=True, on_epoch=True)
    return self.loss_of(batch)


def test_a_number_that_is_nan_is_logged(tmp_path: Path) -> None:
    """Lightning makes a tensor of it in each step: the same one, though NaN does not equal itself."""
    assert_fit_equals_eager(with_step(_not_a_number), tmp_path, replayed=FULL)


def test_an_overridden_optimizer_step_gets_lightnings_closure(tmp_path: Path) -> None:
    """What the hook is handed is of Lightning's own type, whatever calling it does."""

    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        assert isinstance(optimizer_closure, Closure)
        optimizer.step(closure=optimizer_closure)

    make = partial(with_step(LitDigits.training_step, optimizer_step=optimizer_step), schedule=None)
    assert_fit_equals_eager(make, tmp_path, replayed=FULL)


def _by_index(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    if batch_idx % 4 == 0:
        optimizer.zero_grad()


def _by_epoch(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    if epoch != 1:
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:graphplan")
@pytest.mark.parametrize("hook", [_by_index, _by_epoch])
def test_gradients_that_are_zeroed_for_some_batches(hook: Any, tmp_path: Path) -> None:
    """The numbers handed to ``optimizer_zero_grad`` are watched as those of ``training_step`` are."""
    make = partial(keeping, optimizer_zero_grad=hook)
    expected = fit(make, tmp_path / "eager")
    found = fit(make, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed
    assert not torch.equal(fit(keeping, tmp_path / "plain").module.net[0].weight, found.module.net[0].weight)


class _Groups(Callback):
    """Stores the optimizer's groups, as callbacks that add groups do for their checkpoints."""

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.groups += [
            {**group, "params": len(group["params"])} for opt in trainer.optimizers for group in opt.param_groups
        ]


def test_the_groups_of_an_optimizer_are_the_users_between_steps(tmp_path: Path) -> None:
    """Flags that replays need are set only while a step's Python runs."""
    seen = []
    for name, callbacks in (("eager", []), ("graphed", [tape()])):
        groups = _Groups()
        trainer = fit(partial(LitDigits, partial(AdamW, lr=3e-3)), tmp_path / name, *callbacks, more=[groups]).trainer
        assert trainer.global_step == 30
        seen.append(groups.groups)
    assert_same(flatten(groups=seen[0]), flatten(groups=seen[1]))


class _Sparse(LitDigits):
    """Has a table whose gradients are sparse, which no fused kernel takes."""

    def __init__(self, kind: Any, prepares: bool = False) -> None:
        super().__init__(partial(_prepared, kind) if prepares else kind, schedule=None)
        self.table = nn.Embedding(10, 10, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x) + self.table((x[:, 20] * 9).long()), y)


def _prepared(kind: Any, parameters: Any) -> Any:
    optimizer = kind(parameters)
    prepare_steps(optimizer)
    return optimizer


@pytest.mark.filterwarnings("ignore:graphplan")
@pytest.mark.parametrize("kind", [partial(SGD, lr=0.1), partial(SGD, lr=0.1, momentum=0.5)])
def test_sparse_gradients(kind: Any, tmp_path: Path) -> None:
    """An optimizer that is given sparse gradients keeps the kernel that takes them."""
    expected = fit(partial(_Sparse, kind), tmp_path / "eager")
    found = fit(partial(_Sparse, kind), tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)


def _scripted() -> LitDigits:
    module = LitDigits()
    module.net = torch.jit.script(module.net)
    return module


@pytest.mark.filterwarnings("ignore:graphplan", "ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part(tmp_path: Path) -> None:
    """A scripted module keeps its tensors in C++; they are the owners' all the same."""
    expected = fit(_scripted, tmp_path / "eager")
    found = fit(_scripted, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_sgd_in_half_precision_is_lightnings_own(precision: Any, tmp_path: Path) -> None:
    """The twin's optimizer is not prepared: torch's fused SGD for the CPU would leave most elements as they were."""
    make = partial(LitDigits, partial(SGD, lr=0.05, momentum=0.9), schedule=None)
    assert_fit_equals_eager(make, tmp_path, replayed=FULL, precision=precision)


class _Rewriting(Callback):
    """Does something to the outputs of each batch, which callbacks after it see."""

    def __init__(self, rewrite: Any) -> None:
        self.rewrite = rewrite

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rewrite(outputs, module, batch_idx)


def _write(outputs: Any, module: Any, batch_idx: int) -> None:
    outputs["loss"].add_(batch_idx)
    outputs["logits"].zero_()
    outputs["inner"]["all"][0].mul_(2)


def _extend(outputs: Any, module: Any, batch_idx: int) -> None:
    outputs["index"], outputs["inner"]["twice"] = batch_idx, outputs["loss"] * 2
    outputs["inner"]["all"].append(outputs.pop("logits"))


def _log_and_clear(outputs: Any, module: Any, batch_idx: int) -> None:
    module.log("after", outputs["loss"])
    module.log("sum", outputs["logits"].sum(), on_step=True, on_epoch=True)
    outputs.clear()


def _returning_much(self: Any, batch: Any, batch_idx: int) -> Any:
    loss, logits = self.loss_of(batch), self(batch[0]).detach()
    self.log("loss", loss, on_step=True, on_epoch=True)
    return {"loss": loss, "logits": logits, "inner": {"all": [logits.mean(0), loss.detach(), 3]}}


class _ManualMuch(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return _returning_much(self, batch, batch_idx)


@each(
    make=by_key({"automatic": with_step(_returning_much), "manual": _ManualMuch}),
    rewrite=[_write, _extend, _log_and_clear],
)
@pytest.mark.twice
def test_outputs_that_a_callback_rewrites(rewrite: Any, make: Any, tmp_path: Path) -> None:
    """In place, with new keys, or by taking some away: the next callback sees that, and no later batch does."""
    watchers = Observer(), Observer()
    expected = fit(make, tmp_path / "eager", more=[_Rewriting(rewrite), watchers[0]])
    found = fit(make, tmp_path / "graphed", tape(), more=[_Rewriting(rewrite), watchers[1]])
    assert_same_fits(expected, found)
    assert_same(flatten(batches=watchers[0].batches), flatten(batches=watchers[1].batches))
    assert found.callback.stats.replayed == FULL
