"""Digests of Lightning's code: which releases are known, what depends on them, and what does not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from graphplan.callback import lightning_code
from graphplan.callback.lightning_code import KNOWN, PARTS, digest_of, is_known
from tests.lightning.parts import LitDigits, assert_same_fits, fit, tape
from tests.lightning.test_loop import reasons


@pytest.mark.parametrize("part", PARTS)
def test_what_is_installed_is_known(part: str) -> None:
    """If this fails with a new release of Lightning: see the module's docstring."""
    found = digest_of(part)
    assert found in KNOWN[part], f"Lightning {lightning.__version__} has the digest {found!r} for {part!r}"


@pytest.fixture
def _unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release of Lightning, of which no code is known."""
    monkeypatch.setattr(lightning_code, "KNOWN", {part: {} for part in PARTS})


@pytest.mark.usefixtures("_unknown")
def test_a_release_that_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loop runs, and logs and shows; steps are replayed all the same."""
    run = partial(fit, LitDigits, max_epochs=2, enable_progress_bar=True, log_every_n_steps=2)
    expected, found = run(tmp_path / "eager"), run(tmp_path / "graphed", tape())
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= 8
    (reason,) = reasons(found.callback)
    assert f"graphplan does not know the loop of Lightning {lightning.__version__}" in reason


def test_a_method_that_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that another package puts into Lightning's class is unknown as well."""
    plain = _TrainingEpochLoop.on_advance_end

    def on_advance_end(self: Any, data_fetcher: Any) -> None:
        plain(self, data_fetcher)

    assert is_known("loop")
    monkeypatch.setattr(_TrainingEpochLoop, "on_advance_end", on_advance_end)
    assert not is_known("loop")
    found = fit(LitDigits, tmp_path, tape(), max_epochs=1)
    assert len(reasons(found.callback)) == 1
    assert found.callback.stats.replayed >= 2


def test_a_method_without_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_TrainingEpochLoop, "on_advance_end", len)
    assert digest_of("loop") == ""
    assert not is_known("loop")
