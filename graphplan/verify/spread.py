"""How far replays from one state lie apart, which may explain how far the eager step is from one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from graphplan.verify.compare import Difference, Far, are_noisy, describe, unexplained
from graphplan.verify.noise import Noise

_REPLAYS = 3
"""As often a replay is repeated until two of them differ."""
Tensors = Mapping[str, Tensor]


def beyond_spread(
    paths: list[str],
    old: Tensors,
    replayed: Tensors,
    eager: Tensors,
    *,
    repeat: Callable[[bool], Tensors],
    on_any: Callable[[bool], bool],
    noise: Noise,
    may_reorder: bool,
) -> list[Difference]:
    """What more replays from the same state do not explain: noise may be so seldom that several show none.

    Args:
        paths: where ``replayed`` and ``eager`` differ.
        old: what was there before.
        replayed: what the first replay left.
        eager: what the eager step left.
        repeat: what one more replay from ``old`` leaves; told True, one from parameters with other last bits.
        on_any: whether something is so on any rank, all of which repeat as often.
        noise: what earlier checks have shown, to which this one adds.
        may_reorder: whether the step may add up in other orders. Replays keep to theirs, and eager steps need not.
    """
    again: list[Tensors] = []
    found = dict.fromkeys(paths, 0.0)
    far = Far(replayed)
    noisy = may_reorder
    for _ in range(_REPLAYS):
        again.append(repeat(False))
        noisy = noisy or are_noisy(replayed, again, paths)
        found = unexplained(found, far, again, eager, noisy=noisy)
        if not on_any(bool(found) and not noisy):
            break
    off = None
    # Noise that is rare has not been seen in a few replays: what rounding does says how large it may be.
    if on_any(noisy and (bool(found) or not noise.is_known)):
        off = repeat(True)
        found = unexplained(found, far, again, eager, off, noisy=True)
    if not found and noisy:
        noise.learn(old, far, again, eager, off)
    return describe(found, old, replayed, eager)
