"""The two networks of the recipes, as plain modules: a classifier of the digits and a small GPT for text."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from recipes.datasets import DIGITS_CLASSES, DIGITS_FEATURES, VOCABULARY


class DigitsMLP(nn.Sequential):
    """``depth`` blocks of linear, batch norm, ReLU and dropout, then a linear layer to the ten classes."""

    def __init__(self, *, width: int = 128, depth: int = 2, dropout: float = 0.1) -> None:
        layers: list[nn.Module] = []
        features = DIGITS_FEATURES
        for _ in range(depth):
            layers += [nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)]
            features = width
        super().__init__(*layers, nn.Linear(features, DIGITS_CLASSES))


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a two-layer MLP, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.residual_dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        """Causal multi-head attention of ``x``, shape (batch, time, width), to itself."""
        batch, time, width = x.shape
        heads = self.attention_in(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        attended: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return attended

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the same shape as ``x``."""
        x = x + self.residual_dropout(self.attend(self.attention_norm(x)))
        return x + self.residual_dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer over characters with learnt positions.

    Raises:
        ValueError: if ``heads`` does not divide ``width``.
    """

    def __init__(
        self,
        *,
        vocabulary: int = VOCABULARY,
        block_size: int = 64,
        layers: int = 2,
        heads: int = 4,
        width: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}: choose a width that is a multiple of heads")
        self.block_size = block_size
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next character, shape (batch, time, vocabulary), for ``tokens`` of (batch, time)."""
        time = tokens.shape[1]
        if time > self.block_size:
            raise ValueError(
                f"tokens have {time} positions, the model was built for block_size={self.block_size}: cut them, or "
                "build it for longer ones"
            )
        # A slice of the table, not a lookup of arange(time): no index tensor has to be made in each step.
        x = self.characters(tokens) + self.positions.weight[:time]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
