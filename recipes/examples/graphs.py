"""A graph: who joins which side when a club splits, by a network of torch-geometric. The data are part of the library.

python recipes/examples/graphs.py      (needs torch-geometric)
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import AddSelfLoops

from graphplan import graph_step


class Network(nn.Module):
    """Two graph convolutions."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        # Layers that add loops look for those that are there: how many is known on the host alone.
        self.first, self.second = (GCNConv(*sizes, add_self_loops=False) for sizes in ((features, 16), (16, classes)))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Scores ``[nodes, classes]`` of nodes with features ``[nodes, features]`` and edges ``[2, edges]``."""
        hidden = F.dropout(self.first(x, edges).relu(), 0.3, self.training)
        return self.second(hidden, edges)


def main() -> None:
    """Train, test, report."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    club = AddSelfLoops()(KarateClub()[0]).to(device)
    model = Network(club.num_features, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # cross_entropy ignores -100; scores[mask] would have a shape that the host has to ask for.
    labels = torch.where(club.train_mask, club.y, -100)

    def train_step(graph: Data, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(graph.x, graph.edge_index), labels)
        loss.backward()
        optimizer.step()
        return loss

    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer})
    for _ in range(200):
        loss = step(club, labels)
    model.eval()
    right = (model(club.x, club.edge_index).argmax(-1) == club.y)[~club.train_mask].float().mean()
    print(f"loss: {loss:.3f}, right of the other members: {right:.2f}")
    print(step.report())


if __name__ == "__main__":
    main()
