"""What a ``training_step`` may look like, return and log: the fit with the callback is the fit without it."""

from __future__ import annotations

import math
import random
import warnings
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torchmetrics.classification import MulticlassAUROC

from graphplan import HostScalarError, HostSyncError
from graphplan.tensors.symbolic import SymbolicNumber, answers_hold
from graphplan.trace import symbolic_numbers
from graphplan.trace.symbolic_numbers import SymbolicNumbers
from tests.lightning.parts import LitDigits, assert_fit_equals_eager, assert_same_fits, fit, tape, with_step

FULL = 21
"""Replays of three epochs: 27 full batches less the six before the first replay."""


class Ranked(LitDigits):
    """Logs a metric whose implementation makes a tensor with a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.ranked = MulticlassAUROC(10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.ranked(logits, y)
        self.log("ranked", self.ranked, on_step=True, on_epoch=True)
        return torch.nn.functional.cross_entropy(logits, y)


@pytest.mark.filterwarnings("ignore:No positive samples in targets:UserWarning")
def test_torchmetrics_that_read_values(tmp_path: Path) -> None:
    """``nonzero`` in a metric is refused by name; on request the fit is eager, metrics included."""
    with pytest.raises(HostSyncError, match="nonzero"):
        fit(Ranked, tmp_path / "raise", tape())
    expected = fit(Ranked, tmp_path / "eager")
    with pytest.warns(UserWarning, match="nonzero"):
        found = fit(Ranked, tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)


def scaled_by_index(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * (1 + batch_idx / 2)


def scaled_in_c(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * batch_idx


def scaled_by_quotient(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * (batch_idx // 5)


def setting_the_rate(self: Any, batch: Any, batch_idx: int) -> Tensor:
    rate = 1e-3 * 0.5 * (1 + math.cos(math.pi * self.global_step / 60))
    for group in self.optimizers().param_groups:
        group["lr"] = rate
    self.log("rate", rate)
    return self.loss_of(batch)


def test_a_step_that_sets_the_learning_rate(tmp_path: Path) -> None:
    """Replays compute it for the optimizer, for its group and for the log."""
    found = assert_fit_equals_eager(with_step(setting_the_rate), tmp_path, replayed=20, max_epochs=3)
    assert "forward and backward alone" not in found.callback.report()


def rolled_by_quotient(self: Any, batch: Any, batch_idx: int) -> Tensor:
    phase = batch_idx // 5
    return self.loss_of([part.roll(int(phase), 0) for part in batch]) if phase else self.loss_of(batch)


def returning_quotient(self: Any, batch: Any, batch_idx: int) -> Any:
    return {"loss": self.loss_of(batch), "phase": batch_idx // 5}


def branching_on_index(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    return loss.mul(2) if batch_idx % 2 else loss.add(1)


def branching_on_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    return loss.mul(2) if self.global_step % 2 else loss.add(1)


def divided_by_index(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * complex(batch_idx).real


def picking_by_index(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) + self.net[0].weight[batch_idx].sum()


def keeping_index(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.seen.append(batch_idx)
    return self.loss_of(batch)


def logging_numbers(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.log("step", self.global_step)
    self.log_dict({"epoch part": self.current_epoch / self.trainer.max_epochs, "index": batch_idx}, on_epoch=True)
    self.log("made", torch.tensor(self.global_step * 0.5))
    self.log("listed", torch.tensor([self.global_step], dtype=torch.float32))
    return self.loss_of(batch)


def logging_rates(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.counts["calls"] += 1
    self.log("rate", self.lr_schedulers().get_last_lr()[0])
    self.log("group's", self.trainer.optimizers[0].param_groups[0]["lr"])
    self.log("calls", self.counts["calls"])
    loss: Tensor = self.loss_of(batch) * (1 + self.counts["calls"] / 100)
    return loss


def annealed(self: Any, batch: Any, batch_idx: int) -> Tensor:
    share = min(1.0, self.global_step / 20)
    loss: Tensor = (1 - share) * self.loss_of(batch) + share * self.net[0].weight.square().mean()
    return loss


def on_a_cosine(self: Any, batch: Any, batch_idx: int) -> Tensor:
    share = 0.5 * (1 + math.cos(math.pi * self.global_step / 27))
    self.log("share", share)
    loss: Tensor = self.loss_of(batch) * (1 + share) * 0.99**self.global_step
    return loss


def mixed_up(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    share, order = np.random.beta(0.4, 0.4), torch.randperm(len(x)).to(self.device)
    logits = self(share * x + (1 - share) * x[order])
    self.log("share", share, on_epoch=True)
    cross_entropy = torch.nn.functional.cross_entropy
    return share * cross_entropy(logits, y) + (1 - share) * cross_entropy(logits, y[order])


def by_chance(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    return self.loss_of((x.flip(1) if random.random() < 0.5 else x, y))


def over_the_batch(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    count = (y > 2).sum().item()
    self.log("count", count)
    return torch.nn.functional.cross_entropy(self(x), y, reduction="sum") / max(count, 1)


FOLLOWED = [
    scaled_by_index, scaled_in_c, scaled_by_quotient, returning_quotient, keeping_index, logging_numbers, logging_rates,
    annealed, on_a_cosine, mixed_up, by_chance, over_the_batch,
]  # fmt: skip


@pytest.mark.parametrize("step", FOLLOWED, ids=lambda value: value.__name__)
@pytest.mark.parametrize("verify", ["geometric", "off"])
def test_numbers_that_steps_compute_with(step: Any, verify: str, tmp_path: Path) -> None:
    """Replays compute with the numbers of their own steps."""
    seen: dict[Path, list[int]] = {}

    def make() -> Any:
        module = with_step(step, seen=seen.setdefault(tmp_path / str(len(seen)), []))()
        module.counts = {"calls": 0}
        random.seed(0)
        np.random.seed(0)
        return module

    replayed = {annealed: 15, logging_rates: FULL - 3, by_chance: 17, over_the_batch: 20}.get(step, FULL)
    assert_fit_equals_eager(make, tmp_path, replayed=replayed, callback=tape(verify=verify))
    eager, graphed = seen.values()
    assert eager == graphed
    assert {*map(type, graphed)} <= {int}


class Normed(LitDigits):
    """Logs the norms of its gradients with Lightning's function for that."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


def test_norms_of_gradients(tmp_path: Path) -> None:
    """It makes a tensor of a list of norms, which is a stack of them in traces and captures."""
    assert_fit_equals_eager(Normed, tmp_path, replayed=FULL)


_INDEX = r"uses arguments\.batch_idx at test_training_step\.py:\d+.*on_train_batch_end.*eager_if=.*\.batch_idx'"


@pytest.mark.parametrize("step", [divided_by_index, picking_by_index], ids=lambda value: value.__name__)
def test_steps_that_depend_on_the_batch_index(step: Any, tmp_path: Path) -> None:
    """Where the value itself is needed: refused, or eager with the right numbers.

    Nothing is captured then: a program of the optimizer's step alone would have to follow each backward's gradients.
    """
    text = _INDEX
    with pytest.raises(HostScalarError, match=text):
        fit(with_step(step), tmp_path / "raise", tape())
    expected = fit(with_step(step), tmp_path / "eager")
    with pytest.warns(UserWarning, match=f"runs this step eagerly: .*{text}"):
        found = fit(with_step(step), tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)
    stats = found.callback.stats
    assert (stats.replayed, stats.captured) == (0, 0)
    assert "graphplan removed itself: the rest of the fit ran without it" in found.callback.report()


def asking_often(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    return loss.mul(2) if any(batch_idx == number for number in range(20)) else loss


def test_a_value_that_is_needed_after_a_question(tmp_path: Path) -> None:
    """Calls with the same value as one before have a program, others are eager."""
    found = assert_fit_equals_eager(with_step(rolled_by_quotient), tmp_path, replayed=10, max_epochs=3)
    assert "eager 3x: the step's code needs the value of arguments.batch_idx at" in found.callback.report()


@pytest.mark.parametrize("step", [branching_on_index, branching_on_step], ids=lambda step: step.__name__)
def test_numbers_that_are_only_compared(step: Any, tmp_path: Path) -> None:
    """``if batch_idx % 2`` and ``if self.global_step % 2`` have two outcomes: each has a program."""
    found = assert_fit_equals_eager(with_step(step), tmp_path, replayed=9, max_epochs=3)
    assert found.callback.stats.recaptured == 0


class Showing(LitDigits):
    """Notes the number of the step now and then, as others show a picture or print a line."""

    first = 3

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"every": 5})
        self.every, self.options, self.shown = 5, {"every": 5}, list[Any]()

    def is_due(self, batch_idx: int) -> bool:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        if self.is_due(batch_idx):
            self.shown.append(("step", self.global_step))
        return loss


class ByAttribute(Showing):
    def is_due(self, batch_idx: int) -> bool:
        return self.global_step > 0 and (self.global_step + 1) % self.every == 0


class ByClass(Showing):
    def is_due(self, batch_idx: int) -> bool:
        return not self.global_step % self.first


class ByHyperparameter(Showing):
    def is_due(self, batch_idx: int) -> bool:
        every: bool = self.global_step % self.hparams.every == 0
        return every


class ByProperty(Showing):
    """Not what lies in the attribute of almost this name."""

    def __init__(self) -> None:
        super().__init__()
        self._often = 5

    @property
    def often(self) -> int:
        return 2 * self._often

    def is_due(self, batch_idx: int) -> bool:
        return self.global_step % self.often == 0


class ByItem(Showing):
    def is_due(self, batch_idx: int) -> bool:
        return self.trainer.global_step % self.options["every"] == self.first


class ByTrainer(Showing):
    def is_due(self, batch_idx: int) -> bool:
        return self.global_step % self.trainer.num_training_batches == 4


class ByIndex(Showing):
    def is_due(self, batch_idx: int) -> bool:
        return batch_idx % self.every == 2


class AtTheEnd(Showing):
    def is_due(self, batch_idx: int) -> bool:
        return self.trainer.is_last_batch


class AfterBackward(LitDigits):
    """Asks for what no step comes to, in one line."""

    every, is_on, shown = -1, False, 0

    def on_after_backward(self) -> None:
        if self.every > 0 and self.global_step % self.every == 0 and self.is_on:
            self.shown = self.global_step


def test_the_number_of_the_step_now_and_then(tmp_path: Path) -> None:
    """Where a branch asks for it that most steps do not take, the others are replayed."""
    for kind, replayed in {
        ByAttribute: 30, ByClass: 20, ByHyperparameter: 30, ByItem: 30, ByTrainer: 30, ByIndex: 25,
        AtTheEnd: 25, AfterBackward: 35, ByProperty: 0,
    }.items():  # fmt: skip
        folder = tmp_path / kind.__name__
        expected = fit(kind, folder / "eager", max_epochs=6)
        with warnings.catch_warnings():
            # The few steps that take the branch are refused, and eager.
            warnings.filterwarnings("ignore", "graphplan runs", UserWarning)
            found = fit(kind, folder / "graphed", tape(on_failure="eager"), max_epochs=6)
        assert_same_fits(expected, found)
        assert found.callback.stats.replayed >= replayed, (kind, found.callback.report())


def test_too_many_ways(tmp_path: Path) -> None:
    """Each batch of an epoch takes another way through the step."""
    assert_fit_equals_eager(with_step(asking_often), tmp_path, replayed=9, max_epochs=5)


def summing_sometimes(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    if batch_idx % 3 == 1:
        self.total += loss.item()
        self.latest = loss.item()
    return loss


def _take_total(self: Any) -> None:
    self.log("total", self.total)
    self.total, self.latest = 0.0, -1.0


def test_attributes_that_only_some_batches_set(tmp_path: Path) -> None:
    """A program for other batches leaves the sum alone, and what the host has put in its place."""
    make = with_step(summing_sometimes, total=0.0, latest=0.0, on_train_epoch_end=_take_total)
    assert_fit_equals_eager(make, tmp_path, replayed=8, max_epochs=4, callback=tape(verify="off"))


def in_variable(index: int) -> bool:
    rest = index % 5
    return rest == 2


def test_questions_have_pythons_answers() -> None:
    """What is computed of an index and compared is asked again of any other."""
    functions: list[Any] = [
        lambda i: i % 4 == 0, lambda i: "rest" if (i + 1) % 4 else "", bool, lambda i: 7 - i > 2,
        lambda i: i // 3 <= 1.5, lambda i: i * 3 - 5 < 20, lambda i: i == 2, lambda i: i % 3 in (0,), in_variable,
        lambda i: abs(i - 5) > 2, lambda i: i != 4.0, lambda i: (i + 0.5) * 2 >= i / 2 + 9, lambda i: i == True,  # noqa: E712
    ]  # fmt: skip
    for function in functions:
        lent = SymbolicNumbers()
        assert function(SymbolicNumber(lent, 3, "n")) is function(3)
        ((question, answer),) = lent.asked.items()
        assert answer is bool(function(3)) and question.paths.count("n") == len(question.paths)
        answers = [question.answer({"n": number}) for number in range(12)]
        assert answers == [bool(function(number)) for number in range(12)]
        assert not lent.used
    uses: list[Any] = [
        lambda i: i == "a", lambda i: f"{i}", int, lambda i: ~i, hash,
        lambda i: torch.ones(2).pow(i * 2), lambda i: float(i + 2), lambda i: [1, 2, 3, 4][i],
        lambda i: torch.ones(2, dtype=torch.bfloat16) * i, lambda i: {3: 1}[i], range, lambda i: divmod(i, 2),
    ]  # fmt: skip
    for use in uses:
        lent = SymbolicNumbers()
        assert str(use(SymbolicNumber(lent, 3, "n"))) == str(use(3))
        assert list(lent.used) == ["n"]


def test_values_of_which_there_are_few_are_asked_about() -> None:
    """A replay is good for every number of which the same comes."""
    uses: list[tuple[Any, list[int]]] = [
        (lambda i: [1, 2, 3, 4][i % 4], [3, 7, 11]), (lambda i: float(i // 3), [3, 4, 5]),
        (lambda i: range(round(i / 2)), [3, 4, 5]), (lambda i: f"{(i >> 1) + 1}", [2, 3]),
        (lambda i: hash(i & 6), [2, 3, 10, 11]), (lambda i: torch.ones(2).pow(round(i / 4)), [3, 4, 5]),
    ]  # fmt: skip
    for use, alike in uses:
        lent = SymbolicNumbers()
        assert str(use(SymbolicNumber(lent, 3, "n"))) == str(use(3))
        assert not lent.used and all("n at " in text for text in lent.needed.values())
        assert [number for number in range(12) if answers_hold(lent.asked, {"n": number})] == alike


def test_no_stand_in_waits_for_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What shows the Trainer's numbers is a class of its own, which only the collector frees."""
    collected: list[int] = []
    monkeypatch.setattr(symbolic_numbers, "gc", SimpleNamespace(collect=collected.append))
    callback = tape(verify="off")
    fit(with_step(lambda self, batch, batch_idx: self.loss_of(batch) * (1 + self.current_epoch)), tmp_path, callback)
    assert callback.stats.traced and callback.stats.replayed and not collected


LOGGED: dict[str, Any] = {
    "exp": lambda self, loss: self.log("perplexity", math.exp(loss.item()), on_step=True, on_epoch=True),
    "round": lambda self, loss: self.log("rounded", round(loss.item(), 3), prog_bar=True),
    "several": lambda self, loss: self.log_dict({"root": math.sqrt(loss.item()), "share": loss.item() // 0.1}),
    "largest": lambda self, loss: self.log("above", math.ceil(loss.item() * 3), reduce_fx="max", on_epoch=True),
    "quotient": lambda self, loss: self.log("share", loss.item() / (loss * 2).item()),
    "now and then": lambda self, loss: self.log("p", math.exp(loss.item()) if self.current_epoch else 0.5),
}


@pytest.mark.parametrize("log", LOGGED.values(), ids=LOGGED)
def test_numbers_that_only_the_host_computes_are_logged(log: Any, tmp_path: Path) -> None:
    """Beside others, which are summed in the step."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        log(self, loss)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    found = assert_fit_equals_eager(with_step(training_step), tmp_path, replayed=10)
    assert found.callback.stats.verified


def test_the_index_is_an_int_in_messages(tmp_path: Path) -> None:
    """The stand-in for ``batch_idx`` says nothing of its class in Python's own errors."""
    with pytest.raises(AttributeError, match="'int' object has no attribute 'item'"):
        fit(with_step(lambda self, batch, batch_idx: batch_idx.item()), tmp_path / "wrong", tape())


class Keeping(LitDigits):
    """Keeps the latest outputs of an epoch, for its end."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: deque[Tensor] = deque(maxlen=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("latest", torch.stack(tuple(self.outputs)).mean())
        self.outputs.clear()


def test_outputs_in_a_deque(tmp_path: Path) -> None:
    """Each replay appends to it, and the epoch's end finds the latest four."""
    assert_fit_equals_eager(Keeping, tmp_path, replayed=FULL)


def scaled_by_epoch(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * (1 + self.current_epoch)


def late_branch(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    return loss * 2 if self.trainer.global_step >= 15 else loss


@pytest.mark.filterwarnings("ignore:graphplan")
@pytest.mark.parametrize("step", [scaled_by_epoch, late_branch], ids=lambda step: step.__name__)
def test_numbers_that_change_long_after_the_capture(step: Any, tmp_path: Path) -> None:
    """What both traces read alike and a later step reads differently is watched: never silently wrong."""
    expected = fit(with_step(step), tmp_path / "eager")
    found = fit(with_step(step), tmp_path / "graphed", tape(on_failure="eager"))
    assert_same_fits(expected, found)


def test_eager_if(tmp_path: Path) -> None:
    """Batches that are meant to run Python do: every fifth, or those a predicate picks."""
    seen: list[int] = []

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch)

    def predicate(batch: Any, batch_idx: int) -> bool:
        seen.append(batch_idx)
        return batch_idx % 5 == 0

    by_number = assert_fit_equals_eager(with_step(step), tmp_path / "n", replayed=12, callback=tape(eager_if=5))
    by_choice = partial(assert_fit_equals_eager, with_step(step), tmp_path / "p", replayed=12)
    assert by_choice(callback=tape(eager_if=predicate)).callback.stats.replayed <= 21
    assert set(seen) == set(range(10))
    assert by_number.callback.stats.replayed <= 21
