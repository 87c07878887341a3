"""The mistake that each row is about: a recording that is replayed without looking.

``naive`` copies inputs into static ones and replays. It has no guards, pushes no learning rate, repeats no Python and
clones no results. Where nothing changes between two calls it is as good as eager, which :func:`assert_handled` checks
through ``control``; a row's test bites because there it is not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils import _pytree as pytree

from graphplan.backends.tape import TapeBackend
from tests.models import CLASSES, Mlp, float_batches
from tests.twins import Record, Rig, assert_same_runs, build, drive, managed

CALLS, WHEN = 24, 12
"""Calls of a run, and the call after which the host changes something: long after the capture."""
ADAMW = partial(AdamW, lr=1e-2, fused=True)
Change = Callable[[Any, Any], object]


def naive(step: Callable[..., Any], *, at: int = 3, rehearsals: int = 0) -> Callable[..., Any]:
    """``step``, recorded on call ``at`` (from 1) and replayed ever after; before it, run ``rehearsals`` more times."""
    statics: list[Any] = []
    made: list[Any] = []
    count = 0

    def call(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count < at:
            return step(*args)
        leaves, structure = pytree.tree_flatten(args)
        if made:
            for static, leaf in zip(statics, leaves, strict=False):
                if isinstance(static, Tensor) and isinstance(leaf, Tensor):
                    static.copy_(leaf)
            made[0].replay()
            return made[1]
        statics.extend(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        body = partial(step, *pytree.tree_unflatten(statics, structure))
        for _ in range(rehearsals):
            body()
        made.extend(TapeBackend().record(body))
        return made[1]

    return call


def run_naively(make: Callable[[], Rig], **options: Any) -> Record:
    """A rig's calls through :func:`naive`."""
    rig = build(make)
    return drive(rig, naive(rig.step, **options))


def run_eagerly(make: Callable[[], Rig]) -> Record:
    """A rig's calls as they are."""
    rig = build(make)
    return drive(rig, rig.step)


def assert_naive_is_wrong(make: Callable[[], Rig], **options: Any) -> None:
    """Fail if the row could not go wrong."""
    expected, found = run_eagerly(make), run_naively(make, **options)
    with pytest.raises(AssertionError, match="differences"):
        assert_same_runs(expected, found)


def assert_handled(
    make: Callable[[], Rig], *, replayed: int = CALLS - 12, control: Callable[[], Rig] | None = None, **options: Any
) -> Any:
    """Check that graphplan equals eager bit by bit, has replayed, and that the naive way is wrong.

    Args:
        make: Builds the rig.
        replayed: The least number of replays.
        control: Builds the rig without the failure: there the naive way must be right.
        options: Passed to ``graph_step``.
    """
    assert_naive_is_wrong(make)
    if control is not None:
        assert_same_runs(run_eagerly(control), run_naively(control))
    rig = build(make)
    step = managed(rig, **options)
    found = drive(rig, step)
    assert_same_runs(run_eagerly(make), found)
    assert step.stats.replayed >= replayed, step.stats
    return step


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of one batch."""
    return F.cross_entropy(model(x), y)


def stay(model: Any, optimizer: Any) -> None:
    """No change."""


def changing_rig(
    change: Change,
    loss: Callable[..., Tensor] = loss_of,
    *,
    prepare: Callable[[Any], object] = lambda model: None,
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = ADAMW,
    make_model: Callable[[], nn.Module] = Mlp,
    calls: Iterable[tuple[Any, ...]] | None = None,
    each: Callable[[Any, Any, int], object] = lambda model, optimizer, index: None,
) -> Rig:
    """A usual step with ``loss``, around which the host calls ``change(model, optimizer)`` after call ``WHEN``."""
    model = make_model()
    prepare(model)
    optimizer = make_optimizer(model.parameters())

    def train_step(*batch: Any) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, *batch)
        value.backward()
        optimizer.step()
        return value

    def after(index: int) -> None:
        each(model, optimizer, index)
        if index == WHEN:
            change(model, optimizer)

    batches = float_batches(CALLS) if calls is None else calls
    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(batches), after)


def assert_change_handled(change: Change, *args: Any, replayed: int = CALLS - 12, **options: Any) -> Any:
    """:func:`assert_handled` for a change of the host's, with the unchanged run as its control."""
    changed, unchanged = (partial(changing_rig, each, *args, **options) for each in (change, stay))
    return assert_handled(changed, control=unchanged, replayed=replayed)


class Normless(nn.Sequential):
    """A model that takes batches of one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def seeded(model: Any) -> None:
    """Seed the host's generators, as a ``prepare`` of :func:`changing_rig`."""
    random.seed(1)
    np.random.seed(1)


PLAIN = partial(changing_rig, stay)
"""The usual step, to which nothing happens."""
