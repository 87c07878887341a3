"""What somebody puts in the place of a tensor, and takes out again: replays leave it what it is in eager runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from graphplan import graph_step

CALLS, FIRST = 32, 10


class _Model(nn.Module):
    """Has a parameter, a buffer that it reads, and a hidden state that each step carries on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.hidden = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = 0.5 * self.hidden + x.detach().mean(0)
        return self.layer(x) * self.scale + self.hidden


class _Run:
    """A training and an evaluation step on one model, and what somebody keeps of it meanwhile."""

    def __init__(self, *, graphed: bool, device: Any, backend: str) -> None:
        torch.manual_seed(0)
        self.model = _Model().to(device)
        self.model.hidden = self.model.hidden.to(device)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.shadow = {name: 0.5 * p.detach() for name, p in self.model.named_parameters()}
        self.kept: Any = None
        owners = {"model": self.model, "optimizer": self.optimizer}
        self.train: Any = self._train
        self.evaluate: Any = self._evaluate
        if graphed:
            self.train = graph_step(self._train, owners=owners, verify="off", backend=backend)
            options = {"mode": "inference", "verify": "off", "backend": backend}
            self.evaluate = graph_step(self._evaluate, owners={"model": self.model}, **options)

    def _train(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _evaluate(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return (self.model.layer(x) * self.model.scale).sum()


def _buffer(run: _Run, x: Tensor) -> list[Any]:
    old, run.model.scale = run.model.scale, torch.full((4,), 0.5, device=x.device)
    seen = [run.train(x), old]
    run.model.scale = old
    return seen


def _own_buffer(run: _Run, x: Tensor) -> list[Any]:
    """Whoever has put it in place goes on writing to it."""
    kept = torch.full((4,), 0.5, device=x.device)
    run.model.scale = kept
    seen = [run.train(x), kept.clone()]
    kept.mul_(3.0)
    return [*seen, run.train(x), run.model.scale is kept]


def _part(run: _Run, x: Tensor) -> list[Any]:
    """It is a part of something that goes on changing."""
    kept = torch.full((2, 4), 0.5, device=x.device)
    run.model.scale = kept[1]
    seen = [run.train(x)]
    kept.mul_(3.0)
    return [*seen, run.train(x), kept]


def _hidden(run: _Run, x: Tensor) -> list[Any]:
    old, run.model.hidden = run.model.hidden, torch.zeros(4, device=x.device)
    seen = [run.train(x), old]
    run.model.hidden = old
    return seen


def _reset(run: _Run, x: Tensor) -> list[Any]:
    run.model.hidden = torch.zeros(4, device=x.device)
    return []


def _in_turns(run: _Run, x: Tensor) -> list[Any]:
    """Two programs of one step: the one that comes last has not met what was there meanwhile."""
    run.model.scale = torch.full((4,), 0.5, device=x.device)
    seen = [run.train(x[:2])]
    old, run.model.scale = run.model.scale, torch.full((4,), 2.0, device=x.device)
    return [*seen, run.train(x), old]


def _view(run: _Run, x: Tensor) -> list[Any]:
    old = run.model.scale.view(2, 2)
    run.model.scale = torch.full((4,), 0.5, device=x.device)
    return [run.train(x), old]


def _backup(run: _Run, x: Tensor, *, step: str = "train") -> list[Any]:
    backup = {name: p.data for name, p in run.model.named_parameters()}
    for name, p in run.model.named_parameters():
        p.data = run.shadow[name]
    seen = [getattr(run, step)(x), *run.shadow.values()]
    for name, p in run.model.named_parameters():
        p.data = backup[name]
    return seen


def _evaluated_backup(run: _Run, x: Tensor) -> list[Any]:
    return _backup(run, x, step="evaluate")


def _rollback(run: _Run, x: Tensor) -> list[Any]:
    """torch goes on with the tensors of the dictionary that it loads."""
    if run.kept is None:
        run.kept = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.load_state_dict(run.kept)
    return [run.train(x), run.kept]


KEPT: dict[str, tuple[Callable[[_Run, Tensor], list[Any]], int]] = {
    "a buffer, put back": (_buffer, 1),
    "a buffer, written to": (_own_buffer, 1),
    "a part of a buffer, written to": (_part, 5),
    "a hidden state, put back": (_hidden, 1),
    "a buffer of two programs": (_in_turns, 2),
    "a hidden state, made anew": (_reset, 1),
    "a view of a buffer": (_view, 5),
    "parameters' data, put back": (_backup, 5),
    "parameters' data while evaluating": (_evaluated_backup, 1),
    "an optimizer's state, loaded again": (_rollback, 1),
}
"""What is done, and how many captures of the training step that takes at most."""


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.crossed(2)
def test_what_is_kept_stays_what_it_is(name: str, device: torch.device, backend: str) -> None:
    """Values that are moved to the memory that a recording has are not moved over those of others."""
    tolerance = {} if device.type == "cpu" else {"rtol": 1e-4, "atol": 1e-5}
    assert_kept(name, device, backend, **tolerance)


def assert_kept(name: str, device: torch.device, backend: str, **tolerance: float) -> None:
    """Drive both steps with one of the changes now and then, eagerly and graphed, and compare all that anybody sees."""
    change, most = KEPT[name]

    def drive(*, graphed: bool) -> tuple[list[Any], Any]:
        run = _Run(graphed=graphed, device=device, backend=backend)
        seen: list[Any] = []
        for number in range(CALLS):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(device)
            seen += [run.train(x), run.evaluate(x)]
            if number < FIRST and change is _in_turns:
                seen += [run.train(x[:2])]
            if number >= FIRST and number % 6 == 4:
                seen += change(run, x)
            seen = copy.deepcopy(seen)
        return [*seen, copy.deepcopy(run.model.state_dict())], run

    expected, _ = drive(graphed=False)
    found, run = drive(graphed=True)
    torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 0, "atol": 0}))
    assert run.train.stats.captured <= most
    assert run.train.stats.replayed >= CALLS // 3
