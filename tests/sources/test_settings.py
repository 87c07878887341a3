"""torch's global settings, the shapes of tensors and the classes of modules may change between calls, too."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from tests.models import Mlp, float_batches
from tests.twins import Rig, assert_same_runs, build, drive, managed

CALLS, WHEN = 24, 12
pytestmark = pytest.mark.filterwarnings("ignore:graphplan")


class Settled:
    """Puts torch's settings back."""

    def __enter__(self) -> None:
        self.dtype = torch.get_default_dtype()

    def __exit__(self, *exc: object) -> None:
        torch.set_default_dtype(self.dtype)
        torch.backends.cuda.enable_flash_sdp(True)


class Attentive(nn.Module):
    """Attention over what one row holds, which torch computes by one of several kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 64), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x).view(len(x), 1, 8, 8)
        return self.head(F.scaled_dot_product_attention(rows, rows, rows)[:, 0].mean(1))


class Halved(nn.ReLU):
    """Another activation, written by the user."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


def _shrink_buffer(model: Any) -> None:
    model.scales.data = model.scales.data[:3]


def _resize_buffer(model: Any) -> None:
    model.scales.resize_(3)


def _shrink_matrix(model: Any) -> None:
    model.table.data = model.table.data[:2]


def _reinterpret(model: Any) -> None:
    model.scales.data = model.scales.data.view(torch.int32)


def _shrink_frozen(model: Any) -> None:
    model.frozen.data = model.frozen.data[:3]


def _ask_for_gradients(model: Any) -> None:
    model.scales.requires_grad_()


def _other_class(model: Any) -> None:
    model.act.__class__ = nn.Tanh


def _descend(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for param in optimizer.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.003)


def _drop_half(optimizer: Any, *_: Any) -> None:
    for param in optimizer.param_groups[0]["params"][::2]:
        param.grad = None


def _own_step(model: Any) -> None:
    model.optimizer[0].step = partial(_descend, model.optimizer[0])


def _own_zero_grad(model: Any) -> None:
    model.optimizer[0].zero_grad = partial(_drop_half, model.optimizer[0])


def _halved(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: 0.5 * function(*args, **kwargs)


def _double_by_default(model: Any) -> None:
    torch.set_default_dtype(torch.float64)


def _other_attention(model: Any) -> None:
    torch.backends.cuda.enable_flash_sdp(False)


PATCHED = [(nn.ReLU, "forward"), (SGD, "step"), (SGD, "zero_grad"), (F, "linear"), (torch, "batch_norm")]
PATCHED += [(importlib.import_module("torch.optim.sgd"), "_fused_sgd")]
CHANGES = [_shrink_buffer, _resize_buffer, _shrink_matrix, _reinterpret, _shrink_frozen, _ask_for_gradients]
CHANGES += [_own_step, _own_zero_grad, _other_class, _double_by_default, _other_attention]


class Model(nn.Module):
    """What every change finds something of."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.body, self.act, self.extra = Mlp(), act, Attentive()
        self.frozen = nn.Parameter(torch.randn(6, 3), requires_grad=False)
        self.register_buffer("scales", torch.arange(6.0))
        self.register_buffer("table", torch.arange(12.0).view(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scales.float().mean() + self.table.mean() + self.frozen.mean()  # type: ignore[operator]
        made = torch.full((1,), 0.1)
        return (self.act(self.body(x)) + self.extra(x)) * scale * made.sum() * made.element_size()


def _rig(change: Callable[[Any], None]) -> Rig:
    model = Model(Halved() if change is _other_class else nn.ReLU())
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    model.optimizer = (optimizer,)  # type: ignore[assignment]

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        return loss

    def after(index: int) -> None:
        if index == WHEN:
            change(model)

    return Rig(train_step, {"model": model, "optimizer": optimizer}, list(float_batches(CALLS)), after)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.crossed(2)
def test_a_change_reaches_the_next_step(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are eager's, and are others than without the change."""
    records = []
    for each in (change, change, lambda model: None):
        with Settled(), monkeypatch.context() as patch:
            for kind, name in PATCHED:
                patch.setattr(kind, name, getattr(kind, name))
            rig = build(partial(_rig, each))
            step = managed(rig, verify="off") if len(records) == 1 else rig.step
            records.append(drive(rig, step))
            if len(records) == 1:
                continue
            if len(records) == 2:
                assert step.stats.replayed >= WHEN + 1 - 6
    assert_same_runs(records[0], records[1])
    with pytest.raises(AssertionError, match="differences"):
        assert_same_runs(records[0], records[2])


@pytest.mark.twice
def test_a_default_device_is_no_reason_to_stay_eager() -> None:
    rig = build(partial(_rig, lambda model: None))
    with torch.device("cpu"):
        step = managed(rig)
        drive(rig, step)
    assert step.stats.replayed == CALLS - 6
