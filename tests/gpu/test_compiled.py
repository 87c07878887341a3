"""Models that the user compiled, on CUDA: as many graphs as without graphplan, and their kernels in the replay."""

from __future__ import annotations

import pytest
import torch

from graphplan import graph_step
from tests.trace.test_compiled import HIDDEN, Counting, Trainer


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("how", HIDDEN)
def test_what_nobody_shows_is_compiled_as_without_graphplan(how: str, fullgraph: bool) -> None:
    """As on the CPU."""
    call_of, owners_of = HIDDEN[how]
    batches = [(torch.randn(5, 6, device="cuda"), torch.randint(0, 3, (5,), device="cuda")) for _ in range(24)]
    found = []
    for graphed in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiler = Counting()
        trainer = Trainer(compiler, fullgraph=fullgraph, device="cuda")
        step = call_of(trainer)
        if graphed:
            step = graph_step(step, owners=owners_of(trainer), min_speedup=0)
        torch.manual_seed(1)
        losses = [step(*batch).clone() for batch in batches]
        found.append((compiler.graphs, torch.stack(losses), trainer.net.state_dict()))
    assert step.stats.captured == 1 and step.stats.replayed >= 12, step.report()
    assert found[0][0] == found[1][0] >= 1
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=0, atol=0)
