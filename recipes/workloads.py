"""The training steps that the benchmark measures, in plain torch: a model, a loss, an optimizer and batches each.

Mixed precision is part of the loss (``torch.autocast`` inside it), so that a plain loop and a Lightning module run the
very same operators. Autocast's weight cache is off everywhere: a captured step must not use it, and these models use
each weight once per forward, so it would save nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

Batch = tuple[Tensor, Tensor]
IMPLEMENTATIONS = ("stock", "fused")


@dataclass(frozen=True)
class Workload:
    """One training step.

    Attributes:
        name: what tables call it.
        model: builds the model on the CPU.
        batch: draws one batch from a generator, on the CPU.
        optimizer: the optimizer's class.
        options: the optimizer's arguments, ``lr`` among them.
        clip: the norm that gradients are clipped to, or None.
        bf16: whether the forward pass runs under bfloat16 autocast.
        channels_last: whether images and convolutions use that memory format.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    optimizer: Callable[..., Optimizer]
    options: dict[str, float]
    clip: float | None = 1.0
    bf16: bool = False
    channels_last: bool = False

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

    def make_optimizer(
        self, params: Iterable[nn.Parameter], implementation: str, *, lr: Tensor | None = None, capturable: bool = False
    ) -> Optimizer:
        """Make the optimizer with torch's default kernels (``stock``) or its fused ones.

        ``capturable`` makes one that a CUDA graph may contain. For Adam that is a flag; SGD has none, and only its
        fused kernel reads the learning rate from device memory, so that a captured SGD is a fused one in any case.
        """
        flags: dict[str, bool] = {"fused": True} if implementation == "fused" else {}
        if capturable:
            flags |= {"fused": True} if self.optimizer is SGD else {"capturable": True}
        return self.optimizer(params, **{**self.options, "lr": self.lr if lr is None else lr, **flags})

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one batch."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            logits = model(x)
            return F.cross_entropy(logits.flatten(0, -2), y.flatten())

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


def mlp(features: int, width: int, classes: int) -> nn.Module:
    """Two hidden layers with batch normalisation and dropout."""
    first = [nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)]
    second = [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*first, *second, nn.Linear(width, classes))


def two_layers(features: int, width: int, classes: int) -> nn.Module:
    """The smallest useful network: nearly all of its step is the cost of issuing operators."""
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, both residual, normalised before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.feed(self.second(x))
        return out


class Gpt(nn.Module):
    """A causal language model with learned positions and no dropout."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``[batch, length]`` to logits ``[batch, length, vocabulary]``."""
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))
        return logits


class Residual(nn.Module):
    """Two 3x3 convolutions around which the input is added back."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)])
        change = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        self.skip = change if (inner, stride) != (outer, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, inner, height, width]`` to ``outer`` channels, smaller by the stride."""
        y = self.norms[0](self.first(x)).relu()
        out: Tensor = self.norms[1](self.second(y)) + self.skip(x)
        return out.relu()


class ResNet(nn.Module):
    """Four stages of residual blocks behind a 3x3 stem for small images; two blocks each make a ResNet-18."""

    def __init__(self, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        stages: list[nn.Module] = []
        inner = width
        for stage in range(4):
            for block in range(blocks):
                outer = width * 2**stage
                stages.append(Residual(inner, outer, stride=2 if stage > 0 and block == 0 else 1))
                inner = outer
        self.features = nn.Sequential(*stem, *stages)
        self.head = nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[batch, 3, height, width]`` to logits."""
        logits: Tensor = self.head(self.features(x).mean((2, 3)))
        return logits


def _vectors(generator: torch.Generator, *, size: int, features: int, classes: int) -> Batch:
    x = torch.randn(size, features, generator=generator)
    return x, torch.randint(classes, (size,), generator=generator)


def _text(generator: torch.Generator, *, size: int, length: int, vocabulary: int) -> Batch:
    tokens = torch.randint(vocabulary, (size, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _images(generator: torch.Generator, *, size: int, side: int, classes: int) -> Batch:
    x = torch.randn(size, 3, side, side, generator=generator)
    return x, torch.randint(classes, (size,), generator=generator)


def _gpt(name: str, *, layers: int, width: int, heads: int, length: int, size: int, bf16: bool) -> Workload:
    model = partial(Gpt, layers, width, heads, length, 256)
    batch = partial(_text, size=size, length=length, vocabulary=256)
    return Workload(name, model, batch, AdamW, {"lr": 3e-4, "weight_decay": 0.1}, bf16=bf16)


def _resnet(width: int, blocks: int, side: int, size: int) -> Workload:
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
    batch = partial(_images, size=size, side=side, classes=10)
    return Workload("resnet", partial(ResNet, width, blocks, 10), batch, SGD, options, bf16=True, channels_last=True)


def _mlp(features: int, width: int, size: int) -> Workload:
    batch = partial(_vectors, size=size, features=features, classes=10)
    return Workload("mlp", partial(mlp, features, width, 10), batch, AdamW, {"lr": 1e-3, "weight_decay": 0.01})


def _by_name(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


GPU_WORKLOADS = _by_name(
    _mlp(features=64, width=256, size=256),
    _gpt("gpt", layers=6, width=384, heads=6, length=256, size=16, bf16=True),
    _resnet(width=64, blocks=2, side=32, size=64),
)
CPU_WORKLOADS = _by_name(
    Workload(
        "mlp2",
        partial(two_layers, 16, 32, 4),
        partial(_vectors, size=32, features=16, classes=4),
        SGD,
        {"lr": 0.05},
        None,
    ),
    _gpt("transformer4", layers=4, width=128, heads=4, length=32, size=8, bf16=False),
    _mlp(features=16, width=32, size=32),
    _gpt("gpt", layers=2, width=64, heads=2, length=32, size=4, bf16=True),
    _resnet(width=8, blocks=1, side=16, size=8),
)
"""The same workloads in sizes that suit a CPU, and two that the tape backend is held to."""


def workloads(cpu: bool) -> dict[str, Workload]:
    """The workloads of a machine, by name."""
    return CPU_WORKLOADS if cpu else GPU_WORKLOADS
