"""Rows 15 to 18: what becomes of the model between two calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import SGD

from tests.failure_modes.naive import WHEN, Normless, assert_change_handled, assert_handled, changing_rig, stay
from tests.models import CLASSES
from tests.twins import Rig


class Pair(nn.Module):
    """Two layers of one shape with tied weights, two buffers and what may become one, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.two.weight = self.one.weight
        self.register_buffer("gain", torch.full((8,), 1.5))
        self.register_buffer("shift", torch.full((8,), 0.1))
        self.register_buffer("late", None)
        self.temperature = torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x).tanh()).tanh() * self.gain + self.shift
        if self.late is not None:
            x = x * self.late
        return self.head(x) * self.temperature


def _assign(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()}, assign=True)


def _data(model: Any, optimizer: Any) -> None:
    model.one.weight.data = model.one.weight.data * 0.5


def _cast(model: Any, optimizer: Any) -> None:
    model.one.bias.data.mul_(0.5)
    model.double().half().float()


def _parametrized(model: Any, optimizer: Any) -> None:
    parametrize.register_parametrization(model.head, "weight", nn.Tanh())


def _untied(model: Any, optimizer: Any) -> None:
    model.two.weight = nn.Parameter(torch.ones(8, 8))


def _tied(model: Any, optimizer: Any) -> None:
    model.two.bias.data = model.one.bias.data


def _buffers_swapped(model: Any, optimizer: Any) -> None:
    model.gain, model.shift = model.shift, model.gain


def _data_swapped(model: Any, optimizer: Any) -> None:
    model.one.bias.data, model.two.bias.data = model.two.bias.data, model.one.bias.data


def _late_buffer(model: Any, optimizer: Any) -> None:
    model.late = torch.full((8,), 3.0)


def _transposed(model: Any, optimizer: Any) -> None:
    model.one.weight.data = model.one.weight.data.t()


def _plain(model: Any, optimizer: Any) -> None:
    model.temperature = torch.tensor(2.0)


REPLACED = [_assign, _data, _cast, _parametrized, _plain, _untied, _tied]
REPLACED += [_buffers_swapped, _data_swapped, _late_buffer, _transposed]


@pytest.mark.parametrize("change", REPLACED, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.crossed(2)
def test_row_15_tensor_replaced(change: Callable[[Any, Any], None]) -> None:
    """By another object, by other memory, by each other's memory, where there was none, or under one name of two."""
    assert_change_handled(change, make_model=Pair, replayed=11)


def test_row_15_a_replacement_that_the_user_keeps() -> None:
    """What the user put in place stays in place: writes through the user's own name reach the step."""
    mine = torch.tensor(2.0)

    def each(model: Any, optimizer: Any, index: int) -> None:
        if index == WHEN:
            mine.fill_(2.0)
            model.temperature = mine
        if index == WHEN + 4:
            mine.fill_(-1.0)

    assert_handled(partial(changing_rig, stay, make_model=Pair, each=each))


def _freeze(model: Any, optimizer: Any) -> None:
    model[0].weight.requires_grad_(False)


def _unfreeze(model: Any, optimizer: Any) -> None:
    model[4].bias.requires_grad_()
    optimizer.add_param_group({"params": [model[4].bias], "lr": 0.3})


def _frozen_head(params: Any) -> SGD:
    *others, bias = params
    bias.requires_grad_(False)
    return SGD(others, lr=0.1, momentum=0.9, fused=True)


def test_row_16_freezing() -> None:
    """Without gradients for a layer it is another step."""
    assert_change_handled(_freeze)


def test_row_16_unfreezing_into_a_new_group() -> None:
    """``add_param_group`` and ``requires_grad`` in one go, with state that does not exist yet."""
    assert_change_handled(_unfreeze, make_optimizer=_frozen_head)


def _append_layer(model: Any, optimizer: Any) -> None:
    model.append(nn.Tanh())


def _delete_layer(model: Any, optimizer: Any) -> None:
    del model[1]


def _replace_layer(model: Any, optimizer: Any) -> None:
    model[1] = nn.Identity()


def _replace_forward(model: Any, optimizer: Any) -> None:
    model[1].forward = torch.sigmoid


@pytest.mark.parametrize(
    "change", [_append_layer, _delete_layer, _replace_layer, _replace_forward], ids=lambda change: change.__name__
)
def test_row_16_layers_come_and_go(change: Callable[[Any, Any], None]) -> None:
    """Layers without parameters leave no tensor behind that a guard could miss."""
    assert_change_handled(change, make_model=Normless)


def test_row_17_eval_and_train() -> None:
    """The mode is part of the key, there and back."""

    def each(model: Any, optimizer: Any, index: int) -> None:
        model.train(not WHEN <= index < WHEN + 4)

    assert_handled(partial(changing_rig, stay, each=each), replayed=12)


@pytest.mark.parametrize("layer", [1, 3])
def test_row_18_one_module_in_eval(layer: int) -> None:
    """A frozen batch norm, or one dropout that is switched off."""
    assert_change_handled(lambda model, optimizer: model[layer].eval())


def test_row_18_statistics_no_longer_tracked() -> None:
    """Flags of a submodule that are not its mode."""
    assert_change_handled(lambda model, optimizer: setattr(model[1], "track_running_stats", False))


def test_row_18_a_twin_model_stays_in_eval() -> None:
    """The other model's mode (an EMA copy in eval) is its own."""

    def make() -> Rig:
        rig = changing_rig(stay)
        twin = copy.deepcopy(rig.owners["model"]).eval()
        inner, model = rig.step, rig.owners["model"]

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                gap = F.mse_loss(model(x), twin(x))
            return inner(x, y), gap

        rig.step, rig.owners["twin"] = step, twin
        rig.after = lambda index: twin.train(index >= WHEN)
        return rig

    assert_handled(make)
