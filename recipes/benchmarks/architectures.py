"""The networks of the benchmark, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
    """A causal language model with learned positions and no dropout; ``tied``: one table of tokens for both ends."""

    def __init__(
        self, layers: int, width: int, heads: int, length: int, vocabulary: int, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            nn.init.normal_(self.head.weight, std=0.02)
            self.tokens.weight = self.head.weight

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
