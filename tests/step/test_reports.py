"""Reports as text, as JSON, and as a drawing, of what `graph_step`, `graphed` and `piecewise` make."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import GraphedStep, OptionError, graph_step, graphed, piecewise
from tests.twins import by_chance


def trained_step() -> GraphedStep:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :2])
        loss.backward()
        optimizer.step()
        return loss

    step = graph_step(train_step, owners={"model": model, "optimizer": optimizer}, backend="tape", eager_if=5)
    for _ in range(12):
        step(torch.randn(3, 4))
    return step


def served(*sizes: int, **options: Any) -> Any:
    fast = graphed(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), backend="tape", **options)
    with torch.no_grad():
        for size in sizes * 6:
            fast(torch.randn(size, 4))
    return fast


def test_json_of_a_step_says_what_the_text_says() -> None:
    step = trained_step()
    data = json.loads(step.report("json"))
    stats = step.stats
    assert data["plans"] == 1
    assert (
        data["stats"]["calls"] == 12 == sum(data["stats"][name] for name in ("eager", "traced", "captured", "replayed"))
    )
    assert data["stats"]["replayed"] == stats.replayed > 0
    assert data["skipped"] == {"eager_if": 3}
    assert data["reasons"] == stats.reasons
    assert data["notes"][0].startswith("prepared: ") and data["notes"][0] in step.report()
    assert data["phases"]["capture"]["calls"] == 1 and data["phases"]["capture"]["seconds"] > 0
    [program] = data["programs"]
    assert program["key"].startswith("args[0] torch.float32 [3, 4] strides (4, 1) on cpu")
    assert program["name"].endswith("train_step")
    assert program["inputs"] == {"args[0]": "f32[3, 4]"}
    assert program["roles"]["input"] == {"tensors": 1, "bytes": 48}
    assert program["roles"]["param"] == {"tensors": 2, "bytes": 40}
    assert program["policy"] == {"static": ["input", "param", "state"], "copied": ["input"]}
    assert program["launches"] == step.plan.launches  # type: ignore[union-attr]
    assert program["operators"]["aten.mse_loss.default"] == 1


def test_json_of_a_graphed_function_has_its_shapes_and_memory() -> None:
    fast = served(3, 2, shapes="bucket", buckets=[4])
    data = json.loads(fast.report(format="json"))
    assert data["shapes"]["shapes"] == 2 and data["shapes"]["capture_sizes"] == 1
    assert data["shapes"]["padding"] == pytest.approx(176 / 108)
    assert data["memory"]["pool"] == fast.memory.pool > 0
    assert data["shapes"]["checked"] == fast.shapes.checked > 0
    [program] = data["programs"]
    assert program["operators"] == {"aten.addmm.default": 2, "aten.relu.default": 1}
    assert program["replays"] == fast.programs[0].replays


def test_pieces_report_all_their_programs() -> None:
    def pick(x: Tensor) -> Tensor:
        return x * (2 if complex(by_chance(x).sum()).real > 0 else 3)

    run = piecewise([torch.sin, pick, torch.cos], backend="tape")
    for _ in range(12):
        run(torch.randn(3))
    data = json.loads(run.report("json"))
    assert (data["scope"], data["graphs"]) == ("piecewise", 2)
    assert set(data["reasons"]) >= {"pick"} and len(data["pieces"]) == 2
    names = [next(iter(program["operators"])) for piece in data["pieces"] for program in piece["programs"]]
    assert names == ["aten.sin.default", "aten.cos.default"]


def test_a_form_that_there_is_not() -> None:
    with pytest.raises(OptionError, match=r"format is 'xml'; expected one of: text, json, html"):
        served(3).report("xml")
