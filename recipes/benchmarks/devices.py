"""What a recipe says on a machine that lacks the GPUs it measures."""

from __future__ import annotations

import argparse

import torch


def require_cuda(parser: argparse.ArgumentParser, *, cpu: bool, count: int = 1) -> None:
    """End the program with status 2 unless ``count`` CUDA devices are there or ``--cpu`` was given."""
    found = torch.cuda.device_count()
    if not cpu and found < count:
        expected = f"{count} CUDA device{'s' if count > 1 else ''}"
        parser.error(
            f"this measures {expected}, and torch {torch.__version__} finds {found}: --cpu runs the same on the tape"
        )
