"""What a step leaves set, on the device: CUDA has switches of its own, and its kernels are chosen by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from graphplan.environment.switches import SWITCHES, Switch, read_all, set_all
from tests.devices import BACKEND, CUDA, on_device, oracle
from tests.effects.test_left_modes import BASE, SETTABLE, Acts, make_rig, make_switching, other_value
from tests.twins import Rig, build, managed


@pytest.fixture(autouse=True)
def _switches_go_back() -> Iterator[None]:
    yield
    set_all(BASE)


def _flags(rig: Rig) -> list[Any]:
    """Modes, flags and switches now."""
    model, optimizer = rig.owners["model"], rig.owners["optimizer"]
    groups = [
        {key: group[key] for key in ("weight_decay", "betas", "stage") if key in group}
        for group in optimizer.param_groups
    ]
    modes = [module.training for module in model.modules()]
    return [modes, [parameter.requires_grad for parameter in model.parameters()], groups, read_all()]


def _check(make: Callable[[], Rig], **options: Any) -> Any:
    """Outputs are near eager's in each call, and modes, flags and switches the same after it."""
    records: list[list[Any]] = []
    for graph in (False, True):
        rig = build(on_device(make))
        step: Any = managed(rig, backend=BACKEND, warmup_steps=1, **options) if graph else oracle(rig)
        records.append([])
        for index, args in enumerate(rig.calls):
            result = step(*args)
            records[-1].append((result.detach().clone(), _flags(rig)))
            rig.after(index)
    for number, ((left, before), (right, after)) in enumerate(zip(*records, strict=True)):
        assert before == after, f"after call {number}"
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    assert step.stats.replayed >= 5, step.stats
    return step


@pytest.mark.parametrize("verify", ["off", 2])
@pytest.mark.parametrize("host", ["nothing", "all back", "back every third", "a validation"])
@pytest.mark.parametrize(
    "acts",
    [
        Acts(start=("train",)),
        Acts(end=("eval",)),
        Acts(start=("backbone.eval",), end=("weight decay",)),
        Acts(middle=("one bias",)),
        Acts(start=("freeze",)),
        Acts(start=("weight decay", "a tuple"), end=("a new entry",)),
    ],
    ids=str,
)
def test_graphs_leave_what_the_step_leaves(acts: Acts, host: str, verify: Any) -> None:
    """Also in checks, between which replays come."""
    _check(partial(make_rig, Acts(acts.start, acts.middle, acts.end, host)), verify=verify)


@pytest.mark.parametrize("switch", SETTABLE, ids=lambda switch: switch.name)
def test_switches_are_left_on_the_device(switch: Switch) -> None:
    """Each at the end of the step, which the host puts back."""
    make = partial(make_switching, switch, other_value(switch), begin=False, end=True, host=True)
    _check(make, verify="off")


_TF32 = [switch for switch in SWITCHES if "tf32" in switch.name or "matmul in torch.backends.cuda" in switch.name]
_KERNELS = [*_TF32, *(switch for switch in SETTABLE if switch.name.startswith("torch.backends.cudnn"))]


@pytest.mark.parametrize("switch", _KERNELS, ids=lambda switch: switch.name)
@pytest.mark.parametrize("end", [True, False])
def test_kernels_are_those_of_the_switches_that_the_step_sets(switch: Switch, end: bool) -> None:
    """A graph has them from the capture."""
    make = partial(make_switching, switch, other_value(switch), begin=True, end=end, host=True)
    _check(make, verify="off")


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("library", ["blas", "linalg"])
def test_preferred_libraries_are_left(library: str) -> None:
    """A build for the CPU has no second one."""
    switch = next(switch for switch in SWITCHES if switch.name == f"torch.backends.cuda.preferred_{library}_library")
    value = torch._C._BlasBackend.Cublaslt if library == "blas" else torch._C._LinalgBackend.Cusolver
    _check(partial(make_switching, switch, value, begin=False, end=True, host=True), verify="off")
