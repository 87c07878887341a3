"""A series: how far the next lines of Python's sources are indented, by a recurrent network in a Lightning Trainer.

python recipes/examples/forecasting.py      (needs lightning)
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from graphplan import GraphPlanCallback

PAST, FUTURE = 48, 4


class Forecaster(LightningModule):
    """A GRU reads the past, and a linear layer says how the future differs from its last line."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.teller = nn.GRU(1, 32, batch_first=True), nn.Linear(32, FUTURE)

    def forward(self, past: Tensor) -> Tensor:
        """Forecasts ``[rows, FUTURE]`` of a past ``[rows, PAST]``."""
        states, _ = self.reader(past[..., None])
        return past[:, -1:] + self.teller(states[:, -1])

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        """The squared error of a batch."""
        return F.mse_loss(self(windows[:, :PAST]), windows[:, PAST:])

    def validation_step(self, windows: Tensor, batch_idx: int) -> None:
        """The squared error, and that of expecting more of the last line."""
        naive = F.mse_loss(windows[:, PAST - 1 : PAST].expand(-1, FUTURE), windows[:, PAST:])
        self.log_dict({"error": self.training_step(windows, batch_idx), "naive": naive})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    """Train, validate, report."""
    torch.manual_seed(0)
    lines = Path(argparse.__file__).read_text(encoding="utf-8").splitlines()
    series = torch.tensor([len(line) - len(line.lstrip()) for line in lines if line.strip()]) / 4
    training, validation = (part.unfold(0, PAST + FUTURE, 1) for part in series.tensor_split([len(series) * 4 // 5]))
    callback = GraphPlanCallback()
    trainer = Trainer(max_epochs=4, callbacks=[callback], logger=False, enable_checkpointing=False)
    trainer.fit(Forecaster(), DataLoader(training, 64, shuffle=True), DataLoader(validation, 64))
    print("levels, squared: " + ", ".join(f"{name} {value:.2f}" for name, value in trainer.callback_metrics.items()))
    print(callback.report())


if __name__ == "__main__":
    main()
