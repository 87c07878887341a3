"""Streams, memory and generators of accelerators, by torch's device-independent API. Only backends name CUDA."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Return True if ``device`` runs work asynchronously to the host."""
    return device.type not in ("cpu", "meta")


def module_of(device: torch.device) -> Any:
    """Return torch's module for the type of ``device``: ``torch.cuda``, ``torch.xpu``, and so on."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on ``device``; return at once on the CPU. Raises RuntimeError if the work has failed."""
    if is_accelerator(device):
        module_of(device).synchronize(device)


def current_stream(device: torch.device) -> Any:
    """Return this thread's current stream on ``device``, an accelerator."""
    return module_of(device).current_stream(device)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on ``device``, including torch's cache; None if unknown."""
    if is_accelerator(device):
        module = module_of(device)
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device) - module.memory_allocated(device))
    try:
        with open("/proc/meminfo", encoding="ascii") as facts:
            lines = dict(line.split(":", 1) for line in facts)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None


def default_generators() -> list[torch.Generator]:
    """Return the default generators of the CPU and of the accelerators in use."""
    return [torch.default_generator, *accelerator_generators()]


def set_generator(generator: torch.Generator, state: Tensor) -> None:
    """Restore a ``state`` of ``generator`` by a second handle: with the first, cuDNN's RNNs would draw a new seed."""
    handle: Any = generator
    if is_accelerator(generator.device) and hasattr(generator, "graphsafe_get_state"):
        with suppress(RuntimeError):
            handle = handle.graphsafe_get_state()
    handle.set_state(state)


def accelerator_generators() -> list[torch.Generator]:
    """Return the accelerators' default generators; none before first use, since the query would start the driver."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not module_of(accelerator).is_initialized():
        return []
    return list(module_of(accelerator).default_generators)
