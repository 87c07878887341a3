"""The batches, the optimizers and the training step of a random run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim import lr_scheduler as schedules

from tests.random_runs.leaving import ACTS
from tests.random_runs.models import CLASSES, LENGTH, WIDTH
from tests.random_runs.run import Run

GAIN = 1.0
"""A global that every step reads."""

FUSABLE: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-2, weight_decay=0.05),
    "amsgrad": partial(Adam, lr=1e-2, amsgrad=True),
    "sgd": partial(SGD, lr=5e-2),
    "momentum": partial(SGD, lr=5e-2, momentum=0.9, weight_decay=1e-2),
    "nesterov": partial(SGD, lr=5e-2, momentum=0.9, nesterov=True),
    "dampened": partial(SGD, lr=5e-2, momentum=0.8, dampening=0.3, maximize=True),
    "adagrad": partial(Adagrad, lr=3e-2, lr_decay=0.01),
}
OTHERS: dict[str, Callable[..., Optimizer]] = {"rmsprop": partial(RMSprop, lr=1e-3, momentum=0.5), "nadam": NAdam}


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=40),
    "decay": lambda optimizer: schedules.StepLR(optimizer, step_size=7, gamma=0.5),
    "one cycle": lambda optimizer: _one_cycle(optimizer, cycle_momentum=False),
    "cyclic": lambda optimizer: _cyclic(optimizer, cycle_momentum=False),
}
OF_MOMENTUM: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle of momentum": lambda optimizer: _one_cycle(optimizer, cycle_momentum=_has_momentum(optimizer)),
    "cyclic with momentum": lambda optimizer: _cyclic(optimizer, cycle_momentum=_has_momentum(optimizer)),
}
"""Each of their values needs a program of its own, so that such a step is refused."""
_one_cycle = partial(schedules.OneCycleLR, max_lr=0.05, total_steps=80)
_cyclic = partial(schedules.CyclicLR, base_lr=1e-3, max_lr=2e-2, step_size_up=5)


def _branch(model: Any, logits: Tensor, loss: Tensor) -> Tensor:
    """Looks at data, in the words of an operator that is made of others."""
    return loss * 2 if torch.allclose(logits.detach(), logits.detach().flip(0)) else loss


def _inner_loop(model: Any, logits: Tensor, loss: Tensor) -> Tensor:
    """An optimizer that the step makes, steps and drops."""
    weight = model.head.weight.detach().clone().requires_grad_()
    with torch.enable_grad():
        inner = SGD([weight], lr=0.1, momentum=0.9)
        for _ in range(2):
            inner.zero_grad()
            weight.square().sum().backward()
            inner.step()
    return loss + weight.detach().square().mean()


def _copy(model: Any, logits: Tensor, loss: Tensor) -> Tensor:
    """A module that the step makes and drops."""
    return loss + deepcopy(model.head)(torch.ones_like(model.head.weight[:1])).square().mean()


OF_LOSS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "branch on data": _branch, "inner optimizer": _inner_loop, "copy of a module": _copy,
}  # fmt: skip
"""What a step may do that looks at data, or makes what does not outlive it."""


def _has_momentum(optimizer: Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


def parts_of(run: Run) -> int:
    """How many calls accumulate gradients for one update."""
    return int(run.zero[-1]) if run.zero[-1].isdigit() else 1


def make_batch(run: Run, index: int, generator: torch.Generator) -> tuple[Any, ...]:
    """The arguments of call ``index``."""
    size = run.sizes[index % len(run.sizes)]
    form = run.forms[index % len(run.forms)]
    shape = {"dense": (WIDTH,), "conv": (2, 5, 5)}.get(run.family, (LENGTH, WIDTH))
    y = torch.randint(CLASSES, (size,), generator=generator)
    if run.family == "tokens":
        x = torch.randint(CLASSES, (size, LENGTH), generator=generator)
    else:
        x = torch.randn(size, *shape, generator=generator)
    if form == "expanded":
        x = x[:1].expand_as(x)
    elif form == "strided":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif form == "sliced":
        x = torch.cat([x, x])[1::2]
    elif form == "misaligned":
        x = torch.cat([x[:1], x])[1:]
    elif form == "channels last" and run.family == "conv":
        x = x.contiguous(memory_format=torch.channels_last)
    if "input grad" in run.extras and x.is_floating_point():
        x = x.detach().clone().requires_grad_() if form == "plain" else x.detach().requires_grad_()
    return (x, y, index % parts_of(run)) if parts_of(run) > 1 else (x, y)


def make_optimizers(run: Run, model: nn.Module) -> list[Optimizer]:
    """One optimizer, or two that share the groups out."""
    # Not all parameters are trained: a random event adds this one.
    parameters = [p for name, p in model.named_parameters() if name != "bonus"]
    groups = [{"params": parameters[i :: run.groups], "weight_decay": 0.02 * i} for i in range(run.groups)]
    cut = 1 if "two optimizers" in run.extras and run.groups > 1 else run.groups
    # Where the first step of a fused SGD is skipped, torch leaves its momentum uninitialised: eager itself is random.
    fused = None if "scaler" in run.extras and run.optimizer in ("momentum", "nesterov", "dampened") else run.fused
    made = []
    for part in filter(None, (groups[:cut], groups[cut:])):
        if run.optimizer in FUSABLE:
            made.append(FUSABLE[run.optimizer](part, fused=fused))
        else:
            made.append(OTHERS[run.optimizer](part))
    return made


def make_scaler(run: Run) -> GradScaler | None:
    """A scaler that backs off and grows all the time, since its first scale makes gradients overflow."""
    if "scaler" not in run.extras or run.infers:
        return None
    return GradScaler("cpu", init_scale=2.0**126, growth_interval=3)


def make_step(
    run: Run, model: Any, optimizers: list[Optimizer], scaler: GradScaler | None, settings: Any
) -> Callable[..., Any]:
    """The training step of a run; of a run that ``infers`` only its forward pass."""
    mutates = "mutates input" in run.extras and "expanded" not in run.forms and "input grad" not in run.extras
    offset = 0.0

    def leave(place: str) -> None:
        for where, name in run.leaves:
            if where == place:
                ACTS[name](model, optimizers)

    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if mutates and x.is_floating_point():
            x.add_(0.125)
        if "noise" in run.extras and x.is_floating_point():
            x = x + 0.1 * torch.randn_like(x)
        with torch.autocast("cpu", torch.bfloat16) if "autocast" in run.extras else nullcontext():
            logits = model(x) * model.temperature + offset
        if model.sharp:
            logits = logits.tanh()
        loss = GAIN * F.cross_entropy(logits.float(), y, label_smoothing=model.options["smoothing"])
        for extra in sorted(run.extras & OF_LOSS.keys()):
            loss = OF_LOSS[extra](model, logits, loss)
        return logits, loss + settings.penalty * model.head.bias.square().sum()

    def train_step(x: Tensor, y: Tensor, part: int = 0) -> Any:
        if run.zero.startswith("start") and part == 0:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none="zeros" not in run.zero)
        leave("start")
        logits, loss = forward(x, y)
        leave("middle")
        (loss if scaler is None else scaler.scale(loss)).backward()
        if part == parts_of(run) - 1:
            _update(run, model, optimizers, scaler)
        leave("end")
        return _effects(run, model, logits, loss)

    def predict(x: Tensor, y: Tensor, part: int = 0) -> Any:
        leave("start")
        with torch.inference_mode() if "inference mode" in run.extras else torch.no_grad():
            logits, loss = forward(x, y)
        leave("end")
        return {"loss": loss, "best": logits.argmax(1)}

    return predict if run.infers else train_step


def _update(run: Run, model: nn.Module, optimizers: list[Optimizer], scaler: GradScaler | None) -> None:
    if scaler is not None and run.clip != "none":
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    if run.clip == "norm":
        clip_grad_norm_(model.parameters(), 0.5)
    elif run.clip == "value":
        clip_grad_value_(model.parameters(), 0.05)
    for optimizer in optimizers:
        optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    if not run.zero.startswith("start"):
        for optimizer in optimizers:
            optimizer.zero_grad()


def _effects(run: Run, model: Any, logits: Tensor, loss: Tensor) -> Any:
    if "counter" in run.effects:
        model.seen += 1
    if "average" in run.effects:
        model.average = model.decay * model.average + (1 - model.decay) * model.head.weight.detach()
    if "average in place" in run.effects:
        model.average.mul_(model.decay).add_(model.head.weight.detach(), alpha=1 - model.decay)
    if "history" in run.effects:
        model.history.append(loss.detach())
    if "last" in run.effects:
        model.last = logits.detach().mean()
    return {"loss": loss, "logits": logits} if "dict" in run.effects else loss
