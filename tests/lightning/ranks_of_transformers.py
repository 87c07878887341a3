"""Models of the transformers library in the tests of several processes: digits read as sentences of 32 words."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from tests.lightning.parts import LitDigits

WORDS, LEAST = 18, 12
"""Sixteen shades, white, and the padding; the shortest sentence."""


def sentences(x: Tensor) -> tuple[Tensor, Tensor]:
    """Words (batch, 32) of every second pixel, int64, and which of them are no padding: bright images are longer."""
    words = (x[:, ::2] * 16).long() + 1
    lengths = LEAST + words.sum(1) % (words.shape[1] - LEAST)
    mask = torch.arange(words.shape[1], device=x.device) < lengths[:, None]
    return words * mask, mask.long()


class LitBert(LitDigits):
    """A BERT that tells digits apart, dropout and padding masks included."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        self.net: Any = BertForSequenceClassification(
            BertConfig(vocab_size=WORDS, max_position_embeddings=32, num_labels=10, **shape)
        )

    def forward(self, x: Tensor) -> Tensor:
        words, mask = sentences(x)
        logits: Tensor = self.net(input_ids=words, attention_mask=mask).logits
        return logits


class LitLlama(LitDigits):
    """A Llama that foretells the next word of each digit, each block sharded, and then the rest."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        self.net: Any = LlamaForCausalLM(
            LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, num_key_value_heads=2, **shape)
        )

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in self.net.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.net, mesh=mesh, mp_policy=policy)

    def loss_of(self, batch: Any) -> Tensor:
        words, mask = sentences(batch[0])
        labels = words.masked_fill(mask == 0, -100)
        loss: Tensor = self.net(input_ids=words, attention_mask=mask, labels=labels, use_cache=False).loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss_of(batch)
        self.log("val_loss", loss)
        self.log("perplexity", loss.exp().clamp(max=math.e**10))
