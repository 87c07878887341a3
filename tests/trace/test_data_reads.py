"""What reads a tensor's values on the host, in torch's modes: refused by name, or right when the values change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphplan import HostSyncError, graphed

Step = Callable[[Tensor, Tensor], Tensor]
READS: dict[str, Step] = {
    "all": lambda x, m: x * 2 if m.all() else x * 3,
    "any": lambda x, m: x * 2 if (~m).any() else x * 3,
    "sum": lambda x, m: x * 2 if m.sum() == 4 else x * 3,
    "not": lambda x, m: x * 2 if not (m.int().min() < 1) else x * 3,
    "builtin max": lambda x, m: x * 2 if max(m.int()) == min(m.int()) else x * 3,
    "between": lambda x, m: x * 2 if 1 < m.sum() < 4 else x * 3,
    "item": lambda x, m: x * m.sum().item(),
    "int": lambda x, m: x * int(m.sum()),
    "float": lambda x, m: x * float(m.sum()),
    "tolist": lambda x, m: x * m.tolist()[1],
    "numpy": lambda x, m: x * float(m.numpy()[1]),
    "format": lambda x, m: x * len(f"{m.all()}"),
    "dictionary": lambda x, m: x * {4: 2, 3: 5}[m.sum().item()],
    "contains": lambda x, m: x * 2 if (0 in m.int()) else x * 3,
    "equal": lambda x, m: x * 2 if torch.equal(m, torch.ones(4, dtype=torch.bool)) else x * 3,
    "allclose": lambda x, m: x * 2 if torch.allclose(m.float(), torch.ones(4)) else x * 3,
    "is_nonzero": lambda x, m: x * 2 if torch.is_nonzero(m.all()) else x * 3,
    "slice": lambda x, m: x[: m.sum()],
    "index of a list": lambda x, m: x * [1, 2, 3, 4, 5][m.sum()],
    "arange": lambda x, m: x[torch.arange(m.sum() - 1)],
    "linspace": lambda x, m: torch.linspace(0, 1, m.sum()),
    "full": lambda x, m: torch.full((2,), m.sum() * 1.0),
    "new_full": lambda x, m: x.new_full((2,), m.sum() * 1.0),
    "narrow": lambda x, m: x.narrow(0, m.sum() - 3, 1),
    "split": lambda x, m: torch.split(x, m.sum())[0],
    "tensor_split": lambda x, m: torch.tensor_split(x, m.sum().reshape(1) - 1)[0],
    "topk": lambda x, m: x.topk(m.sum()).values,
    "roll": lambda x, m: x.roll(int(m.sum())),
    "mask": lambda x, m: x[m],
    "masked_select": lambda x, m: x.masked_select(m),
    "nonzero": lambda x, m: m.nonzero().float(),
    "argwhere": lambda x, m: torch.argwhere(m).float(),
    "where": lambda x, m: torch.where(m)[0].float(),
    "repeat_interleave": lambda x, m: x.repeat_interleave(m.long()),
    "unique": lambda x, m: torch.unique(m.int()).float(),
    "unique_consecutive": lambda x, m: torch.unique_consecutive(m.int()).float(),
    "bincount": lambda x, m: torch.bincount(m.int()).float(),
    "combinations": lambda x, m: torch.combinations(x[m]),
    "one_hot of an unknown number": lambda x, m: F.one_hot(m.long()).float(),
}
FINE: dict[str, Step] = {
    "one_hot": lambda x, m: F.one_hot(m.long(), 5).float(),
    "fill_": lambda x, m: x.clone().fill_(m.sum()),
    "clamp": lambda x, m: x.clamp(min=m.sum() - 4),
    "power": lambda x, m: x.abs() ** m.sum(),
    "quantile": lambda x, m: torch.quantile(x.float(), m.float().mean()),
    "where of three": lambda x, m: torch.where(m, x, -x),
    "masked_fill": lambda x, m: x.masked_fill(m, 0.5),
    "einsum": lambda x, m: torch.einsum("i,j->ij", x, m.float()),
    "inner": lambda x, m: torch.inner(x, m.float()),
    "repeat_interleave to a size": lambda x, m: x.repeat_interleave(m.long() * 0 + 1, output_size=4),
    "index": lambda x, m: x[m.long()],
    "cumsum": lambda x, m: x * m.cumsum(0),
}
MODES: dict[str, list[Callable[[], AbstractContextManager[Any]]]] = {
    "grad": [torch.enable_grad],
    "no_grad": [torch.no_grad],
    "inference_mode": [torch.inference_mode],
    "autocast": [torch.no_grad, partial(torch.autocast, "cpu", torch.bfloat16)],
    "inference_mode and autocast": [torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)],
}


def entered(mode: str) -> ExitStack:
    """The mode."""
    stack = ExitStack()
    for make in MODES[mode]:
        stack.enter_context(make())
    return stack


def within(step: Step, mode: str) -> Step:
    """A step that enters the mode itself."""

    def run(x: Tensor, m: Tensor) -> Tensor:
        with entered(mode):
            return step(x, m)

    return run


def calls() -> list[tuple[Tensor, Tensor]]:
    """Calls with one mask, then with another."""
    x = torch.randn(4)
    masks = [torch.ones(4, dtype=torch.bool)] * 8 + [torch.tensor([True, False, True, True])] * 4
    return [(x, mask) for mask in masks]


@pytest.mark.parametrize("inside", [False, True], ids=["around the step", "in the step"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("read", READS)
def test_reads_are_refused(read: str, mode: str, inside: bool) -> None:
    fast = graphed(within(READS[read], mode) if inside else READS[read])
    with (
        pytest.raises(HostSyncError, match=r"test_data_reads\.py:\d+ in"),
        torch.no_grad() if inside else entered(mode),
    ):
        for call in calls():
            fast(*call)
    assert fast.stats.replayed == 0


@pytest.mark.parametrize("inside", [False, True], ids=["around the step", "in the step"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", FINE)
def test_what_reads_nothing_is_replayed(step: str, mode: str, inside: bool) -> None:
    function = within(FINE[step], mode) if inside else FINE[step]
    fast = graphed(function)
    with torch.no_grad() if inside else entered(mode):
        for call in calls():
            found, expected = fast(*call), function(*call)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    assert fast.stats.replayed == 8
