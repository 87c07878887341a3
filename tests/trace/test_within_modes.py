"""Functions for which torch takes another way within a dispatch mode, so that a trace would record other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphplan import graphed
from graphplan.trace.derivatives import own_derivatives
from tests.twins import BEFORE_REPLAY, Rig, assert_same_as_eager, saved_traces

CALLS = 24


def rig_of(body: Callable[[Tensor, Tensor], Tensor]) -> Rig:
    """A layer on points that ``body`` has turned by one matrix."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    turn = nn.Parameter(torch.randn(1, 3, 3), requires_grad=False)

    def turns(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = body(model(x), turn).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    owners = {"model": model, "optimizer": optimizer, "turn": [turn]}
    return Rig(turns, owners, [(torch.randn(16, 3, 3),) for _ in range(CALLS)])


def _trained(x: Tensor, turn: Tensor) -> Tensor:
    return x @ turn.detach().requires_grad_()


def _cast(x: Tensor, turn: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ turn).float()


def _singular(x: Tensor, turn: Tensor) -> Tensor:
    return x / torch.linalg.svdvals(x.detach()).sum()


def _eigen(x: Tensor, turn: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.linalg.eigvalsh(x @ x.mT, UPLO="U").amax()
    return x / scale


BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "operator": lambda x, turn: x @ turn, "from the left": lambda x, turn: turn @ x,
    "function": lambda x, turn: torch.matmul(x, turn.mT), "method": lambda x, turn: x.matmul(turn),
    "of linalg": lambda x, turn: torch.linalg.matmul(x, turn), "after a matrix": lambda x, turn: x @ turn[0] @ turn,
    "trained": _trained, "in mixed precision": _cast, "of singular values": _singular, "of eigenvalues": _eigen,
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_replays_have_the_bits_of_eager_steps(body: Any) -> None:
    """In all checks, and in the traced step itself."""
    step = assert_same_as_eager(lambda: rig_of(body), on_failure="raise")
    assert step.stats.replayed == CALLS - BEFORE_REPLAY + saved_traces(step.stats)


ATTENTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(5, 5, device=x.device).tril() > 0),
    "causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "products": lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x).softmax(-1) @ x,
    "chained": lambda x: torch.linalg.multi_dot([x[0, 0], x[0, 1].mT, x[0, 0]]),
    "a loss": lambda x: F.cross_entropy(x[0, 0] @ x[0, 1].mT, torch.arange(5, device=x.device)),
}


@pytest.mark.parametrize("call", ATTENTIONS.values(), ids=ATTENTIONS)
@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_autocast_casts_for_an_operator_or_for_its_parts(
    call: Callable[[Tensor], Tensor], kernel: SDPBackend, device: torch.device, backend: str
) -> None:
    """In inference mode, a trace sees operators whole and runs their parts: autocast is on there, unless it has cast
    the operator's own arguments.
    """
    x = torch.randn(2, 2, 5, 8, device=device)
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16), sdpa_kernel([kernel, SDPBackend.MATH]):
        step = graphed(call, backend=backend, min_speedup=0, verify=1)
        for _ in range(8):
            assert torch.equal(step(x), call(x))
    assert step.stats.replayed == step.stats.verified > 0


def test_other_forms_stay_torchs() -> None:
    """Trained matrices, under transforms, in half precision; afterwards, nothing is replaced."""
    x, one = torch.randn(5, 4, 4), torch.randn(1, 4, 4)
    forms: list[Callable[[], Tensor]] = [
        lambda: x @ one.clone().requires_grad_(), lambda: torch.vmap(lambda row: row.expand(3, 4, 4) @ one)(x),
        lambda: torch.vmap(torch.linalg.svdvals)(x), lambda: torch.linalg.eigvalsh(x.clone().requires_grad_()),
        lambda: torch.matmul(x, one, out=torch.empty(5, 4, 4)),
    ]  # fmt: skip
    expected = [form() for form in forms]
    with own_derivatives():
        for form, found in zip(forms, expected, strict=True):
            assert torch.equal(form(), found)
        assert not (x @ one)._is_view()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.linalg.svdvals(x.bfloat16()).dtype == torch.float32
        with pytest.raises(RuntimeError, match="size"):
            x @ torch.randn(1, 3, 4)
    assert "matmul" not in vars(Tensor) and not hasattr(torch.linalg.svdvals, "__wrapped__")
