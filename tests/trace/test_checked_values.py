"""Operators that only look at values, and raise: a replay looks as the eager step does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from graphplan import HostSyncError
from tests.crossing import each
from tests.facts import assert_same, flatten
from tests.models import attributes, updating_rig
from tests.twins import BEFORE_REPLAY, Rig, assert_refused, build, keep, line_of, managed, state_of

BAD = BEFORE_REPLAY + 2, BEFORE_REPLAY + 3, BEFORE_REPLAY + 6


class Counting(nn.Module):
    """Counts its calls, before it looks and after it."""

    def __init__(self, check: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.check = check
        self.register_buffer("begun", torch.zeros(()))
        self.register_buffer("ended", torch.zeros(()))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.begun += 1
        found = self.check(x)
        self.ended += 1
        return found * self.begun


def cholesky(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(x)


def inverse(x: Tensor) -> Tensor:
    return torch.linalg.inv(x)


def solved(x: Tensor) -> Tensor:
    return torch.linalg.solve(x, torch.ones(2))


def asserted(x: Tensor) -> Tensor:
    torch._assert_async(x[0, 0] > 0)
    return x * 2


def asserted_with_reason(x: Tensor) -> Tensor:
    torch._assert_async(x[0, 0] > 0, "positive")
    return x * 2


def distributed(x: Tensor) -> Tensor:
    return MultivariateNormal(torch.zeros(2), x, validate_args=False).log_prob(torch.ones(2))


CHECKS = [cholesky, inverse, solved, asserted, asserted_with_reason, distributed]


def counting_rig(check: Callable[[Tensor], Tensor]) -> Rig:
    """Some of its matrices are neither positive definite nor invertible."""
    model = Counting(check)
    matrices = [torch.eye(2) * (2.0 if index not in BAD else -1.0) for index in range(16)]
    for index in BAD:
        matrices[index][0, 0] = 0.0 if check is not cholesky else -1.0
    return Rig(model, {"model": model}, [(matrix,) for matrix in matrices])


def _errors(rig: Rig, call: Callable[..., Any]) -> tuple[list[Any], list[str]]:
    """What the calls returned or raised, and what the last of those said."""
    found: list[Any] = []
    said: list[str] = []
    for args in rig.calls:
        try:
            found.append(keep(call(*args)))
        except RuntimeError as error:
            found.append(type(error).__name__)
            said.append(str(error).partition("\n")[0])
        found.append(state_of(rig))
    return found, said


@each(verify=["off", "geometric", 1], check=CHECKS)
def test_a_replay_raises_what_the_eager_step_raises(check: Callable[[Tensor], Tensor], verify: str | int) -> None:
    """With the same words and the state that eager leaves, checked or not; the calls after it are replays again."""
    rig = build(partial(counting_rig, check))
    expected, told = _errors(rig, rig.step)
    rig = build(partial(counting_rig, check))
    step = managed(rig, verify=verify)
    found, said = _errors(rig, step)
    assert len(told) == len(BAD)
    assert said == told
    assert_same(flatten(found=expected), flatten(found=found))
    assert step.stats.replayed > 0
    assert step.stats.captured == 1


def elsewhere(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    torch.linalg.cholesky(torch.eye(2, device="meta"))  # culprit


def test_a_check_on_a_device_is_a_host_read() -> None:
    """There torch copies what it looks at to the host: the operator, the line, and what looks at nothing."""
    make = partial(updating_rig, elsewhere, attributes())
    text = rf"aten\._linalg_check_errors\.default checks on the host whether .* at {line_of(elsewhere)}.*cholesky_ex"
    assert_refused(make, HostSyncError, text)
