"""Functions that draw random numbers: with padding they would draw others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphplan import Graphed, PaddingError, SkipReason, graphed

_OWN = torch.Generator()


def tokens(x: Tensor) -> Tensor:
    """Drawn from torch's own generator."""
    return torch.multinomial(x.softmax(-1), 1)


def own_tokens(x: Tensor) -> Tensor:
    """Drawn from a generator that only a name leads to."""
    return torch.multinomial(x.softmax(-1), 1, generator=_OWN)


def seldom_others(x: Tensor) -> Tensor:
    """What is drawn shows in no result."""
    return x + 0.0 * torch.rand_like(x)


def served(fn: Callable[..., Any], **options: Any) -> Graphed:
    """``fn`` with one capture size."""
    return graphed(fn, **{"backend": "tape", "shapes": "bucket", "buckets": [4], **options})


def run(fn: Callable[[Tensor], Tensor], batches: list[Tensor]) -> list[Tensor]:
    """What comes out from one seed, and the states of the generators after it."""
    torch.manual_seed(0)
    _OWN.manual_seed(0)
    with torch.inference_mode():
        return [*(fn(x).clone() for x in batches), torch.get_rng_state(), _OWN.get_state()]


def batches_of(*rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(number, 6, generator=generator) for number in rows]


@pytest.mark.parametrize("verify", ["geometric", "off"])
@pytest.mark.parametrize("fn", [tokens, own_tokens, seldom_others])
def test_padded_calls_that_draw_are_refused_by_name(fn: Any, verify: str) -> None:
    """Without a word they drew for the padding, too, and everything drawn later was another."""
    batches = batches_of(3, 3)
    fast = served(fn, verify=verify)
    text = rf"the step draws random numbers: at test_drawing\.py:\d+ in {fn.__name__}: .* For a padded"
    torch.manual_seed(0)
    _OWN.manual_seed(0)
    with torch.inference_mode(), pytest.raises(PaddingError, match=text):
        found = [fast(batches[0])]
        fast(batches[1])
    found += [torch.get_rng_state(), _OWN.get_state()]
    assert all(map(torch.equal, found, run(fn, batches[:1])))


@pytest.mark.parametrize("verify", ["geometric", "off"])
@pytest.mark.parametrize("fn", [tokens, own_tokens, seldom_others])
@pytest.mark.twice
def test_calls_of_the_size_itself_are_replayed(fn: Any, verify: str) -> None:
    batches = batches_of(*(4, 3) * 12)
    fast = served(fn, verify=verify, on_failure="eager")
    expected = run(fn, batches)
    with pytest.warns(UserWarning, match="no longer pads this step's batches: the step draws random numbers"):
        found = run(fast, batches)
    assert all(map(torch.equal, found, expected))
    assert fast.stats.skipped[SkipReason.PADDING] == 12 and fast.stats.replayed == 8


@pytest.mark.parametrize("verify", ["geometric", "off"])
def test_a_program_that_draws_is_not_fed_padding(verify: str) -> None:
    """It was captured before the first call that is padded."""
    batches = batches_of(*(4,) * 8, *(3,) * 4, *(4,) * 4)
    fast = served(tokens, verify=verify, on_failure="eager")
    expected = run(tokens, batches)
    with pytest.warns(UserWarning, match=r"the step draws random numbers: at test_drawing\.py:\d+ in tokens"):
        found = run(fast, batches)
    assert all(map(torch.equal, found, expected))
    assert fast.stats.skipped[SkipReason.PADDING] == 4


def test_what_may_draw_and_does_not_is_padded() -> None:
    """Attention says that it draws whether or not it drops anything."""

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    batches = [torch.rand(3, 1, 5, 8) for _ in range(12)]
    with torch.inference_mode():
        fast = served(attend)
        for x in batches:
            torch.testing.assert_close(fast(x), attend(x))
    assert fast.stats.replayed > 4
