"""The naive way inside a Lightning Trainer, and modules that bring their callbacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from tests.facts import assert_same
from tests.failure_modes.naive import naive
from tests.lightning.parts import LitDigits, fit, with_step

FULL = 21
"""Replays of three epochs: 27 full batches less the six before the first replay."""
EVEN = {"sizes": (32,) * 9}
"""Batches of one size, which the naive seam cannot do without."""


class NaiveSeam(Callback):
    """A Trainer's optimization step under :func:`naive`."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        stock = loop.run
        now: list[Any] = []

        def body(batch: Any) -> Any:
            optimizer, index, kwargs = now
            return stock(optimizer, index, type(kwargs)({**kwargs, "batch": batch}))

        replayed = naive(body)

        def run(*args: Any) -> Any:
            now[:] = args
            return replayed(args[2]["batch"])

        loop.run = run

    def on_train_end(self, trainer: Any, module: Any) -> None:
        del trainer.fit_loop.epoch_loop.automatic_optimization.run


def assert_naive_fit_is_wrong(make: Callable[[], Any], folder: Path, **options: Any) -> None:
    """Fit eagerly and through a recording that nobody guards: they have to differ."""
    options = {**EVEN, **options}
    expected = fit(make, folder / "naive eager", **options)
    found = fit(make, folder / "naive", NaiveSeam(), **options)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="differences"):
        assert_same(expected.state, found.state)


def with_callbacks(*kinds: Callable[[], Callback], base: type[LitDigits] = LitDigits) -> type[LitDigits]:
    """A module that brings its callbacks."""
    return with_step(base.training_step, base, configure_callbacks=lambda self: [kind() for kind in kinds])
