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

from recipes.benchmarks.workloads import Batch, Workload
from recipes.zoo.batches import IGNORED, VOCABULARY, sentences
from recipes.zoo.registry import Scale

_CLASSES = 4


def _bert(shape: dict[str, int]) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=_CLASSES, **shape))


def _llama(shape: dict[str, int]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **shape))


def _class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=x, attention_mask=x.ne(0).long(), labels=y).loss
    return loss


def _next_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    labels = x.masked_fill(x == 0, IGNORED)
    loss: Tensor = model(input_ids=x, attention_mask=x.ne(0).long(), labels=labels).loss
    return loss


def _sentences(generator: torch.Generator, *, scale: Scale) -> Batch:
    """Words (size, length), int64, with padding, and a class for each sentence: those of the zoo."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        batch = sentences(scale)
    return batch["input_ids"], batch["labels"]


def texts(cpu: bool) -> dict[str, Workload]:
    """The workloads of a machine, by name: half of BERT-base and as large a Llama, or small ones for a CPU."""
    scale = Scale(gpu=not cpu)
    width, layers, length = scale.pick((64, 2, 24), (384, 12, 128))
    shape = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 32,
        "intermediate_size": 4 * width, "max_position_embeddings": length,
    }  # fmt: skip
    batch = partial(_sentences, scale=scale)
    kinds: dict[str, tuple[Callable[[dict[str, int]], nn.Module], Any]] = {
        "bert": (_bert, _class_loss), "llama": (_llama, _next_loss),
    }  # fmt: skip
    return {
        name: Workload(name, partial(model, shape), batch, AdamW, {"lr": 3e-4}, bf16=not cpu, criterion=criterion)
        for name, (model, criterion) in kinds.items()
    }
