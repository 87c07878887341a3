"""Sequences of other lengths, nested tensors and computed scales: what operators keep on the host without saying so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from graphplan import CaptureError, HostSyncError, SkipReason
from tests.models import Box
from tests.twins import Rig, assert_equals_eager, assert_falls_back, assert_refused, by_chance, line_of

CALLS = 16


def _called(step: Callable[..., Any], *args: Callable[[int], Any]) -> Rig:
    """A step that only computes; ``args`` make its arguments from the number of the call."""

    def computing(*args: Any) -> Any:
        with torch.no_grad():
            return step(*args)

    return Rig(computing, {}, [tuple(make(index) for make in args) for index in range(CALLS)])


def _rows(index: int) -> Tensor:
    return torch.randn(3, 5, 8)


def _lengths(index: int) -> Tensor:
    # As many in all, and then fewer.
    return torch.tensor([5, 3, 2] if index < 8 else [5, 4, 1] if index < 10 else [4, 3, 2])


def packed(x: Tensor, lengths: Any) -> Tensor:
    return pack_padded_sequence(x, lengths, batch_first=True).data * 2  # culprit


def test_lengths_in_a_tensor_are_refused() -> None:
    """Packing goes by lengths on the host: the operator, the line, and what to do."""
    make = partial(_called, lambda x, lengths: packed(x, by_chance(lengths)), _rows, _lengths)
    name = r"aten\._pack_padded_sequence\.default reads the lengths of sequences on the host"
    text = rf"{name} at {line_of(packed)}.*use a mask.*list of numbers"
    assert_refused(make, HostSyncError, text)
    assert_falls_back(make, SkipReason.HOST_SYNC, text)


def there_and_back(x: Tensor, lengths: list[int], is_sorted: bool) -> tuple[Tensor, Tensor]:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=is_sorted)
    return pad_packed_sequence(packed._replace(data=packed.data * 2), batch_first=True)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_lengths_in_a_list_are_numbers_of_the_program(is_sorted: bool) -> None:
    """What the message advises: other numbers are another program."""
    lists = ([5, 3, 2], [5, 4, 1]) if is_sorted else ([3, 5, 2], [1, 4, 5])
    make = partial(_called, there_and_back, _rows, lambda index: lists[index % 2], lambda index: is_sorted)
    assert_equals_eager(make, captured=2)


def changed_lengths(x: Tensor, one: Tensor) -> Tensor:
    lengths = torch.tensor([4, 3, 2])
    lengths += by_chance(one)
    return pack_padded_sequence(x, lengths, batch_first=True).data * 2  # culprit


def test_a_constant_that_is_written_to_is_none() -> None:
    make = partial(_called, changed_lengths, _rows, lambda index: torch.tensor(index // 9))
    assert_refused(make, HostSyncError, line_of(changed_lengths))


def encoded(encoder: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return encoder(x, src_key_padding_mask=mask)  # culprit


def made_nested(encoder: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    parts = torch.nested.as_nested_tensor([x[0, :3], x[1, :4]])  # culprit
    return torch.nested.to_padded_tensor(parts, 0.0)


def made_jagged(encoder: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    parts = torch.nested.as_nested_tensor([x[0, :3], x[1, :4]], layout=torch.jagged)  # culprit
    return torch.nested.to_padded_tensor(parts, 0.0)


def measured_jagged(encoder: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Torch asks Python for the sizes of its parts, from code that lets no error through."""
    parts = torch.nested.as_nested_tensor([x[0, :3], x[1, :4]], layout=torch.jagged)  # culprit
    with torch.enable_grad():
        parts = nn.functional.linear(parts, torch.eye(x.shape[-1], requires_grad=True))
    return torch.nested.to_padded_tensor(parts, 0.0).detach()


with warnings.catch_warnings():
    # What torch says once: that these are a prototype, and those are to be replaced.
    warnings.simplefilter("ignore")
    HELD = Box(item=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def taken_nested(encoder: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(HELD.item, 0.0)  # culprit


def _mask(index: int, *, aligned: bool = True) -> Tensor:
    mask = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 1, 1, 1]], dtype=torch.bool)
    return (mask if aligned or index > 8 else mask.flip(1)).roll(index // 7, 0)


def encoder_rig(step: Callable[..., Any], *, nested: bool = True, aligned: bool = True) -> Rig:
    """Inference by a transformer whose padding is at the ends of the rows, at first in their beginning if told so."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    rig = _called(partial(step, encoder), _rows, partial(_mask, aligned=aligned))
    rig.owners["encoder"] = encoder
    return rig


@pytest.mark.parametrize(
    "step", [made_nested, made_jagged, measured_jagged, taken_nested], ids=lambda step: step.__name__
)
def test_nested_tensors_are_refused(step: Callable[..., Any]) -> None:
    """Whose parts have lengths of their own: the operator, the line, and how to do without."""
    make = partial(encoder_rig, step)
    text = (
        rf"aten\.\w+\S* (makes|gets) a nested tensor at {line_of(step)}.*to_padded_tensor.*enable_nested_tensor=False"
    )
    assert_refused(make, CaptureError, text)


@pytest.mark.parametrize("aligned", [True, False])
def test_a_transformer_that_makes_nested_tensors_is_refused(aligned: bool) -> None:
    """Torch looks at the mask on the host, and makes nested tensors if that suits it."""
    make = partial(encoder_rig, lambda encoder, x, mask: encoded(encoder, x, by_chance(mask)), aligned=aligned)
    text = rf"aten\._nested_tensor_from_mask_left_aligned\S* reads the mask .* at {line_of(encoded)}"
    assert_refused(make, HostSyncError, text, "enable_nested_tensor=False")
    assert_falls_back(make, SkipReason.HOST_SYNC, text)


def test_a_transformer_without_nested_tensors_is_captured() -> None:
    """What the message advises."""
    assert_equals_eager(partial(encoder_rig, encoded, nested=False))


def by_tensors(x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return torch.quantize_per_tensor(x, scale, torch.tensor(0), torch.qint8).dequantize()  # culprit


def by_tensors_of_many(x: Tensor) -> Tensor:
    scales = x.abs().amax(1) / 127
    parts = torch.quantize_per_tensor(x.unbind(), scales, torch.zeros(4), torch.qint8)  # culprit
    return parts[0].dequantize()


def dynamic(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor_dynamic(x, torch.qint8, False).dequantize()  # culprit


def by_channel(x: Tensor) -> Tensor:
    scales = x.abs().amax(1) / 127
    return torch.quantize_per_channel(x, scales, torch.zeros(4), 0, torch.qint8).dequantize()  # culprit


def made_by_channel(x: Tensor) -> Tensor:
    whole, scales = (x * 10).to(torch.int8), x.abs().amax(1)
    return torch._make_per_channel_quantized_tensor(whole, scales, torch.zeros(4), 0).dequantize()  # culprit


COMPUTED = [by_tensors, by_tensors_of_many, dynamic, by_channel, made_by_channel]


@pytest.mark.parametrize("step", COMPUTED, ids=lambda step: step.__name__)
def test_computed_scales_are_refused(step: Callable[..., Any]) -> None:
    """A quantised tensor has its scale on the host: the operator, the line, and what to do instead."""
    make = partial(_called, step, lambda index: torch.randn(4, 8))
    text = rf"aten\.\w+\S* reads the scale .* at {line_of(step)}.*fake_quantize.*as numbers"
    assert_refused(make, HostSyncError, text)
    assert_falls_back(make, SkipReason.HOST_SYNC, text)


def by_numbers(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 3, torch.quint8).dequantize()


def by_constants(x: Tensor) -> Tensor:
    scales = torch.tensor([0.1, 0.2]).repeat(2)
    whole = torch.quantize_per_channel(x, scales, torch.zeros(4), 0, torch.qint8)
    return whole.dequantize() + torch.quantize_per_tensor(x, scales[0], torch.tensor(2), torch.qint8).dequantize()


def faked(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, x.abs().max() / 127, torch.tensor(0), -128, 127)


@pytest.mark.parametrize("step", [by_numbers, by_constants, faked], ids=lambda step: step.__name__)
def test_scales_that_stay_are_captured(step: Callable[..., Any]) -> None:
    """Numbers, constants, and what the message advises."""
    assert_equals_eager(partial(_called, step, lambda index: torch.randn(4, 8)))


def test_a_dynamically_quantised_model_is_captured() -> None:
    """Its activations have scales within one operator, its weights have theirs from before."""
    with pytest.warns(DeprecationWarning, match="quantization"):
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)).eval(), {nn.Linear})
    assert_equals_eager(partial(_called, model, lambda index: torch.randn(4, 8)))
