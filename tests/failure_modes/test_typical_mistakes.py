"""Mistakes that newcomers make: each is told with its culprit and the next move, in a few lines."""

from __future__ import annotations

import random
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from graphplan import GraphPlanCallback, graph_step, graphed
from graphplan.environment.origin import is_ours

LINES, COLUMNS = 12, 120
Body = Callable[[nn.Module, Tensor], Tensor]


def train(body: Body, make: Callable[[Any], Any] = torch.optim.SGD, calls: int = 8, **options: Any) -> None:
    """A plain loop whose loss is ``body``'s."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = make(model.parameters())

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = body(model, x)
        loss.backward()
        optimizer.step()
        return loss

    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer}, **options)
    for number in range(calls):
        step(torch.randn(5 + number % 3 if "shapes" in options else 8, 4))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A loss."""
    return F.mse_loss(model(x), x.sum(1, keepdim=True))


def branches_on_a_value() -> None:
    train(lambda model, x: loss_of(model, x) * (2 if complex(loss_of(model, x).detach()).real > 3 else 1))


def selects_rows_by_a_mask() -> None:
    train(lambda model, x: loss_of(model, x[model(x)[:, 0] > 0]))


def keeps_numbers_of_losses() -> None:
    losses: list[float] = []

    def body(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        losses.append(int(loss.detach()))
        return loss

    train(body)


def goes_to_numpy() -> None:
    train(lambda model, x: loss_of(model, x) * float(x.numpy().mean()))


def chooses_with_python() -> None:
    train(lambda model, x: loss_of(model, x) * random.choice(range(1, 10**6)))


def seeds_in_the_step() -> None:
    def body(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return loss_of(model, x + torch.rand(4))

    train(body)


def schedules_in_the_step() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def train_step(x: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        scheduler.step()

    step = graph_step(train_step)
    for _ in range(8):
        step(torch.randn(8, 4))


def steps_on_the_host() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters())

    def train_step(x: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]

    step = graph_step(train_step)
    for _ in range(8):
        step(torch.randn(8, 4))


def takes_batches_in_the_step() -> None:
    batches = iter([torch.randn(8, 4) for _ in range(20)])
    train(lambda model, x: loss_of(model, next(batches)))


def goes_two_ways() -> None:
    calls: list[None] = []

    def body(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(None)
        return loss_of(model, x) / 2 if len(calls) % 2 else loss_of(model, x)

    train(body)


def pads_without_a_mask() -> None:
    train(loss_of, calls=20, shapes="bucket", buckets=[8])


def asks_for_a_device_that_is_not_there() -> None:
    train(loss_of, backend="cudagraph")


def misspells_an_option() -> None:
    train(loss_of, warmup=3)


def passes_a_module_for_owners() -> None:
    graph_step(loss_of, owners=nn.Linear(4, 1))  # type: ignore[arg-type]


class Module(pl.LightningModule):
    """A regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.layer, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LogsANumber(Module):
    """Turns its loss into a number."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", int(loss.detach()))
        return loss


def fit(module: pl.LightningModule, *callbacks: GraphPlanCallback) -> None:
    """Two epochs of ten batches."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(80, 4), batch_size=8))


def logs_a_number_in_a_trainer() -> None:
    fit(LogsANumber(), GraphPlanCallback())


def gives_a_trainer_two_callbacks() -> None:
    fit(Module(), GraphPlanCallback(), GraphPlanCallback(eval=True))


HERE = Path(__file__).name
MISTAKES: dict[Callable[[], None], tuple[str, str]] = {
    branches_on_a_value: (f"at {HERE}:", "torch.where"),
    selects_rows_by_a_mask: ("x[model(x)[:, 0] > 0]", "a mask of fixed shape"),
    keeps_numbers_of_losses: ("`losses.append(int(loss.detach()))`", "read it after the step"),
    goes_to_numpy: ("Tensor.numpy reads", "Keep the values in a tensor"),
    chooses_with_python: ("random.choice(", "pass it as an argument of the step"),
    seeds_in_the_step: ("manual_seed", "Seed outside the step"),
    schedules_in_the_step: ("`scheduler.step()`", "Call scheduler.step() after the step"),
    steps_on_the_host: ("LBFGS cannot be captured", "use Adam or SGD"),
    takes_batches_in_the_step: (
        "takes the next item of batches",
        "take the item before the step and pass it as an argument",
    ),
    goes_two_ways: ("return loss_of(model, x) / 2 if len(calls) % 2", "make a graph_step for each path"),
    pads_without_a_mask: ("changes the outcome of the step", "mask the padding"),
    asks_for_a_device_that_is_not_there: ("needs tensors on a CUDA device, found cpu", "pass backend='tape' or 'auto'"),
    misspells_an_option: ("graph_step has no option 'warmup'", "did you mean warmup_steps?"),
    passes_a_module_for_owners: ("owners is a Linear", "expected a mapping from name to object"),
    logs_a_number_in_a_trainer: ('`self.log("loss", int(loss.detach()))`', "Keep the value on the device"),
    gives_a_trainer_two_callbacks: ("callbacks[0] and callbacks[1]", "Leave out the others"),
}  # fmt: skip


def shown(error: Exception) -> list[str]:
    """What a terminal shows of an error below the user's own frames, and those of Lightning and torch."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_ours(frame.filename)]
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    return [part for line in "".join(lines).splitlines() for part in textwrap.wrap(line, COLUMNS)]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.filterwarnings("ignore:graphplan runs")
def test_a_mistake_is_told(mistake: Callable[[], None]) -> None:
    """With the culprit before the next move, as an error of the user's."""
    culprit, move = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        mistake()
    text = str(caught.value)
    assert culprit in text
    assert move in text[text.index(culprit) :].replace("Feed", "feed")
    lines = shown(caught.value)
    assert len(lines) <= LINES, "\n".join(lines)


def test_inference_with_gradients_is_told_in_the_report() -> None:
    """Nothing is wrong with it, so that nothing is raised."""
    fast = graphed(nn.Linear(4, 1))
    for _ in range(4):
        fast(torch.randn(2, 4))
    assert "4x: the call needs gradients: call it under torch.no_grad() or torch.inference_mode()" in fast.report()
    assert len(fast.report().splitlines()) <= LINES
