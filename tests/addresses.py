"""Tapes that are strict about addresses: a CUDA graph would go on with those that it was recorded with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphplan.backends.tape import TapeRecording
from graphplan.tensors.attributes import is_freed


def insist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail replays on the tape of memory that lies elsewhere than at capture; what the step itself gives back may."""
    record, replay = TapeRecording.__init__, TapeRecording.replay

    def note(tape: Any, mode: Any) -> None:
        record(tape, mode)
        lent = {memory._cdata for memory, _ in tape._lent}
        used = [t for kernel in mode.kernels for t in kernel.tensors if t.layout is torch.strided and not is_freed(t)]
        # Tensors of the tape's own: programs count who has the memory.
        tensors = {tensor.untyped_storage()._cdata: tensor for tensor in used}
        tape.places = [(t, t.untyped_storage().data_ptr()) for key, t in tensors.items() if key not in lent]

    def check(tape: Any) -> None:
        moved = [tensor.nbytes for tensor, place in tape.places if tensor.untyped_storage().data_ptr() != place]
        assert not moved, f"a replay of memory that has moved: {moved} bytes"
        replay(tape)

    monkeypatch.setattr(TapeRecording, "__init__", note)
    monkeypatch.setattr(TapeRecording, "replay", check)
