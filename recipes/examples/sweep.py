"""A search for hyper-parameters: Hydra's sweeper trains one run for each of them, in one process.

python recipes/examples/sweep.py      (needs hydra-core, scikit-learn)
python recipes/examples/sweep.py hydra.mode=RUN width=64      (one run)
"""

from dataclasses import dataclass, field
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import graph_step

TRIED = {"lr": "1e-3,1e-2", "width": "32,64"}


@dataclass
class Config:
    """A run's settings, and what the sweeper tries."""

    lr: float = 3e-3
    width: int = 32
    hydra: Any = field(default_factory=lambda: {"mode": "MULTIRUN", "sweeper": {"params": TRIED}})


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config: Any) -> float:
    """Train the digits; the loss of those that are held out, for sweepers that minimise it."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16.0).float().to(device), torch.tensor(digits.target).to(device)
    model = nn.Sequential(nn.Linear(64, config.width), nn.ReLU(), nn.Linear(config.width, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer})
    for _ in range(5):
        for rows in torch.randperm(1536, device=device).split(64):
            step(x[rows], y[rows])
    loss = F.cross_entropy(model(x[1536:]), y[1536:]).item()
    print(f"lr {config.lr}, width {config.width}: loss {loss:.3f}; {step.report().splitlines()[0]}")
    return loss


if __name__ == "__main__":
    ConfigStore.instance().store("config", Config)
    main()
