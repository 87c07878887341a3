"""Numbers read from tensors that a step only writes to items of nested containers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import HostScalarError
from tests.twins import Rig, assert_equals_eager, assert_refused, assert_same_as_eager


def inner(metrics: Any) -> Any:
    return metrics["train"]


class Training:
    """Counts tokens and keeps metrics by mode, as trainers for language models do."""

    def __init__(self, use: Callable[[Any, Tensor, float], Any]) -> None:
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.metrics = {"train": defaultdict(list), "eval": {}}
        self.last: dict[str, dict[str, float]] = {"train": {"n": 1.0, "m": 1.0}}
        self.total, self.use = 0, use

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.total += y.sum().item()
        return self.use(self, loss.detach(), y.sum().item())


def make(use: Callable[[Any, Tensor, float], Any], clears: int = 0) -> Rig:
    training = Training(use)
    calls = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(20)]

    def after(index: int) -> None:
        if clears and index % clears == clears - 1:
            training.metrics["train"].clear()

    owners = {"model": training.model, "optimizer": training.optimizer}
    found = {"metrics": training.metrics, "last": training.last}
    return Rig(training.step, owners, calls, after=after, extra=found)


def sets(training: Any, loss: Tensor, n: float) -> Tensor:
    training.last["train"]["n"] = loss.item()
    return loss


def sets_by_mode(training: Any, loss: Tensor, n: float) -> Tensor:
    mode = "train" if training.model.training else "eval"
    training.metrics[mode]["loss"].append(loss.item())
    training.metrics[mode]["tokens"] = [training.total]
    return loss


def sets_besides(training: Any, loss: Tensor, n: float) -> Tensor:
    training.last["train"]["n"] = loss.item()
    return loss if "n" in training.last["train"] else loss * training.last["train"]["m"]


def sets_what_an_attribute_is_called(training: Any, loss: Tensor, n: float) -> Tensor:
    out = SimpleNamespace(loss=loss)
    training.metrics["train"]["loss"].append(out.loss.item())
    return loss * 1 if out.loss is loss else loss


@pytest.mark.parametrize("use", [sets, sets_by_mode, sets_besides, sets_what_an_attribute_is_called])
def test_what_is_only_written_is_replayed(use: Any) -> None:
    step = assert_equals_eager(partial(make, use), replayed=14)
    assert not step.stats.reasons


def test_containers_that_are_cleared_now_and_then() -> None:
    """The step after that is eager."""
    stats = assert_same_as_eager(partial(make, sets_by_mode, clears=10)).stats
    assert (stats.captured, stats.replayed) == (1, 13), stats.reasons


def adds(training: Any, loss: Tensor, n: float) -> Tensor:
    training.last["train"]["n"] *= n
    return loss


def reads(training: Any, loss: Tensor, n: float) -> Tensor:
    loss = loss * 2 if training.last["train"]["n"] > 9 else loss
    training.last["train"]["n"] = n
    return loss


def reads_by_variable(training: Any, loss: Tensor, n: float) -> Tensor:
    key = "n" if n >= 0 else "m"
    loss = loss * 2 if training.last["train"][key] > 9 else loss
    training.last["train"]["n"] = n
    return loss


def reads_all(training: Any, loss: Tensor, n: float) -> Tensor:
    loss = loss * 2 if sum(training.last["train"].values()) > 10 else loss
    training.last["train"]["n"] = n
    return loss


def reads_elsewhere(training: Any, loss: Tensor, n: float) -> Tensor:
    loss = loss * 2 if inner(training.last)["n"] > 9 else loss
    training.last["train"]["n"] = n
    return loss


def reads_by_name(training: Any, loss: Tensor, n: float) -> Tensor:
    loss = loss * 2 if getattr(training, "la" + "st")["train"]["n"] > 9 else loss
    training.last["train"]["n"] = n
    return loss


@pytest.mark.parametrize(
    ("use", "done"),
    [(adds, 4), (reads, 4), (reads_by_variable, 5), (reads_all, 4), (reads_elsewhere, 4), (reads_by_name, 4)],
)
def test_what_is_read_is_refused(use: Any, done: int) -> None:
    text = r"the step's code reads self\.last\.train\.n, which it also"
    assert_refused(partial(make, use), HostScalarError, text, done=done)
