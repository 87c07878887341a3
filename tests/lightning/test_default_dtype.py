"""Precision plugins that set torch's default dtype while a step runs: what it logs is of that dtype, as without us."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, Precision
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from graphplan.callback.lightning_code import KNOWN, digest_of
from tests.crossing import each
from tests.lightning.parts import FUSED_ADAMW, Fit, LitDigits, assert_same_fits, fit, tape

pytestmark = pytest.mark.filterwarnings("ignore:You called `self.log:UserWarning")


def _on_plateau(optimizer: Any) -> Any:
    return {"scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=0), "monitor": "single_epoch"}


class Kinds(LitDigits):
    """Logs values of many dtypes, in steps and in hooks that run outside of the plugin's context."""

    def __init__(self, schedule: Any = _on_plateau) -> None:
        super().__init__(partial(FUSED_ADAMW, lr=1e-2), schedule)

    def loss_of(self, batch: Any) -> Tensor:
        logits = self(batch[0].to(self.net[0].weight.dtype))
        hits = logits.argmax(1) == batch[1]
        log = partial(self.log, on_step=True, on_epoch=True)
        log("single", hits.to(torch.float32).mean())
        log("count", hits.sum())
        log("most", hits.sum(), reduce_fx="max")
        log("all", hits.sum().to(torch.float32), reduce_fx="sum")
        log("any", hits.any())
        log("half", hits.bfloat16().mean())
        log("number", 0.1)
        log("double", logits.double().mean())
        self.log("of step", hits.sum(), on_step=True, on_epoch=False)
        self.log("of epoch", hits.to(torch.float32).mean() / 3, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch))

    def on_after_backward(self) -> None:
        self.log("hook", self.net[0].bias.grad.float().sum(), on_step=True, on_epoch=True)
        self.log("hook's count", (self.net[0].bias.grad > 0).sum(), on_step=True, on_epoch=True)


class Doubles(DoublePrecision):
    """Leaves batches alone, so that the loop over them is ours."""

    convert_input = Precision.convert_input  # type: ignore[assignment]


PLUGINS: dict[str, dict[str, Any]] = {
    "64-true": {"precision": "64-true"},
    "16-true": {"precision": "16-true"},
    "bf16-true": {"precision": "bf16-true"},
    "the fast loop": {"plugins": Doubles()},
}


@each(options=[{}, {"eval": True}, {"loop": "stock"}], name=PLUGINS)
@pytest.mark.crossed(2)
def test_metrics_have_the_dtype_that_lightning_gives_them(name: str, options: Any, tmp_path: Path) -> None:
    """Rows, means, what callbacks see, and the scheduler that goes by a mean."""
    expected = fit(Kinds, tmp_path / "eager", max_epochs=4, **PLUGINS[name])
    found = fit(Kinds, tmp_path / "graphed", tape(warmup_steps=1, **options), max_epochs=4, **PLUGINS[name])
    is_fast = name == "the fast loop" and "loop" not in options
    assert ("Lightning's own loop" not in found.callback.report()) == is_fast
    dtype = torch.float32 if "16" in name else torch.float64
    assert found.trainer.callback_metrics["single_epoch"].dtype is dtype
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed > 20
    assert not options.get("eval") or found.callback.eval_stats.replayed


class SumsAndCasts(LitDigits):
    """A loss in float64, and a share in float32, which Lightning casts."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("share", (logits.argmax(1) == batch[1]).to(torch.float32).mean(), on_step=True, on_epoch=True)
        return loss


def _logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    plain = _ResultCollection.log

    def log(self: Any, fx: str, name: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return plain(self, fx, name, *args, **kwargs)

    monkeypatch.setattr(_ResultCollection, "log", log)
    monkeypatch.setitem(KNOWN["logs"], digest_of("logs"), "this test's")
    return calls


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")
def test_what_lightning_casts_keeps_nothing_else_out_of_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _logged(monkeypatch)
    options: dict[str, Any] = {"precision": "64-true", "limit_val_batches": 0}
    found: Fit = fit(SumsAndCasts, tmp_path, tape(warmup_steps=1), **options)
    assert "logs.group 0" in {external.path for external in found.callback.plan.state}
    assert calls.count("loss") == 1, "in the first step, which makes the metric"
    assert calls.count("share") == len(found.observer.batches)
