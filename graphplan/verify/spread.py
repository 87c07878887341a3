"""How far replays from one state lie apart, which may explain how far the eager step is from one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from graphplan.verify.compare import Run, unexplained
from graphplan.verify.noise import Moves, Noise

_REPLAYS = 3
"""As often a replay is repeated until two of them differ."""
Tensors = Mapping[str, Tensor]


def beyond_spread(
    paths: list[str],
    old: Tensors,
    replayed: Tensors,
    eager: Run,
    *,
    repeat: Callable[[bool], Run],
    on_any: Callable[[bool], bool],
    noise: Noise,
    may_reorder: bool,
    device: torch.device,
) -> dict[str, float]:
    """What more replays from the same state do not explain: noise may be so seldom that several show none.

    Args:
        paths: where ``replayed`` and the eager step differ.
        old: what was there before.
        replayed: what the first replay left.
        eager: the eager step beside that.
        repeat: one more replay from ``old`` beside it; told True, one from parameters with other last bits.
        on_any: whether something is so on any rank, all of which repeat as often.
        noise: what earlier checks have shown, to which this one adds.
        may_reorder: whether the step may add up in other orders. Replays keep to theirs, and eager steps need not.
        device: where to compute what lies on the host.

    Returns:
        How far replays lie apart, by path.
    """
    again: list[Run] = []
    found = dict.fromkeys(paths, 0.0)
    noisy = may_reorder
    for _ in range(_REPLAYS):
        again.append(repeat(False))
        noisy = noisy or again[-1].differs
        found = unexplained(found, replayed, again, eager, noisy=noisy, device=device)
        if not on_any(bool(found) and not noisy):
            break
    off = None
    # Noise that is rare has not been seen in a few replays: what rounding does says how large it may be.
    if on_any(noisy and (bool(found) or not noise.is_known)):
        off = repeat(True)
        found = unexplained(found, replayed, again, eager, off, noisy=True, device=device)
    if not found and noisy:
        noise.learn(Moves.of(old, replayed, device), again, eager, off)
    return found
