"""What autograd adds gradients up with is made anew, and everything else stays."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from graphplan.program.accumulators import renew_accumulators


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_node_that_a_graph_keeps_is_made_anew(dtype: torch.dtype) -> None:
    param, seen = nn.Parameter(torch.ones(3, dtype=dtype)), list[str]()
    param.register_hook(lambda grad: seen.append("hook"))
    param.register_post_accumulate_grad_hook(lambda param: seen.append("after"))
    kept = (param * 2).sum()
    kept.backward(retain_graph=True)
    node, grad, place, version = get_gradient_edge(param).node, param.grad, param.data_ptr(), param._version
    assert get_gradient_edge(param).node is node
    renew_accumulators([param])
    assert get_gradient_edge(param).node is not node
    assert (param.data_ptr(), param._version, param.dtype) == (place, version, dtype)
    assert param.grad is grad
    (param * 3).sum().backward()
    kept.backward()
    assert torch.equal(param.grad, torch.full((3,), 7, dtype=dtype))
    assert seen == ["hook", "after"] * 3


def test_a_node_that_has_hooks_of_its_own_stays() -> None:
    """As optimizers that step in the backward pass register them."""
    param, seen = nn.Parameter(torch.ones(3)), list[str]()
    node = get_gradient_edge(param).node
    node.register_hook(lambda *_: seen.append("hook"))
    renew_accumulators([param])
    (param * 3).sum().backward()
    assert get_gradient_edge(param).node is node
    assert seen == ["hook"]


def test_nodes_in_a_process_group_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks that ``DistributedDataParallel`` has on them reduce gradients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    distributed.init_process_group("gloo")
    try:
        net = DistributedDataParallel(nn.Linear(3, 1))
        seen: list[Any] = []
        net.register_comm_hook(None, lambda _, bucket: seen.append(bucket) or _done(bucket.buffer()))
        renew_accumulators(net.parameters())
        net(torch.ones(2, 3)).sum().backward()
        assert len(seen) == 1
    finally:
        distributed.destroy_process_group()


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def test_what_has_no_node_is_left_alone() -> None:
    frozen, made = nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2, requires_grad=True) * 2
    place: Tensor = frozen.data
    renew_accumulators([frozen, made])
    assert frozen.data.data_ptr() == place.data_ptr()
    assert made.grad_fn is not None
