"""Tensors that a step draws on the host, or has there, and copies to the device in each step.

Without a CUDA device the tape records them with the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from graphplan import GraphPlanCallback, HostSyncError, TemporaryCopyError, graph_step
from tests.devices import BACKEND, CUDA, DEVICE, assert_like_eager, needs_cuda, on_device
from tests.models import CALLS, float_batches
from tests.twins import Rig


class Net(nn.Module):
    """A layer, and a tensor that is no buffer: it stays in host memory when the module is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self._held = torch.linspace(0.5, 2, 8)


MADE: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "noise": lambda net, x: x + torch.randn(x.shape).type_as(x),
    "noise as": lambda net, x: x + torch.randn(x.shape).to(x),
    "drawn twice": lambda net, x: x + torch.rand(8).to(x.device) * torch.randn(x.shape).to(x.device),
    "in a loop": lambda net, x: sum([x * torch.rand(8).to(x.device) for _ in range(3)], x),
    "one of them a constant": lambda net, x: sum([x * each.to(x.device) for each in (torch.ones(8), torch.rand(8))], x),
    "steps of a schedule": lambda net, x: x * torch.randint(0, 1000, (len(x),)).to(x.device)[:, None] / 1000,
    "shuffled": lambda net, x: 0.3 * x + 0.7 * x[torch.randperm(len(x))],
    "shuffled there": lambda net, x: 0.3 * x + 0.7 * x[torch.randperm(len(x)).to(x.device)],
    "copied into": lambda net, x: x * torch.empty_like(x).copy_(torch.rand(x.shape)),
    "in place": lambda net, x: x + torch.empty(8).uniform_(-1, 1).add_(0.5).to(x.device),
    "written between": lambda net, x: _written_between(x),
    "pinned": lambda net, x: x + _pinned(torch.randn(8)).to(x.device, non_blocking=True),
    "in double precision": lambda net, x: x + torch.randn(8, dtype=torch.float64).to(x),
    "of a distribution": lambda net, x: x * torch.distributions.Beta(0.4, 0.4).sample((8,)).to(x.device),
    "a table": lambda net, x: x * torch.linspace(0, 1, 50)[torch.randint(0, 50, (8,))].to(x.device),
    "beside draws of nothing": lambda net, x: [torch.rand(5), x + torch.rand(8).to(x.device), torch.randn(3)][1],
    "after a certain draw": lambda net, x: x + torch.rand(8).to(x.device) if torch.rand([]) >= 0 else x,
    "recomputed": lambda net, x: checkpoint(_noisy, x, use_reentrant=False) + torch.rand(8).to(x.device),
    "held": lambda net, x: x * net._held.to(x.device),
    "held and drawn": lambda net, x: x * net._held[torch.randperm(8)].to(x.device),
}


def _noisy(x: Tensor) -> Tensor:
    """Noise that is drawn again, as it was, where activations are recomputed."""
    return (x * torch.rand(8).to(x.device)).sin() * torch.rand(8).to(x.device)


def _written_between(x: Tensor) -> Tensor:
    drawn = torch.rand(8)
    first = drawn.to(x.device)
    drawn.mul_(3)
    return x + first + drawn.to(x.device)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if CUDA else tensor


def making(name: str) -> Rig:
    """Training on what is made in a way of :data:`MADE`."""
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.05, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net.layer(MADE[name](net, x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    calls = [(x,) for x, _ in float_batches(CALLS)]
    held = net._held
    return Rig(step, {"net": net, "optimizer": optimizer}, calls, after=lambda index: held.add_(0.1))


@pytest.mark.parametrize(("verify", "traced"), [(4, 2), ("geometric", 1)])
@pytest.mark.parametrize("name", MADE)
def test_they_are_made_again(name: str, verify: Any, traced: int) -> None:
    """With the numbers of eager steps, which go on drawing; the host writes to the held tensor between the steps. One
    trace is enough where the first replay is checked.
    """
    make = on_device(partial(making, name))
    step, rig = assert_like_eager(make, verify=verify)
    assert step.stats.verified > 0
    assert step.stats.traced == traced
    assert rig.owners["net"]._held.device.type == "cpu"


BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped by chance": lambda x: x.flip(1) if torch.rand(1) < 0.5 else x,
    "an item of a distribution": lambda x: x.flip(1) if bool(torch.empty([]).bernoulli_(0.3)) else x * 2,
    "one of three": lambda x: (x, x.sin(), x.cos())[int(torch.randint(0, 3, (1,)))],
    "beside what the device gets": lambda x: (
        x + torch.randn(8).to(x.device) if torch.rand([]) < 0.4 else x * torch.rand(8).to(x.device)
    ),
    "layers left out": lambda x: sum([x.sin() for _ in range(3) if torch.rand([]) > 0.4], x),
    "after other draws": lambda x: [torch.randn(5), x.flip(1) if torch.rand(1) < 0.5 else x, torch.rand(3)][1],
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_on_what_is_drawn(name: str) -> None:
    """Each way has a program, which is chosen by what is about to be drawn; the generator moves as in eager steps."""
    runs = []
    for replays in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(8, 4).to(DEVICE)
        optimizer = SGD(net.parameters(), lr=0.05, fused=True)

        def step(x: Tensor, net: nn.Linear = net, optimizer: SGD = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = net(BRANCHES[name](x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        owners = {"net": net, "optimizer": optimizer}
        fast: Callable[[Tensor], Tensor] = graph_step(step, owners=owners, backend=BACKEND) if replays else step
        run: list[Tensor] = []
        for _ in range(60):
            run += [fast(torch.randn(4, 8).to(DEVICE)).clone(), torch.get_rng_state()]
        runs.append([*run, net.weight.detach()])
    assert [torch.equal(one, other) for one, other in zip(*runs, strict=True)] == [True] * len(runs[0])
    assert fast.stats.captured >= 2  # type: ignore[attr-defined]
    assert fast.stats.replayed >= 20  # type: ignore[attr-defined]


REFUSED: dict[str, tuple[type[Exception], Callable[[Tensor], Tensor]]] = {
    "a number": (HostSyncError, lambda x: x * complex(torch.rand([])).real),
    "a parameter": (TemporaryCopyError, lambda x: x * WEIGHT.to(x.device)),
}
WEIGHT = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize("name", ["a number", pytest.param("a parameter", marks=needs_cuda)])
def test_others_are_refused(name: str) -> None:
    error, make = REFUSED[name]
    fast = graph_step(make, backend=BACKEND)
    with pytest.raises(error, match=r"on the host|host memory"):
        for _ in range(6):
            fast(torch.ones(8, device=DEVICE))


class Adversaries(LightningModule):
    """Two players as in Lightning's own example, with noise and labels that begin in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-2) for part in (self.generator, self.discriminator)]

    def _loss(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(scores, target)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        first, second = self.optimizers()  # type: ignore[attr-defined]
        noise = torch.randn(real.shape[0], 4).type_as(real)
        valid, fake = torch.ones(real.size(0), 1).type_as(real), torch.zeros(real.size(0), 1).type_as(real)
        self.toggle_optimizer(first)
        loss = self._loss(self.discriminator(self.generator(noise)), valid)
        self.log("generator", loss, prog_bar=True)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        made = self.generator(noise).detach()
        loss = (self._loss(self.discriminator(real), valid) + self._loss(self.discriminator(made), fake)) / 2
        self.log("discriminator", loss, prog_bar=True)
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)


def test_two_players_in_a_trainer() -> None:
    states, callback = [], GraphPlanCallback(min_speedup=0)
    for callbacks in ([], [callback]):
        seed_everything(0, verbose=False)
        module = Adversaries()
        loader = DataLoader(TensorDataset(torch.randn(128, 8)), 8)
        trainer = Trainer(
            max_epochs=2, callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accelerator="gpu" if CUDA else "cpu", devices=1,
        )  # fmt: skip
        trainer.fit(module, loader)
        states.append([torch.get_rng_state(), *(value.cpu() for value in module.state_dict().values())])
    assert callback.stats.replayed >= 24
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert torch.equal(states[0][0], states[1][0])


class Queue(nn.Module):
    """Keeps the latest keys, as momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.register_buffer("keys", torch.zeros(12, 4))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        found = self.encoder(x)
        scores = found @ self.keys.clone().T
        at = int(self.at)
        with torch.no_grad():
            self.keys[at : at + len(x)] = found
            self.at[0] = (at + len(x)) % len(self.keys)
        return scores.logsumexp(1) + found.square().sum(1)


def test_a_pointer_of_the_devices_that_goes_round() -> None:
    """It is not read where it only says where keys are written: one program serves all of its values."""
    runs = []
    for replays in (False, True):
        torch.manual_seed(0)
        model = Queue().to(DEVICE)
        optimizer = SGD(model.parameters(), lr=0.05, fused=True)

        def step(x: Tensor, model: Queue = model, optimizer: SGD = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        owners = {"model": model, "optimizer": optimizer}
        fast: Callable[[Tensor], Tensor] = graph_step(step, owners=owners, backend=BACKEND) if replays else step
        losses = [fast(torch.randn(4, 8).to(DEVICE)).clone() for _ in range(40)]
        runs.append([*losses, *model.state_dict().values()])
    assert [torch.equal(one, other) for one, other in zip(*runs, strict=True)] == [True] * len(runs[0])
    assert fast.stats.captured == 1  # type: ignore[attr-defined]
    assert fast.stats.replayed >= 20  # type: ignore[attr-defined]
