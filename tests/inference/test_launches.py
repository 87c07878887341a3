"""`LaunchCounter`: eager pays a launch for each operator, a replay pays one."""

from __future__ import annotations

import torch
from torch import nn

from graphplan import LaunchCounter, graphed


def test_eager_pays_for_each_operator_and_a_replay_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Flatten())
    fast = graphed(model, backend="tape", verify="off")
    x = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(5):
            fast(x)
        with LaunchCounter() as eager:
            wanted = model(x)
        with LaunchCounter() as replayed:
            found = fast(x)
    assert torch.equal(found, wanted)
    assert (eager.eager, eager.replays, eager.launches) == (3, 0, 3)
    assert eager.operators == {"aten.addmm.default": 2, "aten.relu.default": 1}
    assert (replayed.replays, replayed.replayed) == (1, 3)
    assert replayed.operators == {"aten.copy_.default": 1, "aten.clone.default": 1}, "the input in, the result out"
    assert replayed.nodes == {"Operator": 3}


def test_what_is_no_launch_is_not_counted() -> None:
    with LaunchCounter() as counter:
        x = torch.empty(4, 4)
        x.t()[0].view(2, 2)
        x.fill_(1.0)
        with LaunchCounter() as inner:
            x.add(1)
    assert inner.eager == 1
    assert counter.eager == 2, "what an inner one counts is launched all the same"
