"""Operators that run Python are watched like the step's own code; those of torch's that do not are let run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphplan.tracer.profile import Aside, Profile, is_native

AIRY = torch.ops.aten.special_airy_ai.default


def own_airy(x: Tensor) -> Tensor:
    """What somebody may put in for torch's kernel."""
    return x * 3


@torch.library.custom_op("graphplan_tests::in_python", mutates_args=())
def in_python(x: Tensor) -> Tensor:
    """An operator of somebody's own."""
    return own_airy(x)


@pytest.fixture
def overridden() -> Iterator[None]:
    """An operator of torch's that runs Python on the CPU, for one test."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("special_airy_ai", own_airy, "CPU")
    try:
        yield
    finally:
        library._destroy()


def ran(func: Any) -> bool:
    """Whether a profile sees :func:`own_airy` run in ``func``."""
    with Profile() as profile, Aside() as aside:
        aside.run(func, (torch.ones(2),), {})
    return own_airy.__code__ in profile.ran.codes


def test_torchs_own_kernels() -> None:
    assert is_native(torch.ops.aten.add.Tensor)
    assert is_native(AIRY)
    assert not ran(AIRY)


def test_an_operator_of_somebodys_own() -> None:
    assert not is_native(torch.ops.graphplan_tests.in_python.default)
    assert ran(torch.ops.graphplan_tests.in_python.default)


@pytest.mark.usefixtures("overridden")
def test_a_kernel_of_torchs_that_somebody_has_replaced() -> None:
    """Also where it has run before."""
    assert not is_native(AIRY)
    assert ran(AIRY)
