"""Steps of the transformers library for two devices: BERT tells sentences apart, Llama foretells the next word.

Sentences are padded: what is no word is 0, which the attention mask leaves out and the loss ignores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from recipes.workloads import Batch, Workload

WORDS, CLASSES, IGNORED = 512, 4, -100


def _bert(shape: dict[str, int]) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=CLASSES, **shape))


def _llama(shape: dict[str, int]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **shape))


def _class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=x, attention_mask=x.ne(0).long(), labels=y).loss
    return loss


def _next_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    labels = x.masked_fill(x == 0, IGNORED)
    loss: Tensor = model(input_ids=x, attention_mask=x.ne(0).long(), labels=labels).loss
    return loss


def _sentences(generator: torch.Generator, *, size: int, length: int) -> Batch:
    """Words (size, length), int64, at least half of each sentence; one is as long as the batch. A class for each."""
    lengths = torch.randint(length // 2, length, (size,), generator=generator)
    lengths[0] = length
    words = torch.randint(1, WORDS, (size, length), generator=generator) * (torch.arange(length) < lengths[:, None])
    return words, torch.randint(CLASSES, (size,), generator=generator)


def texts(cpu: bool) -> dict[str, Workload]:
    """The workloads of a machine, by name: half of BERT-base and as large a Llama, or small ones for a CPU."""
    width, layers, size, length = (64, 2, 4, 24) if cpu else (384, 12, 16, 128)
    shape = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 32,
        "intermediate_size": 4 * width, "max_position_embeddings": length,
    }  # fmt: skip
    batch = partial(_sentences, size=size, length=length)
    kinds: dict[str, tuple[Callable[[dict[str, int]], nn.Module], Any]] = {
        "bert": (_bert, _class_loss), "llama": (_llama, _next_loss),
    }  # fmt: skip
    return {
        name: Workload(name, partial(model, shape), batch, AdamW, {"lr": 3e-4}, bf16=not cpu, criterion=criterion)
        for name, (model, criterion) in kinds.items()
    }
