"""Where the copies of a check may lie."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphplan.environment import devices

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


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``; None where that is unknown."""
    if devices.is_accelerator(device):
        return devices.free_bytes(device)
    try:
        with open("/proc/meminfo", encoding="ascii") as facts:
            lines = dict(line.split(":", 1) for line in facts)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
