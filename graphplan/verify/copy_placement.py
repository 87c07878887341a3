"""Where the copies of a check may lie."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphplan.environment.devices import free_bytes

_COPIES = 3
"""Full copies alive at once: from before the step, after the replay, and eager's while that is repeated."""
_MARGIN = 1.2
"""Room is left for fragments and temporaries."""


def find_room(
    nbytes: int, device: torch.device, may_take: Callable[[int], bool] = lambda nbytes: True, copies: int = _COPIES
) -> tuple[torch.device | None, str]:
    """Where ``copies`` of ``nbytes`` of state each fit: ``device``, if they may take so much there, the host, or None
    with the reason.
    """
    needed = int(nbytes * copies * _MARGIN)
    host = torch.device("cpu")
    for place in dict.fromkeys((device, host)):
        free = free_bytes(place)
        if (free is None or needed <= free) and (place == host or may_take(needed)):
            return place, ""
    return None, (
        f"a check needs {needed / 2**20:.0f} MiB for copies of parameters and state, and neither {device} nor the host "
        "has that much free"
    )
