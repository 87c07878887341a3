"""Features of Lightning and torch that are refused by name; the matrix has those that are replayed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAUROC

from graphplan import CaptureError, HostSyncError, NotCapturedError, SkipReason
from tests.lightning.parts import LitDigits, assert_fit_equals_eager, assert_same_fits, fit, tape, with_step
from tests.lightning.rows_of_parts import Checkpointed, Manual, Network


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_with_dropout(reentrant: bool, tmp_path: Path) -> None:
    """The second forward pass draws the first one's numbers, in replays too."""
    assert_fit_equals_eager(partial(Checkpointed, use_reentrant=reentrant), tmp_path, replayed=21)


def _ranking(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.ranked(self(batch[0]), batch[1])  # culprit
    return self.loss_of(batch)


def _with_metrics() -> LitDigits:
    module: Any = with_step(_ranking)()
    module.ranked = MulticlassAUROC(10)
    return module


def test_a_metric_whose_shapes_depend_on_values(tmp_path: Path) -> None:
    """The line of torchmetrics that makes them is named beside the user's own."""
    place = r"in _ranking: `.*# culprit` \(by precision_recall_curve\.py:\d+ in _binary_clf_curve: "
    text = rf"{place}.*Update the metric after the step"
    with pytest.raises(HostSyncError, match=text):
        fit(_with_metrics, tmp_path, tape(), max_epochs=1)


def _rounded(graph: Any, examples: Any) -> Any:
    """A compiler whose code comes to other bits than what it is made of."""
    return lambda *args: [out * 1.001 for out in graph(*args)]


def _compiled() -> LitDigits:
    torch._dynamo.reset()
    module = LitDigits()
    module.net = torch.compile(Network(module.net), backend=_rounded)
    return module


def test_a_compiler_with_other_numbers(tmp_path: Path) -> None:
    """The tape records what the compiled code is made of; the batch is trained on compiled all the same."""
    text = r"torch\.compile compiled.*another .*loss.* backend='aot_eager'"
    with pytest.raises(CaptureError, match=text):
        fit(_compiled, tmp_path / "raise", tape(), max_epochs=1)
    expected = fit(_compiled, tmp_path / "eager", max_epochs=1)
    with pytest.warns(UserWarning, match=text):
        found = fit(_compiled, tmp_path / "graphed", tape(on_failure="eager"), max_epochs=1)
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed == 0


def _fetching(self: Any, dataloader_iter: Any) -> Tensor:
    batch, _, _ = next(dataloader_iter)
    return self.loss_of(batch)


class _Fetching(Manual):
    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(_fetching(self, dataloader_iter))
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*dataloader_iter` (step flavor|argument)")
@pytest.mark.parametrize("make", [with_step(_fetching), _Fetching], ids=["automatic", "manual"])
def test_a_step_that_fetches_its_batches(make: Any, tmp_path: Path) -> None:
    """The user is told what to take instead, when training starts."""
    text = (
        "training_step takes dataloader_iter and fetches its batches itself.*take the batch as an "
        "argument: def training_step"
    )
    with pytest.raises(NotCapturedError, match=text):
        fit(make, tmp_path / "raise", tape(), max_epochs=1)
    expected = fit(make, tmp_path / "eager", max_epochs=2)
    with pytest.warns(UserWarning, match=text) as caught:
        found = fit(make, tmp_path / "graphed", tape(on_failure="eager"), max_epochs=2)
    assert sum("runs this fit eagerly" in str(warning.message) for warning in caught) == 1
    assert_same_fits(expected, found)
    assert "training_step takes dataloader_iter" in found.callback.report()
    found = fit(make, tmp_path / "untouched", tape(backend="eager"), max_epochs=1)
    assert found.callback.stats.skipped == {SkipReason.BACKEND_EAGER: 10}
