"""What a report of a fault needs: versions, devices, settings."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from graphplan.compare import building
from graphplan.compare.comparing import Tensors
from graphplan.environment.devices import module_of

PACKAGES = (
    "graphplan", "torch", "lightning", "pytorch-lightning", "transformers", "hydra-core", "omegaconf", "torchmetrics",
    "numpy", "triton",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Facts by name, of packages those that are installed."""
    facts: dict[str, Any] = {"python": sys.version.split()[0], "platform": platform.platform()}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    facts["CUDA of torch"] = torch.version.cuda or "none"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    facts["devices"] = "CPU" if accelerator is None else _devices(accelerator)
    facts["guards"] = building.state() if Tensors is None else "in C++"
    return facts


def _devices(accelerator: torch.device) -> str:
    module = module_of(accelerator)
    return ", ".join(module.get_device_name(index) for index in range(module.device_count()))
