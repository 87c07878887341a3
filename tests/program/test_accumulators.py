"""What autograd adds gradients up with is made anew, and everything else stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

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


def test_what_has_no_node_is_left_alone() -> None:
    frozen, made = nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2, requires_grad=True) * 2
    place: Tensor = frozen.data
    renew_accumulators([frozen, made])
    assert frozen.data.data_ptr() == place.data_ptr()
    assert made.grad_fn is not None
