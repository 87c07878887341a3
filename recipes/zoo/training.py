"""The zoo's training loops: a Trainer, a plain loop, a graph captured by hand; and the state after each."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_flatten
from torch.utils.data._utils.pin_memory import pin_memory

from graphplan import GraphPlanCallback, graph_step, graphed
from graphplan.optimizers.preparation import Preparation, device_of
from graphplan.optimizers.rates import device_rate_dtype
from graphplan.step.options import Options
from recipes.benchmarks.workloads import cosine
from recipes.zoo.batches import COUNT
from recipes.zoo.clock import Feed, Turns
from recipes.zoo.registry import Case, Entry, Parts, Scale

LR, WARM_CAPTURE = 1e-3, 3
State = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """The measurement of an entry in this process."""

    entry: Entry
    gpu: bool
    warm: int
    steps: int
    turns: Turns
    stages: Sequence[str] = ("fit", "loop", "service", "floor")
    equality: bool = True

    @property
    def device(self) -> torch.device:
        """The device of the training."""
        return torch.device("cuda:0" if self.gpu else "cpu")

    def make(self) -> Case:
        """Return the case, made from the same seed each time."""
        pl.seed_everything(0, verbose=False)
        case = self.entry.make(Scale(self.gpu))
        pl.seed_everything(1, verbose=False)
        return case

    def feed(self, case: Case, replays: Callable[[], int] | None = None) -> Feed:
        """Return a loader that times the case's batches. ``replays`` returns the replays of a run with graphplan."""
        batches = [pin_memory(batch) for batch in case.batches] if self.gpu else case.batches
        alone = replays is not None
        return Feed(batches, self.warm, self.steps, self.gpu, self.turns, replays or (lambda: 0), alone)

    @property
    def autocast(self) -> Callable[[], Any]:
        """The context of a step: mixed precision on CUDA."""
        return partial(torch.autocast, "cuda", torch.bfloat16) if self.gpu else nullcontext


@contextmanager
def answering_captured() -> Iterator[None]:
    """Let ``torch.cuda.is_current_stream_capturing`` return True, as it does in a managed step."""
    with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        yield


class Wrapped(pl.LightningModule):
    """A typical LightningModule around an ``nn.Module``: a loss, three logged values, AdamW, a schedule by step."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = case.model
        self.automatic_optimization = case.update is None
        # Do not keep the case: it holds the batches.
        self._loss, self._update, self._make = case.loss, case.update, partial(make_optimizers, case.parts)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        if self._update is None:
            assert self._loss is not None
            loss = self._loss(self.model, batch)
        else:
            optimizers: Any = self.optimizers()
            schedulers: Any = self.lr_schedulers()
            loss = self._update(self.model, optimizers, batch, self.manual_backward)
            for scheduler in schedulers:
                scheduler.step()
        shown = loss.detach()
        self.log("train/loss", shown, prog_bar=True)
        self.log("train/perplexity", shown.clamp(max=20).exp())
        self.log("train/scaled", shown * 0.5, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with its defaults, and a cosine schedule."""
        optimizers = self._make(self.model)
        return optimizers, [{"scheduler": LambdaLR(each, cosine), "interval": "step"} for each in optimizers]


def make_optimizers(parts: Parts, model: nn.Module, lr: Any = LR, **options: Any) -> list[Optimizer]:
    """Return one AdamW for each part that is trained."""
    return [AdamW([p for p in part.parameters() if p.requires_grad], lr=lr, **options) for part in parts(model)]


def prepare(optimizer: Optimizer) -> Callable[[], object]:
    """Make an optimizer step as under graphplan: with its flags, and with the learning rate in device memory. Return
    what undoes that.
    """
    preparation = Preparation(optimizer)
    numbers: list[float] = []

    def lend(*_: Any) -> None:
        numbers[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            dtype, device = device_rate_dtype(group), device_of(group)
            if dtype is not None and device.type == "cuda":
                group["lr"] = torch.tensor(group["lr"], dtype=dtype, device=device)

    def take_back(*_: Any) -> None:
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            group["lr"] = number

    undo = ExitStack()
    undo.callback(preparation.undo)
    undo.callback(optimizer.register_step_pre_hook(lend).remove)
    undo.callback(optimizer.register_step_post_hook(take_back).remove)
    return undo.close


class Prepared(pl.Callback):
    """Trains as graphplan's eager steps do, for runs to compare with: in ``steps`` with prepared optimizers, and if
    ``captured`` under :func:`answering_captured`.
    """

    def __init__(self, steps: Sequence[int] = range(sys.maxsize), *, captured: bool = False) -> None:
        self._steps, self._captured, self._undo = steps, captured, ExitStack()

    def before_step(self, index: int, optimizers: Sequence[Optimizer]) -> None:
        """Prepare the optimizers before the first of the steps, and undo that after the last one."""
        if index == self._steps[0]:
            for optimizer in optimizers:
                self._undo.callback(prepare(optimizer))
            if self._captured:
                self._undo.enter_context(answering_captured())
        elif index > self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Undo everything."""
        self._undo.close()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """See :meth:`before_step`."""
        self.before_step(batch_idx, trainer.optimizers)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See :meth:`close`."""
        self.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """See :meth:`close`."""
        self.close()


def state_of(model: nn.Module, metrics: Mapping[str, Any]) -> State:
    """Return the parameters, buffers and metrics after a run."""
    tensors = {**model.state_dict(), **{f"metric {name}": value for name, value in metrics.items()}}
    return {name: value.detach().cpu().clone() for name, value in tensors.items() if isinstance(value, Tensor)}


def module_of(case: Case) -> pl.LightningModule:
    """Return a library's own LightningModule, or one around its ``nn.Module``."""
    return case.model if isinstance(case.model, pl.LightningModule) else Wrapped(case)


def trainer_of(
    run: Run, case: Case, module: pl.LightningModule, callbacks: Sequence[pl.Callback], *, logger: Any
) -> pl.Trainer:
    """Return a Trainer for one epoch, with only ``logger`` and ``callbacks``."""
    return pl.Trainer(
        **{
            "accelerator": "gpu" if run.gpu else "cpu", "devices": 1, "max_epochs": 1,
            "precision": "bf16-mixed" if run.gpu else "32-true",
            "gradient_clip_val": case.clip if module.automatic_optimization else None,
            "logger": logger, "enable_progress_bar": False, "enable_checkpointing": False,
            "enable_model_summary": False, "callbacks": list(callbacks), **dict(case.options),
        }
    )  # fmt: skip


def fit(run: Run, *callbacks: pl.Callback) -> tuple[dict[str, Any], State]:
    """Train in a ``Trainer``; return the times and the final state."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    case = run.make()
    module = module_of(case)
    ours = [callback for callback in callbacks if isinstance(callback, GraphPlanCallback)]
    feed = run.feed(case, (lambda: sum(callback.stats.replayed for callback in ours)) if ours else None)
    with TemporaryDirectory() as folder:
        trainer = trainer_of(run, case, module, callbacks, logger=pl.loggers.CSVLogger(folder))
        trainer.fit(module, feed)
    facts = feed.facts()
    for callback in ours:
        facts |= outcome(callback.stats, callback.report())
    return facts, state_of(module, trainer.callback_metrics)


def outcome(stats: Any, report: str) -> dict[str, Any]:
    """Return a graphed step's counters, and its reasons with the most frequent first."""
    kinds = ("eager", "traced", "captured", "replayed", "recaptured", "verified")
    form = "forward eager" if "forward and backward run eagerly" in report else "whole"
    form = "optimizer eager" if "optimizer runs eagerly" in report else form
    reasons = sorted({**stats.reasons, **stats.events}.items(), key=lambda pair: -pair[1])
    return {
        "counts": {kind: getattr(stats, kind) for kind in kinds},
        "form": form,
        "managed_steps": managed_steps(stats),
        "skipped": {reason.name: count for reason, count in stats.skipped.items()},
        "reasons": [f"{count}x {text}"[:600] for text, count in reasons[:6]],
        "report": report[:6000],
    }


def managed_steps(stats: Any) -> tuple[int, int]:
    """Return the first step that was prepared for graphplan, and the first one after these. Steps before are timed, and
    an optimizer is given back in the second call after the trace that refused its step.
    """
    if stats.replayed:
        traced = next((first for kind, first, _ in stats.changes if kind == "traced"), 0)
        return max(0, traced - Options.warmup_steps), sys.maxsize
    traced = stats.calls - sum(stats.skipped.values())
    return max(0, traced - Options.warmup_steps), traced + 2


def plain_step(autocast: Callable[[], Any], case: Case, optimizers: list[Optimizer]) -> Callable[[Any], Tensor]:
    """Return the step of a plain loop, which takes a batch on the device."""
    model, loss_of, update, clip = case.model, case.loss, case.update, case.clip

    def step(batch: Any) -> Tensor:
        if update is not None:
            with autocast():
                return update(model, optimizers, batch, lambda loss: loss.backward())
        assert loss_of is not None
        for optimizer in optimizers:
            optimizer.zero_grad()
        with autocast():
            loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return step


def loop(run: Run, *, manage: bool, prepared: Prepared | None = None) -> tuple[dict[str, Any], State]:
    """Train in a plain loop, with ``graph_step`` if ``manage``; return the times and the final state."""
    case = run.make()
    model = case.model.to(run.device).train()
    optimizers = make_optimizers(case.parts, model)
    schedules = [LambdaLR(optimizer, cosine) for optimizer in optimizers]
    step: Any = plain_step(run.autocast, case, optimizers)
    if manage:
        owners = {"model": model, **{f"optimizer{index}": each for index, each in enumerate(optimizers)}}
        step = graph_step(step, owners=owners, on_failure="eager")
    feed = run.feed(case, (lambda: step.stats.replayed) if manage else None)
    losses: list[Tensor] = []
    with closing(prepared) if prepared is not None else nullcontext():
        for batch in feed:
            if prepared is not None:
                prepared.before_step(len(losses), optimizers)
            losses.append(step(move_data_to_device(batch, run.device)))
            for schedule in schedules:
                schedule.step()
    facts = feed.facts()
    if manage:
        facts |= outcome(step.stats, step.report())
        step.close()
    return facts, state_of(model, {"losses": torch.stack([loss.detach().float() for loss in losses])})


def floor(run: Run) -> dict[str, Any]:
    """Time the same step as one CUDA graph captured by hand, with static inputs and a capturable optimizer."""
    case = run.make()
    model = case.model.to(run.device).train()
    lr = torch.tensor(LR, dtype=torch.float64, device=run.device)
    step = plain_step(run.autocast, case, make_optimizers(case.parts, model, lr, capturable=True))
    # Hold the device alone from the first step on, like a run with graphplan: a recently used device is faster.
    feed = run.feed(case, lambda: 0)
    static = move_data_to_device(case.batches[0], run.device)
    targets = [leaf for leaf in tree_flatten(static)[0] if isinstance(leaf, Tensor)]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with run.turns.taken(alone=False), answering_captured():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_CAPTURE):
                step(static)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step(static)
    for index, batch in enumerate(feed):
        sources = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        lr.fill_(LR * cosine(index))
        graph.replay()
    return feed.facts()


def infer(run: Run, *, manage: bool) -> tuple[dict[str, Any], State]:
    """Predict, with ``graphed`` if ``manage``; return the times and the last results."""
    case = run.make()
    assert case.predict is not None
    model = case.model.to(run.device).eval()
    call: Any = case.predict
    predict: Any = lambda batch: call(model, batch)  # noqa: E731
    if manage:
        predict = graphed(predict, owners={"model": model}, on_failure="eager")
    feed = run.feed(case, (lambda: predict.stats.replayed) if manage else None)
    found: State = {}
    with torch.inference_mode(), run.autocast(), answering_captured() if not manage else nullcontext():
        for index, batch in enumerate(feed):
            result = predict(move_data_to_device(batch, run.device))
            found[f"result {index % COUNT}"] = result
    facts = feed.facts()
    if manage:
        facts |= outcome(predict.stats, predict.report())
    return facts, {name: value.detach().cpu() for name, value in found.items()}


@contextmanager
def recording_warnings() -> Iterator[list[str]]:
    """Record the warnings of the block, each text once."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield texts
    texts += dict.fromkeys(f"{each.category.__name__}: {each.message}"[:400] for each in caught)
