"""Errors of graphplan's own around the calls of a graphed function: a named refusal, and the call is made once."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import CaptureError, EffectError, FaultError, Graphed, graphed
from tests.step.test_error_gate import WHEN, raising

CALLS = 14


class Decoder(nn.Module):
    """A module that counts what it has seen in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Rows of zeros, with which padding fills up, count nothing."""
        self.seen.add_((x != 0).any(1).sum())
        return self.layer(x)


def _decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().requires_grad_(False)


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3 + number % 2, 4, generator=generator) for number in range(CALLS)]


def _drive(call: Any) -> list[Tensor]:
    with torch.no_grad():
        return [call(x) for x in _batches()]


BEFORE = {
    "exact": ["inference.graphed_functions:plain", "step.reasons:flatten", "step.lookup:Lookup.find",
              "step.managed:trace", "step.stages:capture_program"],
    "bucket": ["step.padding:Padding.kind",
               "step.padding:Padding.kind", "step.padding:Padding._learn", "step.padding:Kind.pad",
               "step.managed:trace"],
}  # fmt: skip
PLACES = [(shapes, place) for shapes, places in BEFORE.items() for place in places]
AFTER = [
    "step.capture_sizes:CaptureSize.meet",
    "step.capture_sizes:CaptureSize.cut",
    "step.padding:Kind.cut",
]


def _graphed(shapes: str, on_failure: str, **options: Any) -> tuple[Decoder, Graphed]:
    options |= {"buckets": [4]} if shapes == "bucket" else {}
    options["static_roles"] = ["input", "param", "state"]
    decoder = _decoder()
    return decoder, graphed(decoder, shapes=shapes, on_failure=on_failure, **options)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(("shapes", "place"), PLACES)
@pytest.mark.filterwarnings("ignore:graphplan runs")
def test_an_error_of_graphplans_own_leaves_an_eager_call(shapes: str, place: str, when: str) -> None:
    twin = _decoder()
    expected = _drive(twin)
    decoder, function = _graphed(shapes, "eager")
    with raising(f"graphplan.{place}", WHEN[when]):
        found = _drive(function)
        assert "graphplan" in function.report()
    for one, two in zip(expected, found, strict=True):
        # A padded call rounds otherwise.
        torch.testing.assert_close(one, two)
    assert torch.equal(twin.seen, decoder.seen)


@pytest.mark.parametrize(("shapes", "place"), PLACES)
def test_an_error_of_graphplans_own_is_a_refusal(shapes: str, place: str) -> None:
    decoder, function = _graphed(shapes, "raise")
    done = 0
    with (
        raising(f"graphplan.{place}", WHEN["always"]),
        pytest.raises(FaultError, match=r"InjectedError .*: not expected"),
        torch.no_grad(),
    ):
        for x in _batches():
            function(x)
            done += 1
    assert decoder.seen == sum(len(x) for x in _batches()[:done])


@pytest.mark.parametrize("place", AFTER)
@pytest.mark.parametrize("on_failure", ["raise", "eager"])
@pytest.mark.filterwarnings("ignore:graphplan runs")
def test_what_fails_after_a_padded_call_is_said_so(place: str, on_failure: str) -> None:
    twin = _decoder()
    expected = _drive(twin)
    decoder, function = _graphed("bucket", on_failure)
    lost, refused = [], 0
    with raising(f"graphplan.{place}", partial(int.__eq__, 3)), torch.no_grad():
        for x, one in zip(_batches(), expected, strict=True):
            try:
                torch.testing.assert_close(function(x), one)
            except EffectError as error:
                lost.append(str(error))
            except CaptureError:
                # The call after it, if there was no replay yet.
                refused += len(x)
    assert len(lost) == 1
    assert re.search(r"InjectedError .*: not expected\. Decoder has run", lost[0])
    assert not refused or on_failure == "raise"
    assert twin.seen == decoder.seen + refused


@pytest.mark.parametrize("shapes", BEFORE)
@pytest.mark.parametrize("at", [0, 1, 2, 6])
def test_errors_of_the_functions_own_come_out_as_they_are(shapes: str, at: int) -> None:
    _, function = _graphed(shapes, "eager")
    with torch.no_grad():
        for x in _batches()[:at]:
            function(x)
        with pytest.raises(TypeError, match="positional argument"):
            function(torch.ones(3, 4), None)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            function(torch.ones(3, 5))
