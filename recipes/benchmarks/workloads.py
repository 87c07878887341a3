"""The training steps that the benchmark measures, in plain torch: a model, a loss, an optimizer and batches each.

Mixed precision is part of the loss (``torch.autocast`` inside it), so that a plain loop and a bare Lightning module run
the very same operators. Autocast's weight cache is off there: a captured step must not use it, and these models use
each weight once per forward, so it would save nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from recipes.benchmarks.architectures import Gpt, ResNet, mlp, two_layers
from recipes.benchmarks.steps import (
    SoftActorCritic,
    agents_parameters,
    burgers,
    collocation,
    perceptron,
    soft_actor_critic,
    transitions,
)

Batch = tuple[Tensor, Tensor]
Update = Callable[[nn.Module, Sequence[Any], Tensor, Tensor, Callable[[Tensor], Any]], Tensor]


def next_class(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of the model's logits."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def one_group(model: nn.Module) -> list[Iterable[nn.Parameter]]:
    """All parameters, for one optimizer."""
    return [model.parameters()]


@dataclass(frozen=True)
class Workload:
    """One training step.

    Attributes:
        name: what tables call it.
        model: builds the model on the CPU.
        batch: draws one batch from a generator, on the CPU.
        optimizer: the optimizers' class.
        options: the optimizers' arguments, ``lr`` among them.
        clip: the norm that gradients are clipped to, or None.
        bf16: whether the forward pass runs under bfloat16 autocast.
        channels_last: whether images and convolutions use that memory format.
        criterion: the loss of a model and a batch, in whatever precision holds.
        parameters: what each optimizer trains.
        update: the whole step, where it has several optimizers: of model, optimizers, batch, and how to go backward.
        one_call: whether the step calls the model once, and differentiates it once: what compilers and
            ``make_graphed_callables`` ask for.
        steps: steps in a block of replays, where nothing else is asked for: one check of a replay against an eager
            step falls into each, as in a long run.
        warmup: steps before the first block.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    optimizer: Callable[..., Optimizer]
    options: dict[str, float]
    clip: float | None = 1.0
    bf16: bool = False
    channels_last: bool = False
    criterion: Callable[[nn.Module, Tensor, Tensor], Tensor] = next_class
    parameters: Callable[[nn.Module], list[Iterable[nn.Parameter]]] = one_group
    update: Update | None = None
    one_call: bool = True
    steps: int = 1000
    warmup: int = 550

    @property
    def lr(self) -> float:
        """The learning rate that the schedule starts from."""
        return self.options["lr"]

    def make_model(self, device: torch.device) -> nn.Module:
        """Build the model on ``device`` in training mode."""
        model = self.model().to(device)
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def make_optimizers(
        self, model: nn.Module, *, fused: bool, lr: Tensor | None = None, capturable: bool = False
    ) -> list[Optimizer]:
        """Make the optimizers with torch's default kernels or its fused ones.

        ``capturable`` makes some that a CUDA graph may contain. For Adam that is a flag; SGD has none, and only its
        fused kernel reads the learning rate from device memory, so that a captured SGD is a fused one in any case.
        """
        flags: dict[str, bool] = {"fused": True} if fused else {}
        if capturable:
            flags |= {"fused": True} if self.optimizer is SGD else {"capturable": True}
        options = {**self.options, "lr": self.lr if lr is None else lr, **flags}
        return [self.optimizer(parameters, **options) for parameters in self.parameters(model)]

    def autocast(self, device: torch.device) -> torch.autocast:
        """The precision of the forward pass."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one batch in the workload's precision."""
        with self.autocast(x.device):
            return self.criterion(model, x, y)

    def step(self, model: nn.Module, optimizers: Sequence[Optimizer], x: Tensor, y: Tensor) -> Tensor:
        """One training step as a user writes it."""
        if self.update is not None:
            return self.update(model, optimizers, x, y, Tensor.backward)
        (optimizer,) = optimizers
        optimizer.zero_grad()
        loss = self.loss(model, x, y)
        loss.backward()
        if self.clip is not None:
            clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()
        return loss

    def pool(self, count: int, *, pin: bool) -> list[Batch]:
        """Draw ``count`` different batches, in pinned memory if ``pin``."""
        generator = torch.Generator().manual_seed(5)
        return [self._stored(self.batch(generator), pin) for _ in range(count)]

    def _stored(self, batch: Batch, pin: bool) -> Batch:
        x, y = batch
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return (x.pin_memory(), y.pin_memory()) if pin else (x, y)


def cosine(step: int, period: int = 10_000) -> float:
    """The factor that the schedule puts on the learning rate before step number ``step``."""
    return 0.5 * (1 + math.cos(math.pi * min(step, period) / period))


def _vectors(generator: torch.Generator, *, size: int, features: int, classes: int) -> Batch:
    x = torch.randn(size, features, generator=generator)
    return x, torch.randint(classes, (size,), generator=generator)


def _text(generator: torch.Generator, *, size: int, length: int, vocabulary: int) -> Batch:
    tokens = torch.randint(vocabulary, (size, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _images(generator: torch.Generator, *, size: int, side: int, classes: int) -> Batch:
    x = torch.randn(size, 3, side, side, generator=generator)
    return x, torch.randint(classes, (size,), generator=generator)


def _gpt(
    name: str,
    layers: int,
    width: int,
    heads: int,
    length: int,
    size: int,
    *,
    vocabulary: int = 256,
    tied: bool = False,
    bf16: bool = True,
) -> Workload:
    model = partial(Gpt, layers, width, heads, length, vocabulary, tied=tied)
    batch = partial(_text, size=size, length=length, vocabulary=vocabulary)
    return Workload(name, model, batch, AdamW, {"lr": 3e-4, "weight_decay": 0.1}, bf16=bf16)


def _resnet(name: str, width: int, blocks: int, side: int, size: int) -> Workload:
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
    batch = partial(_images, size=size, side=side, classes=10)
    return Workload(name, partial(ResNet, width, blocks, 10), batch, SGD, options, bf16=True, channels_last=True)


def _mlp(name: str, features: int, width: int, size: int) -> Workload:
    batch = partial(_vectors, size=size, features=features, classes=10)
    return Workload(name, partial(mlp, features, width, 10), batch, AdamW, {"lr": 1e-3, "weight_decay": 0.01})


def _sac(name: str, observed: int, acted: int, width: int, size: int) -> Workload:
    return Workload(
        name,
        partial(SoftActorCritic, observed, acted, width),
        partial(transitions, size=size, observed=observed, acted=acted),
        AdamW,
        {"lr": 3e-4, "weight_decay": 0.0},
        clip=None,
        parameters=agents_parameters,
        update=soft_actor_critic,
        one_call=False,
    )


def _pinn(name: str, width: int, depth: int, size: int) -> Workload:
    return Workload(
        name,
        partial(perceptron, 2, width, 1, depth, nn.Tanh),
        partial(collocation, size=size),
        AdamW,
        {"lr": 1e-3, "weight_decay": 0.0},
        criterion=burgers,
        one_call=False,
    )


def _by_name(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


GPU_WORKLOADS = _by_name(
    _mlp("mlp", features=64, width=256, size=256),
    _gpt("gpt", 6, 384, 6, 256, size=16),
    _resnet("resnet", width=64, blocks=2, side=32, size=64),
    _mlp("mlp_large", features=64, width=256, size=16384),
    _gpt("gpt_large", 6, 384, 6, 256, size=64),
    _resnet("resnet_large", width=64, blocks=2, side=32, size=512),
    _gpt("gpt2", 12, 768, 12, 1024, 8, vocabulary=50304, tied=True),
    _gpt("gpt2_small", 12, 768, 12, 1024, 1, vocabulary=50304, tied=True),
    # Twelve sequences keep the device busy on any host.
    _gpt("gpt2_large", 12, 768, 12, 1024, 12, vocabulary=50304, tied=True),
    _sac("sac", observed=17, acted=6, width=256, size=256),
    _sac("sac_large", observed=17, acted=6, width=256, size=8192),
    _pinn("pinn", width=128, depth=5, size=4096),
    _pinn("pinn_large", width=128, depth=5, size=65536),
)
_CPU = (
    Workload(
        "mlp2", partial(two_layers, 16, 32, 4), partial(_vectors, size=32, features=16, classes=4), SGD, {"lr": 0.05},
        None,
    ),
    _gpt("transformer4", 4, 128, 4, 32, size=8, bf16=False),
    _mlp("mlp", features=16, width=32, size=32),
    _gpt("gpt", 2, 64, 2, 32, size=4),
    _resnet("resnet", width=8, blocks=1, side=16, size=8),
    _mlp("mlp_large", features=16, width=32, size=256),
    _gpt("gpt_large", 2, 64, 2, 32, size=16),
    _resnet("resnet_large", width=8, blocks=1, side=16, size=32),
    _gpt("gpt2", 3, 48, 3, 32, size=2, vocabulary=512, tied=True),
    _gpt("gpt2_small", 3, 48, 3, 32, size=1, vocabulary=512, tied=True),
    _gpt("gpt2_large", 3, 48, 3, 32, size=4, vocabulary=512, tied=True),
    _sac("sac", observed=5, acted=2, width=32, size=32),
    _sac("sac_large", observed=5, acted=2, width=32, size=256),
    _pinn("pinn", width=16, depth=2, size=32),
    _pinn("pinn_large", width=16, depth=2, size=256),
)  # fmt: skip
CPU_WORKLOADS = _by_name(*(replace(workload, steps=50, warmup=30) for workload in _CPU))
"""The same workloads in sizes that suit a CPU, and two that the tape backend is held to."""


def workloads(cpu: bool) -> dict[str, Workload]:
    """The workloads of a machine, by name."""
    return CPU_WORKLOADS if cpu else GPU_WORKLOADS
