"""Checks with and without room for copies of what the first replay leaves."""

from __future__ import annotations

import pytest
import torch

from graphplan.verify.check import Check


@pytest.fixture(params=[True, False], ids=["copies", "sums"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether checks find room for copies where the step computes. A host always has: there it is denied them."""

    def is_beside(self: Check, device: torch.device) -> bool:
        return bool(request.param)

    monkeypatch.setattr(Check, "_is_beside", is_beside)
    return bool(request.param)
