"""What reads a tensor's values on the host, in torch's modes: right when the values change, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan import HostSyncError, graphed
from tests.crossing import by_key, each
from tests.twins import by_chance

Step = Callable[[Tensor, Tensor], Tensor]
READS: dict[str, Step] = {
    "all": lambda x, m: x * 2 if m.all() else x * 3,
    "any": lambda x, m: x * 2 if (~m).any() else x * 3,
    "sum": lambda x, m: x * 2 if m.sum() == 4 else x * 3,
    "not": lambda x, m: x * 2 if not (m.int().min() < 1) else x * 3,
    "builtin max": lambda x, m: x * 2 if max(m.int()) == min(m.int()) else x * 3,
    "between": lambda x, m: x * 2 if 1 < m.sum() < 4 else x * 3,
    "item": lambda x, m: x ** m.sum().item(),
    "int": lambda x, m: x * int(m.sum()),
    "float": lambda x, m: x * complex(m.sum()).real,
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
BRANCHES = ("all", "any", "sum", "not", "builtin max", "between", "format", "contains", "is_nonzero", "equal")
"""Those that read nothing but truth values, which replays compare."""
POSITIONS = ("mask", "masked_select", "nonzero", "argwhere", "where", "combinations")
"""Those that read nothing but positions that a mask selects: replays compare whether it selects all."""
FINE: dict[str, Step] = {
    "one_hot": lambda x, m: F.one_hot(m.long(), 5).float(),
    "fill_": lambda x, m: x.clone().fill_(m.sum()),
    "clamp": lambda x, m: x.clamp(min=m.sum() - 4),
    "power": lambda x, m: x.abs() ** m.sum(),
    "where of three": lambda x, m: torch.where(m, x, -x),
    "masked_fill": lambda x, m: x.masked_fill(m, 0.5),
    "einsum": lambda x, m: torch.einsum("i,j->ij", x, m.float()),
    "inner": lambda x, m: torch.inner(x, m.float()),
    "repeat_interleave to a size": lambda x, m: x.repeat_interleave(m.long() * 0 + 1, output_size=4),
    "index": lambda x, m: x[m.long()],
    "cumsum": lambda x, m: x * m.cumsum(0),
}


class _Operators(TorchDispatchMode):
    """Notes the operators that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


with _Operators() as _found:
    torch.quantile(torch.ones(4), torch.tensor(0.5))
# PyTorch 2.8 compares the second argument with 0 and 1 on the host.
_QUANTILE: dict[str, Step] = {"quantile": lambda x, m: torch.quantile(x.float(), m.float().mean())}
(READS if "aten.equal.default" in _found.names else FINE).update(_QUANTILE)
MODES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], bool]] = {
    "grad": (torch.enable_grad, False),
    "no_grad": (torch.no_grad, False),
    "inference_mode": (torch.inference_mode, False),
    "autocast": (torch.no_grad, True),
    "inference_mode and autocast": (torch.inference_mode, True),
}
"""What autograd does, and whether autocast is on."""
ON_THE_HOST = {"numpy", "equal", "allclose", "quantile"}
"""What reads host memory alone: a GPU's tensors are refused by PyTorch itself, or, for quantiles, not compared."""
BY_MEMORY = ["tolist", "numpy"]
"""What reads memory without an operator, which nothing can do before the step."""


def entered(mode: str, device: torch.device) -> ExitStack:
    """The mode."""
    make, casts = MODES[mode]
    stack = ExitStack()
    stack.enter_context(make())
    if casts:
        stack.enter_context(torch.autocast(device.type, torch.bfloat16))
    return stack


def within(step: Step, mode: str, device: torch.device) -> Step:
    """A step that enters the mode itself."""

    def run(x: Tensor, m: Tensor) -> Tensor:
        with entered(mode, device):
            return step(x, m)

    return run


def calls(device: torch.device, *, selects_all: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Calls with one mask, which ``selects_all`` or a part, then with another."""
    x = torch.randn(4).to(device)
    masks = [torch.tensor([True, selects_all, True, True])] * 8 + [torch.tensor([True, False, True, selects_all])] * 4
    return [(x, mask.to(device)) for mask in masks]


PLACES = by_key({"around the step": False, "in the step": True})
OF_AUTOGRAD = ["grad", "no_grad", "autocast"]
WITHOUT = ["inference_mode", "inference_mode and autocast"]
"""Modes in which operators that are made of others are not taken apart by autograd."""


def of_modes(name: str, steps: Any) -> Any:
    """Each step in a mode of either kind, around it or in it."""

    def parametrize(test: Any) -> Any:
        cases = [
            case
            for modes in (OF_AUTOGRAD, WITHOUT)
            for case in each(mode=modes, inside=PLACES, **{name: steps}).args[1]
        ]
        return pytest.mark.parametrize(("mode", "inside", name), cases)(test)

    return parametrize


def refuse(
    function: Step,
    around: AbstractContextManager[Any],
    device: torch.device,
    backend: str,
    *,
    selects_all: bool = True,
) -> None:
    """Fail unless a function is refused, and its line named."""
    fast = graphed(function, backend=backend, min_speedup=0)
    with pytest.raises(HostSyncError, match=r"test_data_reads\.py:\d+ in"), around:
        for call in calls(device, selects_all=selects_all):
            fast(*call)
    assert fast.stats.replayed == 0


def compare(function: Step, around: AbstractContextManager[Any], device: torch.device, backend: str) -> None:
    """Check that replays compare what a function reads: calls with another mask give what is given without replays."""
    fast = graphed(function, backend=backend, min_speedup=0)
    with around:
        for call in calls(device):
            assert torch.equal(fast(*call), function(*call))
    assert fast.stats.replayed > 0
    assert fast.plan is not None
    assert fast.plan.branches


@of_modes("read", READS)
def test_reads_of_random_numbers_are_refused_or_compared(
    read: str, mode: str, inside: bool, device: torch.device, backend: str
) -> None:
    if device.type == "cuda" and read in ON_THE_HOST:
        pytest.skip("reads tensors in host memory alone")

    def step(x: Tensor, m: Tensor) -> Tensor:
        return READS[read](x, by_chance(m))

    function = within(step, mode, device) if inside else step
    around = torch.no_grad() if inside else entered(mode, device)
    if read in BRANCHES:
        compare(function, around, device, backend)
    else:
        refuse(function, around, device, backend, selects_all=read not in POSITIONS)


@of_modes("read", POSITIONS)
def test_positions_of_all_are_compared(read: str, mode: str, inside: bool, device: torch.device, backend: str) -> None:
    """Random numbers decide whether a mask selects all."""

    def step(x: Tensor, m: Tensor) -> Tensor:
        return READS[read](x, by_chance(m))

    function = within(step, mode, device) if inside else step
    compare(function, torch.no_grad() if inside else entered(mode, device), device, backend)


@of_modes("read", BY_MEMORY)
def test_reads_of_memory_are_refused(read: str, mode: str, inside: bool, device: torch.device, backend: str) -> None:
    if device.type == "cuda" and read in ON_THE_HOST:
        pytest.skip("reads tensors in host memory alone")
    function = within(READS[read], mode, device) if inside else READS[read]
    refuse(function, torch.no_grad() if inside else entered(mode, device), device, backend)


@of_modes("read", [name for name in READS if name not in BY_MEMORY])
def test_reads_of_the_batch_are_made_before_it(
    read: str, mode: str, inside: bool, device: torch.device, backend: str
) -> None:
    if device.type == "cuda" and read in ON_THE_HOST:
        pytest.skip("reads tensors in host memory alone")
    function = within(READS[read], mode, device) if inside else READS[read]
    fast = graphed(function, backend=backend, min_speedup=0)
    first, second = calls(device)[0], calls(device)[-1]
    with torch.no_grad() if inside else entered(mode, device):
        for call in [first] * 7 + [second] * 6 + [first, second] * 2:
            found, expected = fast(*call), function(*call)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    assert fast.stats.replayed >= 5, fast.report()


@of_modes("step", FINE)
@pytest.mark.twice
def test_what_reads_nothing_is_replayed(step: str, mode: str, inside: bool, device: torch.device, backend: str) -> None:
    function = within(FINE[step], mode, device) if inside else FINE[step]
    fast = graphed(function, backend=backend, min_speedup=0)
    with torch.no_grad() if inside else entered(mode, device):
        for call in calls(device):
            found, expected = fast(*call), function(*call)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    assert fast.stats.replayed == 8
