"""Sixty graphed steps on the device equal sixty eager ones: models, optimizers, mixed precision, dropout, schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.devices import BACKEND, CUDA, DEVICE, Generators, assert_like_eager, needs_cuda, on_device, to_device
from tests.facts import assert_same, flatten
from tests.models import MODELS, batches
from tests.twins import Rig, build, drive, managed

STEPS = 60
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw fused": partial(AdamW, lr=1e-2, weight_decay=0.05, fused=True),
    "adamw": partial(AdamW, lr=1e-2, weight_decay=0.05),
    "adam amsgrad": partial(Adam, lr=1e-2, amsgrad=True),
    "sgd nesterov": partial(SGD, lr=5e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "rmsprop": partial(RMSprop, lr=1e-3, momentum=0.9),
    "nadam": partial(NAdam, lr=1e-2),
}
ON_CUDA_ONLY = {"rmsprop", "nadam"}
"""They have no kernel on the CPU that reads the learning rate from a tensor."""


def scheduled_rig(
    model_name: str, optimizer_name: str, *, bf16: bool = False, sizes: tuple[int, ...] = (8,) * STEPS
) -> Rig:
    """Clipped gradients inside the step, a cosine schedule outside, stepped after every call."""
    make_model, draw = MODELS[model_name]
    model = make_model()
    calls = batches(draw, sizes)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = CosineAnnealingLR(optimizer, T_max=len(calls))

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    return Rig(train_step, owners, list(calls), after=lambda index: scheduler.step())


COMBINATIONS = [
    pytest.param(model, optimizer, marks=[needs_cuda] if optimizer in ON_CUDA_ONLY else [])
    for model in MODELS
    for optimizer in OPTIMIZERS
]


@pytest.mark.parametrize(("model", "optimizer"), COMBINATIONS)
def test_graphed_steps_equal_eager_steps(model: str, optimizer: str) -> None:
    """Losses, parameters, gradients, buffers, optimizer state, groups and generators; one capture, 54 replays."""
    make = on_device(partial(scheduled_rig, model, optimizer))
    step, rig = assert_like_eager(make, captured=1, replayed=STEPS - 6, exact=model == "mlp")
    assert step.plan.launches > 10
    assert isinstance(rig.owners["optimizer"].param_groups[0]["lr"], float)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.twice
def test_bfloat16_autocast_in_the_step(model: str) -> None:
    """The casts of weights and activations belong to the graph."""
    make = on_device(partial(scheduled_rig, model, "adamw fused", bf16=True))
    step, _ = assert_like_eager(make)
    assert step.stats.replayed == STEPS - 6


@pytest.mark.parametrize("optimizer", ["adamw fused", "sgd nesterov"])
@pytest.mark.twice
def test_fused_optimizers_equal_the_run_that_nobody_prepared(optimizer: str) -> None:
    """A Python lr and no flags in the eager run, a device lr and flags in the graphed one: the same bits."""
    make = on_device(partial(scheduled_rig, "mlp", optimizer))

    def fused() -> Rig:
        rig = make()
        for group in rig.owners["optimizer"].param_groups:
            group["fused"], group["foreach"] = True, False
        return rig

    rig = build(fused)
    losses = drive(rig, rig.step).outputs
    model = flatten(model=rig.owners["model"], losses=losses)
    rig = build(fused)
    step = managed(rig, backend=BACKEND)
    losses = drive(rig, step).outputs
    assert_same(model, flatten(model=rig.owners["model"], losses=losses))
    assert step.stats.replayed == STEPS - 6


def test_a_ragged_batch_has_its_own_program() -> None:
    """Every tenth batch is smaller: one capture per shape, and the order of the steps is eager's."""
    sizes = tuple(5 if index % 10 == 9 else 8 for index in range(100))
    make = on_device(partial(scheduled_rig, "mlp", "adamw fused", sizes=sizes))
    step, _ = assert_like_eager(make, captured=2, further=1)
    assert step.stats.recaptured == 0


class Noisy(nn.Module):
    """Returns what dropout and the other random operators draw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        dropped = F.dropout(self.weight * x, 0.3)
        return dropped, torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x.sigmoid())


def noisy_rig(drawn: list[Tensor]) -> Rig:
    """A step that returns its noise, and a host that draws from the same generator between the calls."""
    model = Noisy()
    optimizer = SGD(model.parameters(), lr=0.01, fused=True)

    def train_step(x: Tensor) -> tuple[Tensor, ...]:
        optimizer.zero_grad()
        noise = model(x)
        noise[0].sum().backward()
        optimizer.step()
        return noise

    def after(index: int) -> None:
        if index % 3 == 0:
            drawn.append(torch.rand(7, device=DEVICE))

    calls = [(torch.full((1000,), 0.1 * index),) for index in range(30)]
    return Rig(train_step, {"model": model, "optimizer": optimizer}, calls, after, {"drawn": drawn})


def test_random_numbers_are_eagers() -> None:
    """Replays draw the same Philox numbers, in every call, and leave the generator where eager does."""
    make = on_device(lambda: noisy_rig([]))
    step, rig = assert_like_eager(make, exact=True)
    masks = [drive(rig, step, 2).outputs[call][0] != 0 for call in (0, 1)]
    assert not torch.equal(*masks)
    kept = masks[1].float().mean().item()
    assert 0.6 < kept < 0.8


def test_a_generator_that_is_seeded_between_calls() -> None:
    """``manual_seed`` on the host reaches the next replay."""

    def make() -> Rig:
        rig = noisy_rig([])
        rig.after = lambda index: torch.manual_seed(index // 2)
        return rig

    _, rig = assert_like_eager(on_device(make), exact=True)
    assert torch.equal(Generators()["device"], _state_after_seed(len(rig.calls) // 2 - 1))


def _state_after_seed(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return Generators()["device"]


class Descent(nn.Module):
    """Its gradient is one everywhere, so that a step moves the weight by the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.twice
def test_the_scheduler_s_lr_reaches_every_replay() -> None:
    """Each step goes as far as the host's Python learning rate of that call says, jumps and zero included."""
    model = Descent().to(DEVICE)
    optimizer = SGD(model.parameters(), lr=1.0, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss

    step = managed(Rig(train_step, {"model": model, "optimizer": optimizer}, []), backend=BACKEND)
    x = torch.ones(16, device=DEVICE)
    for index in range(20):
        lr = 0.0 if index == 11 else 2.0 ** (index % 5 - 2)
        optimizer.param_groups[0]["lr"] = lr
        before = model.weight.detach().clone()
        step(x)
        assert torch.equal(before - model.weight, torch.full_like(before, lr)), index
        assert optimizer.param_groups[0]["lr"] == lr and isinstance(optimizer.param_groups[0]["lr"], float)
    assert step.stats.replayed == 14 and step.stats.captured == 1


def test_the_lr_that_the_step_sets_reaches_every_replay() -> None:
    """Each step computes its rate of a count that its owner keeps."""
    model, state = Descent().to(DEVICE), SimpleNamespace(count=0)
    optimizer = SGD(model.parameters(), lr=1.0, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.param_groups[0]["lr"] = 2.0 ** (state.count % 5 - 2)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss

    step = managed(Rig(train_step, {"model": model, "optimizer": optimizer, "state": state}, []), backend=BACKEND)
    x = torch.ones(16, device=DEVICE)
    for index in range(20):
        state.count, before = index, model.weight.detach().clone()
        step(x)
        assert torch.equal(before - model.weight, torch.full_like(before, 2.0 ** (index % 5 - 2))), index
        assert optimizer.param_groups[0]["lr"] == 2.0 ** (index % 5 - 2)
    assert step.stats.captured == 1 and step.stats.replayed >= 12, step.report()


@pytest.mark.twice
def test_outputs_belong_to_the_caller() -> None:
    """A loss that was returned keeps its value when later replays run, and no feed is overwritten."""
    rig = build(on_device(partial(scheduled_rig, "mlp", "adamw fused", sizes=(8,) * 30)))
    feeds = [tuple(leaf.clone() for leaf in args) for args in rig.calls]
    step: Any = managed(rig, backend=BACKEND)
    losses, copies = [], []
    for args in rig.calls:
        losses.append(step(*args))
        copies.append(losses[-1].clone())
    assert step.stats.replayed == 24
    assert all(map(torch.equal, losses, copies))
    assert len({loss.item() for loss in losses}) > 20
    assert not any(loss.requires_grad for loss in losses[6:])
    assert all(
        torch.equal(a, b) for old, args in zip(feeds, rig.calls, strict=True) for a, b in zip(old, args, strict=True)
    )


@pytest.mark.parametrize("where", ["pageable", "pinned", "mixed"])
def test_host_batches_with_device(where: str) -> None:
    """With ``device=`` host batches are moved in every phase; pageable ones may be overwritten after the call."""
    if where != "pageable" and not CUDA:
        pytest.skip("needs a CUDA device")

    def make() -> Rig:
        rig = scheduled_rig("mlp", "adamw fused")
        if where != "pageable":
            rig.calls = [(x.pin_memory(), y.pin_memory() if where == "pinned" else y) for x, y in rig.calls]
            return rig
        (x, y), pool, inner = rig.calls[0], rig.calls, rig.after
        x, y = x.clone(), y.clone()
        rig.calls = [(x, y)] * STEPS

        def after(index: int) -> None:
            inner(index)
            for leaf, fresh in zip((x, y), pool[(index + 1) % STEPS], strict=True):
                leaf.copy_(fresh)

        rig.after = after
        return rig

    step, rig = assert_like_eager(on_device(make, feeds=False), device=DEVICE.type, exact=True)
    assert all(leaf.device.type == "cpu" for args in rig.calls for leaf in args)
    assert step.stats.bytes_copied >= step.stats.replayed * sum(leaf.nbytes for leaf in to_device(rig.calls[0]))
