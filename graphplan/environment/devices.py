"""Accelerators by what torch gives all of them: streams, events, memory, generators. Backends alone name CUDA."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Return True if work on ``device`` is queued, so that the host runs ahead of it."""
    return device.type not in ("cpu", "meta")


def module_of(device: torch.device) -> Any:
    """The module of torch for the accelerators of the type of ``device``: ``torch.cuda``, ``torch.xpu``, and so on."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what was queued; at once on the CPU. Raises RuntimeError if that has failed."""
    if is_accelerator(device):
        module_of(device).synchronize(device)


def current_stream(device: torch.device) -> Any:
    """The stream that this thread's work on ``device``, an accelerator, is queued on."""
    return module_of(device).current_stream(device)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``, with those that torch has cached; None where that is unknown."""
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
    """The CPU's default generator, and those of the accelerators in use."""
    return [torch.default_generator, *accelerator_generators()]


def set_generator(generator: torch.Generator, state: Tensor) -> None:
    """Put back a ``state`` that ``generator`` had, by a second handle: with the first, cuDNN's RNNs draw a new seed."""
    handle: Any = generator
    if is_accelerator(generator.device) and hasattr(generator, "graphsafe_get_state"):
        with suppress(RuntimeError):
            handle = handle.graphsafe_get_state()
    handle.set_state(state)


def accelerator_generators() -> list[torch.Generator]:
    """The default generators of the accelerators; none before one is used, since to ask would start its driver."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not module_of(accelerator).is_initialized():
        return []
    return list(module_of(accelerator).default_generators)
