"""Optimizers and objects of libraries that need not be there: whole steps where nothing is computed from a count on the
host, a refusal that blames the optimizer elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import RefusalError, graph_step
from tests.facts import assert_same

WHOLE = (
    *(f"pytorch_optimizer:{name}" for name in ("Lion", "Tiger", "SignSGD", "CAME", "QHM", "LARS")),
    *("timm.optim:Lars", "timm.optim:Lion", "timm.optim:SGDW", "lion_pytorch:Lion"),
)
OUTSIDE = (
    *(f"pytorch_optimizer:{name}" for name in ("AdaBelief", "PNM", "Shampoo", "ScheduleFreeAdamW", "Lookahead")),
    *("timm.optim:Mars", "timm.optim:Lookahead", "schedulefree:AdamWScheduleFree", "torchao.optim:AdamW8bit"),
)


def _train(name: str, *, graphed: bool, **options: Any) -> tuple[dict[str, Any], Any]:
    home, _, kind = name.partition(":")
    library = pytest.importorskip(home)
    torch.manual_seed(0)
    # Eight bits are for large tensors; Shampoo takes roots of matrices as wide as these.
    width = 64 if kind == "Shampoo" else 1024
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))
    params = list(model.parameters())
    wraps = kind == "Lookahead"
    made = torch.optim.AdamW(params, fused=True) if wraps else params
    optimizer: Any = getattr(library, kind)(made, **({} if wraps else {"lr": 0.001}))
    if hasattr(optimizer, "train"):
        optimizer.train()

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    run: Any = graph_step(step, owners=owners, min_speedup=0, **options) if graphed else step
    for _ in range(16):
        run(torch.randn(8, 4))
    return dict(model.state_dict()), run.stats if graphed else None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.twice
def test_replayed_in_the_step(name: str) -> None:
    expected, _ = _train(name, graphed=False)
    found, stats = _train(name, graphed=True)
    assert stats.replayed == 10
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OUTSIDE)
def test_refused_as_the_optimizers_fault(name: str) -> None:
    with pytest.raises(RefusalError) as caught:
        _train(name, graphed=True)
    assert caught.value.component == "optimizer"
    expected, _ = _train(name, graphed=False)
    found, _ = _train(name, graphed=True, on_failure="eager")
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore")
def test_an_environment_on_the_module() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    model = nn.Linear(4, 2)
    model.env = gymnasium.make("CartPole-v1")

    def step(x: Tensor) -> Tensor:
        return model(x).sum() * model.env.action_space.n

    run = graph_step(step, owners={"model": model}, min_speedup=0, on_failure="eager")
    for _ in range(12):
        run(torch.randn(2, 4))
    assert run.stats.calls == 12
