"""Containers that a step fills, and that somebody empties or replaces before each step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.crossing import by_key, pairs
from tests.twins import Rig, assert_same_runs, build, drive, managed

CALLS = 30


class Caching(nn.Module):
    """Keeps what it computed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.cache: Any = {}
        self.inner: dict[str, Any] = {"x": {}}

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        self.cache["h"] = hidden.detach() * 1
        self.inner["x"]["h"] = hidden.detach() * 2
        return hidden


Change = Callable[[Any, int], object]
CHANGES: dict[str, Change] = {
    "cleared": lambda model, call: model.cache.clear(),
    "cleared further down": lambda model, call: model.inner["x"].clear(),
    "replaced": lambda model, call: setattr(model, "cache", {}),
    "replaced further down": lambda model, call: model.inner.update(x={}),
    "cleared later": lambda model, call: model.cache.clear() if call > 15 else None,
    "replaced now and then": lambda model, call: setattr(model, "cache", {}) if call % 7 == 0 else None,
    "taken away": lambda model, call: model.cache.pop("h"),
}


def rig_of(change: Change, *, loads: bool, device: str = "cpu") -> Rig:
    model = Caching().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    rig = Rig(step, {"model": model, "optimizer": optimizer}, [(torch.randn(3, 4).to(device),) for _ in range(CALLS)])

    def after(call: int) -> None:
        rig.extra = {str(call): (model.cache["h"].clone(), model.inner["x"]["h"].clone()), **rig.extra}
        if loads and call == 20:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        if call < CALLS - 1:
            change(model, call)

    rig.after = after
    return rig


@pairs(loads=by_key({"": False, "a loaded state": True}), verify=["off", "geometric"], name=CHANGES)
def test_what_a_replay_leaves_is_where_the_step_puts_it(name: str, verify: Any, loads: bool) -> None:
    """Also where something else moves meanwhile, and the owners are walked anew."""
    make = partial(rig_of, CHANGES[name], loads=loads)
    twin, rig = build(make), build(make)
    expected = drive(twin, twin.step)
    call = managed(rig, verify=verify)
    assert_same_runs(expected, drive(rig, call))
    assert call.stats.captured <= 4
    assert call.stats.replayed > CALLS // 3


def test_another_kind_of_container() -> None:
    """The step finds it by itself: it is captured anew."""

    def change(model: Any, call: int) -> None:
        model.cache = OrderedDict() if call >= 12 else {}

    make = partial(rig_of, change, loads=False)
    twin, rig = build(make), build(make)
    expected = drive(twin, twin.step)
    call = managed(rig, verify="off")
    assert_same_runs(expected, drive(rig, call))
    assert call.stats.captured == 2
    assert "model.cache.h is gone, and so is the object that held it" in call.report()
