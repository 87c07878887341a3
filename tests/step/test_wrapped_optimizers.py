"""Optimizers around others, whose groups they share, and other names for groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from graphplan import HostEffectError
from tests.twins import BEFORE_REPLAY, Rig, assert_refused, same_as_eager


class SharpnessAware(Optimizer):
    """Sharpness-aware minimization (https://arxiv.org/abs/2010.01412), as its users write it: two steps, none of them
    ``step``, and weights that are given the memory of their copies.
    """

    def __init__(self, params: Any, base: Callable[..., Optimizer], rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        params = [(p, group["rho"]) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm(p=2) for p, _ in params]).norm(p=2)
        for p, rho in params:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (rho / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.put_back(p)
        self.base_optimizer.step()
        self.zero_grad()

    def put_back(self, p: Tensor) -> Tensor:
        old: Tensor = self.state[p]["old_p"]
        return old


class Half(SharpnessAware):
    """Gives the weights a part of the copy's memory, which is another geometry."""

    def put_back(self, p: Tensor) -> Tensor:
        self.state[p]["old_p"] = torch.stack([self.state[p]["old_p"]] * 2)
        part: Tensor = self.state[p]["old_p"][0]
        return part


def sharp_rig(kind: type[SharpnessAware], base: Callable[..., Optimizer], after: Callable[[Any, int], None]) -> Rig:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = kind(model.parameters(), base)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step()
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step()
        return loss

    calls = [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(24)]
    owners = {"model": model, "optimizer": optimizer, "base": optimizer.base_optimizer}
    return Rig(train_step, owners, calls, after=lambda index: after(optimizer, index))


def nothing(optimizer: Any, index: int) -> None:
    """Nothing happens between calls."""


def reload(optimizer: Any, index: int) -> None:
    """A checkpoint of it is loaded: its copies are tensors of their own then."""
    if index == 14:
        optimizer.load_state_dict(optimizer.state_dict())


def forget(optimizer: Any, index: int) -> None:
    """Its copies go: the next step makes others."""
    if index == 14:
        for state in optimizer.state.values():
            state.pop("old_p", None)


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
@pytest.mark.parametrize("after", [nothing, forget])
@pytest.mark.parametrize(
    "base", [partial(SGD, lr=0.1, momentum=0.9, fused=True), partial(AdamW, lr=0.01, fused=True)], ids=["sgd", "adamw"]
)
def test_weights_that_get_the_memory_of_their_copies(
    base: Callable[..., Optimizer], after: Callable[[Any, int], None], named: bool, device: torch.device, backend: str
) -> None:
    def make() -> Rig:
        rig = sharp_rig(SharpnessAware, base, after)
        if not named:
            rig.extra, rig.owners = rig.owners, {}
        return rig

    step = same_as_eager(make, device, backend)
    assert (step.stats.captured, step.stats.replayed) == (1, 18 if after is nothing else 17)


def test_weights_that_get_a_part_of_other_memory() -> None:
    make = partial(sharp_rig, Half, partial(SGD, lr=0.1, fused=True), nothing)
    pattern = r"gives model\.0\.\w+ other memory .*shares memory with .*old_p.*data\.copy_"
    assert_refused(make, HostEffectError, pattern, done=4)


class Clipper:
    """Has another name for an optimizer's groups."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups = groups

    def clip(self) -> None:
        for group in self.groups:
            for p in group["params"]:
                p.grad.clamp_(-group["weight_decay"], group["weight_decay"])


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.twice
def test_another_name_for_groups(changes: bool, device: torch.device, backend: str) -> None:
    """They have other flags while a step runs. What code reads of them is compared as the optimizer's."""

    def make() -> Rig:
        model = nn.Linear(6, 3)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05, fused=True)
        clipper = Clipper(optimizer.param_groups)

        def train_step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            clipper.clip()
            optimizer.step()
            return loss

        def after(index: int) -> None:
            if changes and index == 14:
                optimizer.param_groups[0]["weight_decay"] = 0.01

        calls = [(torch.randn(5, 6),) for _ in range(24)]
        return Rig(train_step, {"model": model, "optimizer": optimizer, "clipper": clipper}, calls, after=after)

    step = same_as_eager(make, device, backend)
    assert step.stats.captured == 1 + changes
    assert step.stats.replayed == 24 - BEFORE_REPLAY * (1 + changes)


class Twice(SharpnessAware):
    """Keeps the copy under two names, which a replay would make two tensors."""

    def put_back(self, p: Tensor) -> Tensor:
        old = self.state[p]["again"] = self.state[p]["old_p"]
        return old


def test_a_copy_under_two_names() -> None:
    make = partial(sharp_rig, Twice, partial(SGD, lr=0.1, fused=True), nothing)
    pattern = r"gives model\.0\.\w+ other memory .*shares memory with .*data\.copy_"
    assert_refused(make, HostEffectError, pattern, done=4)
