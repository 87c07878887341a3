"""Training steps at capture sizes on the device: one graph for each, in memory that batches are padded in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import PaddingError, graph_step
from tests.devices import BACKEND, CUDA, DEVICE, to_device
from tests.step.test_training_buckets import SIZES, Batch, Training, batches

COUNT = 120


class Masked(nn.Module):
    """A transformer of torch's own attention, under a mask."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(24, 64), nn.Embedding(48, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(64) if norm else nn.Identity()
        self.head = nn.Linear(64, 24)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        hidden = torch.zeros(mask.shape, device=ids.device).masked_fill(mask == 0, -torch.inf)
        x = self.encoder(x, src_key_padding_mask=hidden)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


class OnDevice(Training):
    """Mixed precision where ``bf16`` says so, and a model on the device."""

    def __init__(self, *, bf16: bool = False, **options: Any) -> None:
        super().__init__(lambda: Masked(**options).to(DEVICE))
        self.bf16 = bf16

    def step(self, batch: Batch) -> Any:
        self.optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(batch["input_ids"], batch["attention_mask"])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        self.optimizer.step()
        return loss, logits


def bucketed(training: OnDevice, **options: Any) -> Any:
    options = {"buckets": {1: SIZES}, "dynamic": {"batch": 1}, "pad": {"labels": -100}, "min_speedup": 0, **options}
    return graph_step(training.step, owners=training.owners, shapes="bucket", backend=BACKEND, **options)


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"dropout": 0.1}, {"bf16": True, "dropout": 0.1}], ids=str)
def test_one_graph_for_each_size(options: Any) -> None:
    """No comparison with a batch as it came is a refusal, and no check of a replay."""
    training = OnDevice(**options)
    step = bucketed(training)
    losses = []
    for batch in to_device(batches(COUNT)):
        loss, logits = step(batch)
        assert logits.shape[:2] == batch["input_ids"].shape
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < sum(losses[:10])
    stats, report = step.stats, step.report()
    assert stats.captured == len(SIZES) and stats.replayed > COUNT // 2, report
    assert stats.verified > 0 and step.shapes.checked >= 2 * len(SIZES), report


def test_batches_in_host_memory_are_padded_on_their_way() -> None:
    eager, found = OnDevice(), OnDevice()
    step = bucketed(found, device=DEVICE)
    for batch in batches(COUNT):
        pinned = {name: x.pin_memory() if CUDA and isinstance(x, Tensor) else x for name, x in batch.items()}
        loss, _ = step(pinned)
        torch.testing.assert_close(loss, eager.step(to_device(batch))[0].detach(), rtol=2e-2, atol=2e-2)
    assert step.stats.captured == len(SIZES)


def test_batch_norm_is_refused() -> None:
    training = OnDevice(norm=True)
    step = bucketed(training)
    made = to_device(batches(6))
    step(made[0])
    step(made[1])
    with pytest.raises(PaddingError, match=r"model\.norm\.running_mean"):
        for batch in made:
            step(batch)


def test_steps_that_are_timed_first_are_not_padded() -> None:
    """And where replays pay, padding follows."""
    training = OnDevice()
    step = bucketed(training, min_speedup=1e-6)
    for batch in to_device(batches(COUNT)):
        step(batch)
    assert step.shapes.padded_calls < COUNT - 7 and step.stats.replayed > COUNT // 3, step.report()
