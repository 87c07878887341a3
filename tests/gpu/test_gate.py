"""The speed gate on a device: which steps are captured, and what is left of those that stand down."""

from __future__ import annotations

import gc
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from graphplan import GraphPlanCallback, SkipReason, graph_step, graphed
from graphplan.backends import idleness
from graphplan.backends.cudagraph import CUDAGraphBackend
from graphplan.program.program import Program
from graphplan.step.gate import SKIPPED, STEPS
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.options import Options
from graphplan.step.runner import Backends
from tests.devices import DEVICE, needs_cuda

pytestmark = [needs_cuda, pytest.mark.gated]
TIMED = SKIPPED + STEPS
CALLS = 60
AT_LEAST = 32
"""Calls after which a step is captured or stands down, also where eager steps were timed three times."""
WIDE = 4096
"""Of layers whose matrix products take the device some ten times as long as the host takes for all of a step."""


@pytest.fixture(autouse=True)
def not_repeatable(repeatable: None) -> None:
    """Where runs are to be repeatable, steps are captured however busy the device is."""
    torch.use_deterministic_algorithms(False)


def layers(width: int, depth: int) -> nn.Sequential:
    """As many linear layers, with what is between them."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))


def trained(
    width: int, depth: int = 2, rows: int = 1, backends: Backends | None = None, calls: int = CALLS, **options: Any
) -> GraphedStep:
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

    owners = {"model": model, "optimizer": optimizer}
    step = GraphedStep(train_step, owners, Options(**options), backends=backends)
    for _ in range(calls):
        step(x)
    torch.cuda.synchronize()
    return step


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Have each replay take so much longer on the host."""
    run = Program.run
    monkeypatch.setattr(
        Program, "run", lambda program, *args, **flags: (sleep(seconds), run(program, *args, **flags))[1]
    )


def test_a_step_that_keeps_the_device_busy_stands_down() -> None:
    step = trained(WIDE, calls=AT_LEAST)
    assert step.is_down, step.report()
    assert list(step.stats.skipped) == [SkipReason.BUSY]
    assert (step.stats.traced, step.stats.captured) == (0, 0)


def test_a_busy_device_is_no_reason_where_programs_are_asked_for_or_runs_are_repeatable() -> None:
    assert trained(WIDE, calls=AT_LEAST, min_speedup=0, verify="off").stats.captured == 1
    torch.use_deterministic_algorithms(True)
    assert trained(WIDE, calls=AT_LEAST, verify="off").stats.captured == 1


def test_a_step_that_stands_down_at_once_takes_no_second_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """How busy the device was depends on what else the host does, so that is told here."""
    end = idleness.Idleness.end
    monkeypatch.setattr(idleness.Idleness, "end", lambda watch: 0.0 * end(watch))
    reserved = []
    for options in ({"backend": "eager"}, {}):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        step = trained(WIDE, calls=AT_LEAST, **options)
        reserved.append(torch.cuda.memory_reserved() - before)
        assert (step.stats.traced, step.stats.captured) == (0, 0)
        step.close()
        del step
    assert reserved[1] <= 1.1 * reserved[0]


def test_a_step_that_keeps_the_host_busy_is_captured() -> None:
    step = trained(64, depth=40)
    assert (step.stats.captured, step.is_down) == (1, False), step.report()
    assert step.stats.measured["replayed"] < step.stats.measured["eager"] / 1.5


def test_one_long_kernel_does_not_make_the_device_busy() -> None:
    """Which it is for a large embedding; the host launches small layers for longer, while there is nothing to do."""
    step = trained(64, depth=120, rows=100_000, calls=AT_LEAST, verify="off")
    assert step.stats.captured == 1, step.report()


def reserved() -> int:
    """Bytes that torch holds, without the workspaces that it keeps for each stream that cuBLAS ever ran on."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_a_step_that_does_not_pay_stands_down_and_its_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    step = trained(64, depth=4, min_speedup=0)
    step.close()
    del step
    before = reserved()
    slow_down(monkeypatch)
    step = trained(64, depth=4)
    assert step.is_down, step.report()
    assert step.stats.skipped[SkipReason.SLOWER] > CALLS // 2
    assert "µs per step eagerly and" in step.report()
    assert reserved() <= before + 2**21


@torch.no_grad()
def test_served_calls_have_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(64, 20).to(DEVICE)
    x = torch.randn(8, 64, device=DEVICE)
    run = graphed(model)
    for _ in range(CALLS):
        assert torch.allclose(run(x), model(x))
    assert run.num_graphs == 1, run.report()
    slow_down(monkeypatch)
    run = graphed(model)
    for _ in range(CALLS):
        assert torch.allclose(run(x), model(x))
    assert run.num_graphs == 0
    assert run.stats.skipped[SkipReason.SLOWER] > 10, run.report()


def test_nobody_looks_at_a_stream_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would give the capture up. Another step of the same owner may be watched meanwhile, on the same stream."""
    monkeypatch.setattr(idleness, "_PAUSE", 1e-6)
    monkeypatch.setattr(idleness, "_MOST", 10**9)
    backends = Backends()
    backend = backends.get("cudagraph", torch.device(DEVICE))
    assert isinstance(backend, CUDAGraphBackend)
    watch = idleness.Idleness([torch.cuda.current_stream(), backend.stream])
    step = trained(64, depth=40, backends=backends, min_speedup=0, calls=AT_LEAST)
    assert watch.end() > 0
    assert watch._looks > step.stats.calls
    assert step.stats.captured == 1


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fit(slow: bool, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's counters are on the host in the steps that are timed and after it stood down, and its flags the user's;
    in repeatable runs the kernels stay those of replays.
    """
    torch.use_deterministic_algorithms(deterministic)
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer

    if slow:
        slow_down(monkeypatch)

    class Small(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(64, 8)
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
    batches = DataLoader(torch.randn(20, 64, 64), batch_size=None)
    trainer = Trainer(
        accelerator="gpu", devices=1, max_epochs=4, default_root_dir=tmp_path, logger=False, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, batches, batches)
    stats, evaluated = callback.stats, callback.eval_stats
    assert stats.calls == 80
    assert (stats.captured, evaluated.captured) == (1, 1), callback.report()
    assert bool(stats.skipped[SkipReason.SLOWER]) is slow, callback.report()
    prepared = module.places.index("cuda")
    assert prepared >= TIMED - 1
    assert module.places[prepared : prepared + 19] == ["cuda"] * 19
    assert module.places[-10:] == ["cpu" if slow and not deterministic else "cuda"] * 10
    assert ("graphplan removed itself" in callback.report()) is slow


def test_a_refusal_leaves_a_stock_step() -> None:
    """An optimizer whose counters stayed on the device would wait for it in each step."""
    model = layers(64, 2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if complex(loss.detach()).real > 1e9:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = graph_step(train_step, owners=[model, optimizer], on_failure="eager")
    batches = [torch.randn(8, 64, device=DEVICE) for _ in range(30)]
    with pytest.warns(UserWarning, match="graphplan runs this step eagerly"):
        list(map(step, batches))
    assert step.is_down
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
    assert not optimizer.param_groups[0]["capturable"]
