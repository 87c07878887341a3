"""A table: measurements of tumours, some of them missing, in a plain PyTorch loop with one line more.

python recipes/examples/tabular.py      (needs scikit-learn)
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import graph_step


class Table(nn.Module):
    """Missing numbers are learnt values, and each feature is told by a second input whether it was missing."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.missing = nn.Parameter(torch.zeros(features))
        self.layers = nn.Sequential(
            nn.Linear(2 * features, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the two classes, ``[rows, 2]``, of features ``[rows, features]``."""
        absent = x.isnan()
        # torch.where has a fixed shape; x[absent] = ... would need to know on the host how many there are.
        filled = torch.where(absent, self.missing, x.nan_to_num())
        return self.layers(torch.cat([filled, absent.to(x.dtype)], 1))


def main() -> None:
    """Train, validate, report."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table, target = load_breast_cancer(return_X_y=True)
    x, y = torch.tensor(table).float().to(device), torch.tensor(target).to(device)
    x = ((x - x.mean(0)) / x.std(0)).masked_fill(torch.rand_like(x) < 0.1, torch.nan)
    training, validation = torch.randperm(len(x), device=device).split([448, len(x) - 448])
    model = Table(x.shape[1]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer})
    for _ in range(40):
        for rows in training[torch.randperm(len(training), device=device)].split(64):
            step(x[rows], y[rows])
    model.eval()
    print(f"accuracy: {(model(x[validation]).argmax(-1) == y[validation]).float().mean():.3f}")
    print(step.report())


if __name__ == "__main__":
    main()
