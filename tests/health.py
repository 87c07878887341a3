"""Steps whose every part can be broken off, and what has to be as it was afterwards."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim import optimizer as optimizers
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import Mlp, float_batches, training_rig
from tests.twins import Rig

CALLS = 9


class Planted(RuntimeError):
    """Raised by nobody but these tests."""


class FailAt(TorchDispatchMode):
    """Raises ``error`` (or calls it, if it is a function) once, before operator number ``number`` from 0.

    Operators for which ``counts`` is false are not counted.
    """

    changes_nothing = True

    def __init__(
        self,
        number: int,
        error: BaseException | Callable[[], object],
        counts: Callable[[Any], bool] = lambda func: True,
    ) -> None:
        super().__init__()
        self.left = number
        self.error = error
        self.counts = counts
        self.failed_at = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Only Python sees what is detached: it would make half of a capture's operators.
        if func is torch.ops.aten.detach.default or not self.counts(func):
            return func(*args, **(kwargs or {}))
        if self.left == 0 and not self.failed_at:
            self.failed_at = str(func)
            if isinstance(self.error, BaseException):
                raise self.error
            self.error()
        self.left -= 1
        return func(*args, **(kwargs or {}))


class Facts(Mapping[str, Any]):
    """A record that is made anew whenever somebody looks."""

    def __init__(self, look: Callable[[], Mapping[str, Any]]) -> None:
        self._look = look

    def __getitem__(self, name: str) -> Any:
        return self._look()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._look())

    def __len__(self) -> int:
        return len(self._look())


def process_facts() -> dict[str, Any]:
    """What belongs to the process rather than to a step."""
    return {
        "python random": hash(random.getstate()),
        "numpy random": hash(str(np.random.get_state())),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "garbage collection": gc.isenabled(),
        "grad mode": torch.is_grad_enabled(),
        "hooks": (
            len(modules._global_forward_pre_hooks),
            len(optimizers._global_optimizer_pre_hooks),
        ),
        "profile function": sys.getprofile() is None,
    }


def live_tensors() -> int:
    """Tensors that Python holds, once garbage is gone."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def scaled_rig(device: str = "cpu", calls: int = CALLS) -> Rig:
    """Batch norm, dropout, autocast, a scaler that grows now and then, clipping, fused AdamW, a schedule."""
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=4)
    schedule = CosineAnnealingLR(optimizer, calls)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    def scaler_facts() -> dict[str, Any]:
        stages = [str(state["stage"]) for state in scaler._per_optimizer_states.values()]
        return {"stages": stages, "scale": scaler._scale, "growth": scaler._growth_tracker}

    owners = {"model": model, "optimizer": optimizer, "scaler": scaler}
    extra = {"scaler facts": Facts(scaler_facts)}
    return Rig(train_step, owners, list(float_batches(calls)), lambda index: schedule.step(), extra)


def carrying_rig(device: str = "cpu", calls: int = CALLS) -> Rig:
    """Every kind of state that Python binds: a carry, a counter, an appended tensor, a generator, kept gradients."""
    model = Mlp()
    model.tp = torch.zeros(8)
    model.seen = 0
    model.losses = []
    model.noise = torch.Generator(device).manual_seed(3)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Any:
        model.tp = model.tp + x.mean(0)
        noise = torch.rand(x.shape, generator=model.noise, device=x.device)
        loss = F.cross_entropy(model(x + 0.1 * noise), y) + 0.01 * model.tp.sum()
        loss.backward()
        optimizer.step()
        model.seen += 1
        model.losses.append(loss.detach())
        return loss, {"tp": model.tp.sum()}

    owners = {"model": model, "optimizer": optimizer}
    extra = {"noise": Facts(lambda: {"state": model.noise.get_state()})}
    return Rig(train_step, owners, list(float_batches(calls)), extra=extra)


RIGS: dict[str, Callable[[], Rig]] = {
    "scaled": scaled_rig,
    "carrying": carrying_rig,
    "lstm": partial(training_rig, "lstm", "adamw", sizes=(4,) * CALLS),
}
