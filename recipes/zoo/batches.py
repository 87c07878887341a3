"""Generated batches in the form of real data: padded sentences, labels, file names beside tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recipes.zoo.registry import Scale

COUNT = 8
"""Number of different batches of an entry."""
VOCABULARY = 512
IGNORED = -100
"""The label of positions that the loss ignores."""


def many(make: Callable[[], Any], count: int = COUNT) -> list[Any]:
    """Return ``count`` batches."""
    return [make() for _ in range(count)]


def padding(size: int, length: int) -> Tensor:
    """Return a mask ``[size, length]``: ones, then zeros for padding in all rows but the first."""
    lengths = torch.randint(length // 2, length, (size,))
    lengths[0] = length
    return (torch.arange(length) < lengths[:, None]).long()


def sentences(scale: Scale, labels: str = "class", classes: int = 4) -> dict[str, Tensor]:
    """Return a batch like a tokenizer and a collator: padded tokens, their mask, and labels by sentence or by token."""
    size, length = scale.pick((4, 24), (16, 128))
    mask = padding(size, length)
    tokens = torch.randint(5, VOCABULARY, (size, length)) * mask
    batch = {"input_ids": tokens, "attention_mask": mask}
    if labels == "class":
        batch["labels"] = torch.randint(classes, (size,))
    elif labels == "next":
        batch["labels"] = tokens.masked_fill(mask == 0, IGNORED)
    elif labels == "masked":
        hidden = (torch.rand(size, length) < 0.15) & (mask == 1)
        hidden[:, 0] = True
        batch["labels"] = tokens.masked_fill(~hidden, IGNORED)
    elif labels == "token":
        batch["labels"] = torch.randint(classes, (size, length)).masked_fill(mask == 0, IGNORED)
    elif labels == "span":
        batch["start_positions"] = torch.randint(length // 2, (size,))
        batch["end_positions"] = torch.randint(length // 2, (size,))
    return batch


def pairs(scale: Scale) -> dict[str, Tensor]:
    """Return source sentences, and target sentences as labels."""
    batch = sentences(scale, labels="none")
    target = sentences(scale, labels="next")
    half = target["labels"].shape[1] // 2
    return {**batch, "labels": target["labels"][:, :half].contiguous()}


def images(scale: Scale, classes: int = 10, side: int | None = None, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Return normalised images and their classes."""
    side = side or scale.pick(32, 64)
    size = size or scale.pick(4, 32)
    return torch.randn(size, 3, side, side), torch.randint(classes, (size,))
