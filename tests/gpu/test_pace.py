"""Which steps wait with their program on a device: those that keep it busy all the time."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from graphplan import SkipReason, idleness
from graphplan.cudagraph import CUDAGraphBackend
from graphplan.step import Backends, GraphedStep, Options, pace
from tests.gpu.helpers import DEVICE, needs_cuda

pytestmark = [needs_cuda, pytest.mark.paced]
CALLS = 24


def layers(width: int, depth: int) -> nn.Sequential:
    """As many linear layers, with what is between them."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))


def trained(width: int, depth: int = 2, rows: int = 1, backends: Backends | None = None, **options: Any) -> GraphedStep:
    """Make calls of a step as fast as the host can: of ``depth`` layers that are ``width`` wide, and an embedding of as
    many ``rows`` that the optimizer takes long for, in one kernel.
    """
    model = nn.ModuleDict({"layers": layers(width, depth), "embedding": nn.Embedding(rows, 1024)}).to(DEVICE)
    optimizer = SGD(model.parameters(), lr=1e-6, momentum=0.9, fused=True)
    x = torch.randn(width, width, device=DEVICE)
    first = torch.zeros(1, dtype=torch.long, device=DEVICE)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model["layers"](x).square().mean() + model["embedding"](first).mean()
        loss.backward()
        optimizer.step()
        return loss

    step = GraphedStep(
        train_step, {"model": model, "optimizer": optimizer}, Options(paced=True, **options), backends=backends
    )
    for _ in range(CALLS):
        step(x)
    torch.cuda.synchronize()
    return step


def test_a_step_that_keeps_the_device_busy_waits() -> None:
    """Several matrix products of 8192 x 8192 take the device far longer than the host takes for all of the step."""
    step = trained(8192)
    assert step.stats.skipped == {SkipReason.BUSY: CALLS - 3}, step.report()
    assert step.stats.captured == 0


def test_steps_that_wait_take_no_second_memory() -> None:
    """Theirs is that of the steps before them, on the same stream."""
    reserved = []
    for options in ({"backend": "eager"}, {}):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        step = trained(8192, **options)
        reserved.append(torch.cuda.memory_reserved() - before)
        step.close()
        del step
    assert reserved[1] <= 1.1 * reserved[0]


def test_it_gets_its_program_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as there is something to gain; or at once, if that is what its user wants."""
    monkeypatch.setattr(pace, "_MOST_IDLE", -1.0)
    step = trained(8192)
    assert step.stats.skipped == {SkipReason.BUSY: 4}, step.report()
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - 3 - 4 - 4)
    assert trained(8192, min_speedup=0).stats.skipped == {}


def test_a_step_that_keeps_the_host_busy_does_not_wait_long() -> None:
    """It is watched for four calls, or for nine if two of three looked otherwise."""
    step = trained(64)
    waits = step.stats.skipped[SkipReason.BUSY]
    assert waits in (4, 9), step.report()
    assert (step.stats.captured, step.stats.replayed) == (1, CALLS - 3 - waits - 4)


def test_one_long_kernel_does_not_make_the_device_busy() -> None:
    """Which it is for a large embedding; the host launches small layers for longer, while there is nothing to do."""
    step = trained(64, depth=120, rows=400_000)
    assert step.stats.skipped == {SkipReason.BUSY: 4}, step.report()
    assert step.stats.captured == 1


def test_nobody_looks_at_a_stream_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would give the capture up. Another step of the same owner may be watched meanwhile, on the same stream."""
    monkeypatch.setattr(idleness, "_PAUSE", 1e-6)
    monkeypatch.setattr(idleness, "_MOST", 10**9)
    backends = Backends()
    backend = backends.get("cudagraph", torch.device(DEVICE))
    assert isinstance(backend, CUDAGraphBackend)
    watch = idleness.Idleness([torch.cuda.current_stream(), backend.stream])
    step = trained(64, depth=40, backends=backends, min_speedup=0)
    assert watch.end() > 0
    assert watch._looks > step.stats.calls
    assert step.stats.captured == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fit_waits_and_its_validation_does_not(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation's program comes at once, and leaves AdamW's counters where training has them: on the device, on the
    host once training waits on with the kernels that it had, and on the device again.
    """
    torch.use_deterministic_algorithms(deterministic)
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer

    from graphplan import GraphPlanCallback

    class Small(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(64, 2)
            self.places: list[str] = []

        def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(x).square().mean()

        def validation_step(self, x: torch.Tensor, batch_idx: int) -> None:
            self.log("loss", self.net(x).square().mean())

        def on_train_batch_end(self, *args: Any) -> None:
            (place,) = {state["step"].device.type for state in self.trainer.optimizers[0].state.values()}
            self.places.append(place)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callback, module = GraphPlanCallback(eval=True), Small()
    batches = DataLoader(torch.randn(4, 64, 64), batch_size=None)
    trainer = Trainer(
        accelerator="gpu", devices=1, max_epochs=10, default_root_dir=tmp_path, logger=False, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    decided = iter([True, True, False])
    monkeypatch.setattr(pace.Pace, "_agree", lambda self, question, answer: next(decided))
    trainer.fit(module, batches, batches)
    stats, evaluated = callback.stats, callback.eval_stats
    assert stats.skipped == {SkipReason.BUSY: 9}, callback.report()
    assert (stats.captured, stats.recaptured, stats.replayed) == (1, 0, 40 - 3 - 9 - 4)
    assert evaluated.skipped == {}, callback.report()
    assert (evaluated.captured, evaluated.recaptured, evaluated.replayed) == (1, 0, 40 - 6)
    assert module.places == ["cuda"] * 7 + ["cuda" if deterministic else "cpu"] * 5 + ["cuda"] * 28
    assert "['capturable']: False -> True" in callback.report()
