"""A steady loop asks nobody twice: no walk over the owners between replays, whatever schedules the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from graphplan import GraphPlanCallback, graph_step
from graphplan.owners import walk as walking
from tests.crossing import each
from tests.twins import BEFORE_REPLAY

STEPS = 40
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.99),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 3),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [5, 20]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, total_iters=STEPS),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.99),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, STEPS),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, STEPS),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 7),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 1e-4, 1e-2, cycle_momentum=False),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], [8]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(opt), lr_scheduler.ExponentialLR(opt, 0.9)], optimizer=opt
    ),
    "SWALR": lambda opt: SWALR(opt, 1e-4),
}


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each walk over owners."""
    found: list[int] = []
    start = walking._Walker.__init__

    def counted(self: Any, owners: Any) -> None:
        found.append(1)
        start(self, owners)

    monkeypatch.setattr(walking._Walker, "__init__", counted)
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in")
def test_a_plain_loop_with_a_scheduler(name: str, walks: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = SCHEDULERS[name](optimizer)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step = graph_step(train_step, owners=owners, backend="tape", verify="off")
    for number in range(BEFORE_REPLAY + STEPS):
        if number == BEFORE_REPLAY + 1:
            walks.clear()
        step(torch.randn(8, 4))
        scheduler.step()
    assert step.stats.replayed == STEPS
    assert not walks


@each(name=SCHEDULERS, parts=["auto", ("forward_backward",)])
@pytest.mark.filterwarnings("ignore:The epoch parameter in")
def test_a_trainer_with_a_scheduler(name: str, parts: Any, walks: list[int], tmp_path: Path) -> None:
    """The whole step, and either part of it: an eager backward pass makes new gradients for each replay."""
    from lightning.pytorch import LightningModule, Trainer

    class Small(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            loss = self.net(x).square().mean()
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), fused=True)
            return [optimizer], [{"scheduler": SCHEDULERS[name](optimizer), "interval": "step"}]

        def on_train_batch_end(self, *args: Any) -> None:
            if self.trainer.global_step == BEFORE_REPLAY + 1:
                walks.clear()

    callback = GraphPlanCallback(verify="off", components=parts)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, logger=False, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Small(), torch.utils.data.DataLoader(torch.randn(BEFORE_REPLAY + STEPS, 8, 4), batch_size=None))
    assert callback.stats.replayed == STEPS, callback.report()
    # The end of a fit looks at nothing either.
    assert not walks


def test_a_tensor_that_the_host_binds_anew_is_copied_in_without_a_walk(walks: list[int]) -> None:
    model = nn.Linear(4, 1)
    model.scale = torch.ones(())

    def loss(x: Tensor) -> Tensor:
        return (model(x) * model.scale).sum()

    step = graph_step(loss, owners={"model": model}, mode="inference", backend="tape", verify="off")
    x = torch.randn(8, 4)
    for number in range(BEFORE_REPLAY + STEPS):
        if number == BEFORE_REPLAY + 1:
            walks.clear()
        model.scale = torch.full((), float(number))
        assert torch.equal(step(x), loss(x))
    assert step.stats.replayed == STEPS
    assert not walks
