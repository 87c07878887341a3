"""Graph networks of torch-geometric, whose batches are objects of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.zoo.batches import many
from recipes.zoo.registry import Case, Scale, entry

CLASSES = 4


def _whole(scale: Scale) -> Any:
    """One graph whose nodes are classified, as in Cora."""
    from torch_geometric.data import Data

    nodes = scale.pick(64, 2048)
    data = Data(torch.randn(nodes, 16), torch.randint(nodes, (2, 4 * nodes)), y=torch.randint(CLASSES, (nodes,)))
    data.train_mask = torch.rand(nodes) < 0.5
    return data


def _nodes(layer: str, *, weighted: bool = False, **options: Any) -> Callable[[Scale], Case]:
    def make(scale: Scale) -> Case:
        from torch_geometric import nn as geometric
        from torch_geometric.transforms import GCNNorm

        model = getattr(geometric, layer)(16, scale.pick(16, 64), 2, CLASSES, dropout=0.1, **options)
        ready = GCNNorm() if weighted else lambda data: data

        def loss(model: Any, data: Any) -> Tensor:
            given = {"edge_weight": data.edge_weight} if weighted else {}
            found = F.cross_entropy(model(data.x, data.edge_index, **given), data.y, reduction="none")
            return (found * data.train_mask).sum() / data.train_mask.sum()

        return Case(model, many(lambda: ready(_whole(scale))), loss)

    return make


entry("graphs/gcn", "torch-geometric", core=True)(_nodes("GCN"))
entry("graphs/gcn_normalized", "torch-geometric", core=True)(_nodes("GCN", weighted=True, normalize=False))
entry("graphs/gat", "torch-geometric", core=True)(_nodes("GAT", heads=2))
entry("graphs/gat_bare", "torch-geometric", core=True)(_nodes("GAT", heads=2, add_self_loops=False))
entry("graphs/sage", "torch-geometric")(_nodes("GraphSAGE"))


@entry("graphs/gcn_boolean_mask", "torch-geometric")
def gcn_boolean(scale: Scale) -> Case:
    """The tutorial's way to choose training nodes, ``out[data.train_mask]``."""
    from torch_geometric import nn as geometric

    def loss(model: Any, data: Any) -> Tensor:
        return F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])

    return Case(geometric.GCN(16, 16, 2, CLASSES), many(lambda: _whole(scale)), loss)


def _molecules(scale: Scale, *, same: bool) -> Any:
    """Small graphs in one batch, of sizes of their own unless ``same``."""
    from torch_geometric.data import Batch, Data

    graphs = []
    for _ in range(scale.pick(8, 64)):
        nodes = 12 if same else int(torch.randint(8, 16, ()))
        edges = torch.randint(nodes, (2, 3 * nodes))
        graphs.append(Data(torch.randn(nodes, 16), edges, y=torch.randint(CLASSES, (1,)), smiles="C" * nodes))
    return Batch.from_data_list(graphs)


class _GIN(torch.nn.Module):
    def __init__(self, width: int) -> None:
        from torch_geometric import nn as geometric

        super().__init__()
        self.body = geometric.GIN(16, width, 3, norm="batch_norm")
        self.pool = geometric.global_mean_pool
        self.head = torch.nn.Linear(width, CLASSES)

    def forward(self, data: Any) -> Tensor:
        out: Tensor = self.head(self.pool(self.body(data.x, data.edge_index), data.batch, data.num_graphs))
        return out


def _classify(model: Any, data: Any) -> Tensor:
    return F.cross_entropy(model(data), data.y)


@entry("graphs/gin_molecules", "torch-geometric", refused="each batch has shapes of its own")
def gin(scale: Scale) -> Case:
    """Molecules of different sizes: no two batches have the same shapes."""
    return Case(_GIN(scale.pick(16, 64)), many(lambda: _molecules(scale, same=False)), _classify)


@entry("graphs/gin_equal", "torch-geometric")
def gin_equal(scale: Scale) -> Case:
    """Molecules of equal size, with their formula as a string."""
    return Case(_GIN(scale.pick(16, 64)), many(lambda: _molecules(scale, same=True)), _classify)
