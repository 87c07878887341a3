"""A small GPT that generates: it keeps keys and values of each request in a slot, as servers do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.datasets import VOCABULARY


class Layer(nn.Module):
    """Attention to what a request's slot holds, and a feed-forward layer, both residual, normalised before."""

    keys: Tensor
    values: Tensor

    def __init__(self, width: int, heads: int, slots: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(slots, length, heads, width // heads), persistent=False)

    def forward(self, x: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape; ``positions`` are ``[batch, time]``."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.first(x)).chunk(3, -1))
        self.keys[slots[:, None], positions] = k
        self.values[slots[:, None], positions] = v
        seen = torch.arange(self.keys.shape[1], device=x.device) <= positions[..., None]
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.keys[slots].transpose(1, 2),
            self.values[slots].transpose(1, 2),
            attn_mask=seen[:, None],
        )
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.feed(self.second(x))
        return out


class Decoder(nn.Module):
    """Characters to logits of the next one. The last slot, ``spare``, belongs to nobody: padding goes there."""

    def __init__(
        self, *, layers: int = 4, width: int = 128, heads: int = 4, slots: int = 16, length: int = 128
    ) -> None:
        super().__init__()
        self.spare = slots
        self.length = length
        self.characters, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList([Layer(width, heads, slots + 1, length) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Logits ``[batch, time, vocabulary]`` of ``tokens`` at ``positions``, both ``[batch, time]``."""
        x = self.characters(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, slots, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits
