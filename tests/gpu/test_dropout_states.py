"""cuDNN's dropout between the layers of an RNN, drawn from a state of its own that is no generator's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.devices import BACKEND, DEVICE, assert_like_eager, needs_cuda
from tests.twins import Rig, build, managed

LENGTHS = [4, 3]


class Recurrent(nn.Module):
    """Layers with dropout between them, and a dropout of torch's own before them."""

    def __init__(self, kind: Any, *, packed: str = "", **options: Any) -> None:
        super().__init__()
        self.first = nn.Dropout(0.2)
        self.layers = kind(8, 8, num_layers=3, dropout=0.5, **options)
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's outputs."""
        lengths: Any = LENGTHS
        if self.packed == "copied":
            # Sorted on the host: the copy waits, and is needed there.
            lengths = x[..., 0].bool().sum(0).cpu()
        x = self.first(x)
        if not self.packed:
            out: Tensor = self.layers(x)[0]
            return out
        packed = pack_padded_sequence(x, lengths, enforce_sorted=not isinstance(lengths, Tensor))
        return pad_packed_sequence(self.layers(packed)[0])[0]


def _rig(kind: Any, **options: Any) -> Rig:
    model = Recurrent(kind, **options).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=DEVICE.type == "cuda", fused=DEVICE.type == "cpu")

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    calls = [(torch.randn(4, 2, 8),) for _ in range(24)]
    for (x,) in calls:
        x[LENGTHS[1] :, 1] = 0
    calls = [(x.to(DEVICE),) for (x,) in calls]
    return Rig(step, {"model": model, "optimizer": optimizer}, calls)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"packed": "listed"}, {"packed": "copied"}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers_is_replayed(kind: Any, options: dict[str, Any]) -> None:
    """Checks put the state back, and do not have cuDNN draw a new one."""
    step, _ = assert_like_eager(partial(_rig, kind, **options), captured=None, min_speedup=0)
    assert step.stats.replayed >= 14, step.report()
    assert step.stats.verified >= 3, step.report()


@needs_cuda
def test_a_seed_in_the_middle_is_found_by_the_next_check() -> None:
    """An eager step has cuDNN begin anew then, and a replay does not."""
    rig = build(partial(_rig, nn.LSTM))
    step = managed(rig, backend=BACKEND, min_speedup=0, verify=1)
    for index, args in enumerate(rig.calls):
        if index == 14:
            torch.manual_seed(3)
            with pytest.warns(UserWarning, match="is not what the eager step does"):
                step(*args)
        else:
            step(*args)
    assert step.stats.replayed >= 6, step.report()
