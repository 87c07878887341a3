"""Values on the host beside tensors on a device: names, objects, and tensors that stayed in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.devices import BACKEND, DEVICE, assert_like_eager, needs_cuda
from tests.facts import assert_same
from tests.models import CALLS, float_batches
from tests.twins import BEFORE_REPLAY, Rig, build, drive, managed


def _make() -> Rig:
    model = nn.Linear(8, 4).to(DEVICE)
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch.x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    calls = [
        (SimpleNamespace(x=x.to(DEVICE), names=[f"{index}", "b"], slices=torch.arange(index + 1)),)
        for index, (x, _) in enumerate(float_batches(CALLS))
    ]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


@needs_cuda
@pytest.mark.twice
def test_objects_with_host_tensors_that_are_not_read() -> None:
    """As batches of graphs have where their parts begin."""
    expected, found = build(_make), build(_make)
    step = managed(found, backend=BACKEND)
    assert_same(drive(expected, expected.step).state, drive(found, step).state)
    assert step.stats.captured == 1
    assert step.stats.replayed == CALLS - BEFORE_REPLAY - 1


CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: x * torch.tensor(2.0).to(x.device),
    "a number of another type": lambda x: x * torch.tensor(3).to(x.device, torch.float32),
    "a range": lambda x: x * torch.arange(8.0).to(x.device, non_blocking=True),
    "computed from ranges": lambda x: x * (torch.arange(4)[None] - torch.arange(2)[:, None]).reshape(8).to(x.device),
    "a slice of an identity": lambda x: x @ (-torch.eye(9)[:8, 1:]).to(x),
    "transposed": lambda x: x @ torch.arange(64.0).reshape(8, 8).T.to(x.device),
    "expanded": lambda x: x * torch.tensor([0.5]).expand(8).to(x.device),
    "pinned": lambda x: x * torch.ones(8).pin_memory().to(x.device, non_blocking=True),
    "copied into": lambda x: x * torch.empty(8, device=x.device).copy_(torch.arange(8.0)),
    "an index": lambda x: x[:, torch.arange(7, -1, -1)],
    "a list as an index": lambda x: x[:, [7, 6, 5, 4, 3, 2, 1, 0]],
    "several lists as an index": lambda x: x * x[[0, 1, 0, 1, 0, 1, 0, 1], (7, 6, 5, 4, 3, 2, 1, 0)],
    "put at a list": lambda x: _put(torch.zeros_like(x), [0, 2], x[range(2)]),
    "a number put at a list": lambda x: x + _put(torch.zeros_like(x), (slice(None), [1]), 2.0),
    "a number put at a tensor": lambda x: _put(x.clone(), torch.arange(2, device=x.device), 0.5),
    "a number put where a mask says so": lambda x: _put(x.clone(), x > 0, 0.5),
    "read on the device": lambda x: x * 2 if torch.ones(3, device=x.device).sum() == 3 else x,
    "a mask on the device": lambda x: x * x[:, torch.arange(8, device=x.device) >= 0],
    "a mask of two dimensions": lambda x: x * (x @ x.T)[~torch.eye(len(x), dtype=torch.bool, device=x.device)].sum(),
    "masks beside others": lambda x: (
        x * x[torch.arange(2, device=x.device), torch.arange(8, device=x.device) < 2].sum()
    ),
    "put where a mask says so": lambda x: _put(x.clone(), (..., torch.arange(8, device=x.device) < 2), x[:, :2] * 2),
    "nonzero on the device": lambda x: x[:, (torch.arange(8, device=x.device) >= 0).nonzero().flatten()],
    "a number on the default device": lambda x: x * _made_there(x.device),
    "put at an index": lambda x: torch.zeros_like(x).index_put((torch.tensor([0, 2]),), x[:2]),
}


def _put(tensor: Tensor, index: Any, value: Any) -> Tensor:
    tensor[index] = value
    return tensor


def _made_there(device: torch.device) -> Tensor:
    with device:
        return torch.tensor([2.0])


def _makes_constant(make: Callable[[Tensor], Tensor]) -> Rig:
    model = nn.Linear(8, 4).to(DEVICE)
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(make(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    calls = [(x.to(DEVICE),) for x, _ in float_batches(CALLS)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


@needs_cuda
@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.twice
def test_host_tensors_of_pythons_numbers_alone_are_constants(name: str) -> None:
    """A capture copies from copies of them on the device: attention masks and caches of libraries make such tensors."""
    make = partial(_makes_constant, CONSTANTS[name])
    expected, found = build(make), build(make)
    step = managed(found, backend=BACKEND)
    assert_same(drive(expected, expected.step).state, drive(found, step).state)
    assert step.stats.captured == 1
    assert step.stats.replayed == CALLS - BEFORE_REPLAY


@needs_cuda
def test_a_number_that_changes_is_no_constant() -> None:
    """It is a name that guards compare: each value has a program."""
    scale = {"by": 1.0}
    make = partial(_makes_constant, lambda x: x * torch.tensor(scale["by"]).to(x.device))

    def after(index: int) -> None:
        scale["by"] = 2.0 if index >= CALLS // 2 else 1.0

    expected, found = build(make), build(make)
    expected.after = found.after = after
    step = managed(found, backend=BACKEND)
    expected_run = drive(expected, expected.step)
    scale["by"] = 1.0
    assert_same(expected_run.state, drive(found, step).state)
    assert step.stats.captured == 2


def _trains(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> Rig:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(DEVICE)
    optimizer = SGD(model.parameters(), lr=0.05, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    calls = [(x.to(DEVICE),) for x, _ in float_batches(CALLS)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls)


def _contrast(model: nn.Module, x: Tensor) -> Tensor:
    """As contrastive losses leave out each row itself."""
    likeness = model(x) @ model(x).T
    others = likeness[~torch.eye(len(x), dtype=torch.bool, device=x.device)].view(len(x), -1)
    return others.logsumexp(1).mean() - likeness.diagonal().mean()


def _attend(model: nn.Module, x: Tensor) -> Tensor:
    """The encoder looks at the mask, to see whether it is a causal one."""
    encoder = model.get_submodule("encoder")
    mask = nn.Transformer.generate_square_subsequent_mask(len(x), device=x.device)
    out: Tensor = encoder(model.get_submodule("0")(x)[None], mask=mask)
    return out.square().mean()


def _attention_rig() -> Rig:
    rig = _trains(_attend)
    model = rig.owners["model"]
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEVICE)
    rig.owners["optimizer"].add_param_group({"params": model.encoder.parameters()})
    return rig


def _render(model: nn.Module, x: Tensor) -> Tensor:
    """As radiance fields do: torch looks for zeros to derive these, but not within a dispatch mode."""
    clear = model(x).sigmoid()
    return clear.cumprod(1).mean() + clear.prod(1).mean() + clear.prod()


@pytest.mark.parametrize("make", [partial(_trains, _contrast), _attention_rig])
def test_constants_for_which_torch_waits(make: Callable[[], Rig]) -> None:
    assert_like_eager(make, replayed=CALLS - BEFORE_REPLAY)


def test_derivatives_for_which_torch_waits() -> None:
    """They are replayed by another formula, which rounds otherwise."""
    expected, found = build(partial(_trains, _render)), build(partial(_trains, _render))
    step = managed(found, backend=BACKEND, verify=4)
    drive(expected, expected.step)
    drive(found, step)
    pairs = zip(found.owners["model"].parameters(), expected.owners["model"].parameters(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)
    assert step.stats.captured == 1
    assert step.stats.verified >= 2
    assert step.stats.replayed == CALLS - BEFORE_REPLAY
