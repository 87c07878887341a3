"""A made-up CUDA device, of which it is known how busy it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphplan.step import Options, pace


class Device:
    """One that has nothing to do for such parts of the time, each time somebody watches it; the last one goes on."""

    def __init__(self, *idle: float) -> None:
        self.idle = idle or (0.0,)
        self.watched = self.watching = 0

    def watch(self, stream: Any) -> Any:
        """As :class:`Idleness`."""
        share = self.idle[min(self.watched, len(self.idle) - 1)]
        self.watched += 1
        self.watching += 1

        def end() -> float:
            self.watching -= 1
            return share

        return SimpleNamespace(end=end)


def pretend(monkeypatch: pytest.MonkeyPatch, *idle: float) -> Device:
    """Have steps on the CPU wait as those on such a device would."""
    device = Device(*idle)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(pace, "Idleness", device.watch)
    is_paced = Options.is_paced
    monkeypatch.setattr(Options, "is_paced", lambda options, device: is_paced(options, torch.device("cuda")))
    return device
