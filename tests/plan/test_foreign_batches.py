"""Batches of libraries that need not be there: each engages, and eager's numbers come out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import CALLS
from tests.plan.test_unread_values import VARIES, rig_of
from tests.twins import BEFORE_REPLAY, assert_equals_eager

Kind = tuple[Callable[[int, Tensor], Any], Callable[[Any], Tensor], int]


def _graphs() -> Kind:
    data = pytest.importorskip("torch_geometric.data")
    nn = pytest.importorskip("torch_geometric.nn")

    def make(index: int, x: Tensor) -> Any:
        edges = torch.randint(3, (2, 5), generator=torch.Generator().manual_seed(index))
        graphs = [data.Data(x=part, edge_index=edges, name=f"{index}") for part in x.split(3)]
        return data.Batch.from_data_list(graphs)

    def take(batch: Any) -> Tensor:
        x = nn.SimpleConv()(batch.x, batch.edge_index)
        return nn.global_mean_pool(x, batch.batch, size=batch.num_graphs)

    return make, take, VARIES


def _encoding(name: str) -> Kind:
    kind = getattr(pytest.importorskip("transformers"), name)
    return lambda i, x: kind({"x": x, "text": [f"{i}", "b"]}), lambda b: b["x"], VARIES


def _index() -> Kind:
    pandas = pytest.importorskip("pandas")
    return lambda i, x: {"x": x, "index": pandas.Index([i, i + 1])}, lambda b: b["x"], BEFORE_REPLAY


KINDS: dict[str, Callable[[], Kind]] = {
    "graphs": _graphs,
    "BatchEncoding": partial(_encoding, "BatchEncoding"),
    "BatchFeature": partial(_encoding, "BatchFeature"),
    "pandas": _index,
}


@pytest.mark.parametrize("name", KINDS)
def test_batches_of_libraries(name: str) -> None:
    make, take, before = KINDS[name]()
    assert_equals_eager(partial(rig_of, take, make), replayed=CALLS - before)
