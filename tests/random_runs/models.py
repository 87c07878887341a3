"""The models of random runs: a few layers of one family between a stem and a linear head."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, LENGTH = 6, 5, 2
LAYERS = {
    "dense": ("linear", "relu", "batchnorm", "layernorm", "dropout", "gelu", "shared", "tied"),
    "conv": ("conv", "relu", "batchnorm2d", "groupnorm", "dropout2d", "gelu", "depthwise", "pool"),
    "recurrent": ("lstm", "gru", "deep lstm", "layernorm", "dropout", "linear", "shared"),
    "tokens": ("linear", "attention", "layernorm", "dropout", "gru", "gelu", "tied"),
}


class Net(nn.Module):
    """Layers, a linear head, and attributes that the step reads and writes."""

    def __init__(self, family: str, layers: Iterable[str], extras: Collection[str]) -> None:
        super().__init__()
        self.family, self.seeks = family, "seeking checkpoint" in extras
        self.checkpointed = self.seeks or "checkpoint" in extras
        stems = {"tokens": nn.Embedding(CLASSES, WIDTH), "conv": nn.Conv2d(2, WIDTH, 3, padding=1)}
        self.stem = stems.get(family, nn.Linear(WIDTH, WIDTH))
        if family == "tokens" and "renormalized" in extras:
            self.stem.max_norm = 1.0
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.body = nn.ModuleList(self._layer(name) for name in layers)
        self.head = nn.Linear(WIDTH, CLASSES)
        if family == "tokens" and "tied head" in extras:
            self.head.weight = self.stem.weight
        self.bonus = nn.Parameter(torch.zeros(CLASSES))
        self.temperature, self.decay, self.sharp, self.options = 1.0, 0.9, False, {"smoothing": 0.1}
        self.seen, self.history, self.last = 0, [], torch.zeros(())
        self.register_buffer("average", torch.zeros(CLASSES, WIDTH))

    def _layer(self, name: str) -> nn.Module:
        if name == "shared":
            return self.shared
        if name == "tied":
            layer = nn.Linear(WIDTH, WIDTH, bias=False)
            layer.weight = self.shared.weight
            return layer
        return {
            "linear": lambda: nn.Linear(WIDTH, WIDTH), "relu": nn.ReLU, "gelu": nn.GELU,
            "batchnorm": lambda: nn.BatchNorm1d(WIDTH), "batchnorm2d": lambda: nn.BatchNorm2d(WIDTH),
            "layernorm": lambda: nn.LayerNorm(WIDTH), "groupnorm": lambda: nn.GroupNorm(2, WIDTH),
            "dropout": lambda: nn.Dropout(0.3), "dropout2d": lambda: nn.Dropout2d(0.3),
            "conv": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), "pool": lambda: nn.MaxPool2d(2, 1),
            "depthwise": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
            "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), "gru": lambda: nn.GRU(WIDTH, WIDTH),
            "deep lstm": lambda: nn.LSTM(WIDTH, WIDTH // 2, 2, dropout=0.2, bidirectional=True, batch_first=True),
            "attention": lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True),
        }[name]()  # fmt: skip

    def _apply_layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(layer, nn.MultiheadAttention):
            return layer(x, x, x, need_weights=False)[0]
        out = layer(x)
        return out[0] if isinstance(out, tuple) else out

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.body:
            if self.checkpointed:
                x = checkpoint(self._apply_layer, layer, x, use_reentrant=False, preserve_rng_state=self.seeks)
            else:
                x = self._apply_layer(layer, x)
        if x.dim() > 2:
            x = x.mean((2, 3) if self.family == "conv" else 1)
        return self.head(x) + self.bonus
