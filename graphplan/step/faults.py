"""``debug=True``: what fails on the device is told where it failed, and with the name of the program."""

from __future__ import annotations

import torch

from graphplan.backend import first_line
from graphplan.errors import DeviceFault
from graphplan.program import Program


def wait_for_device(program: Program, when: str) -> None:
    """Wait for the device, so that what failed there by ``when`` is told now.

    Raises:
        DeviceFault: if anything did.
    """
    plan = program.plan
    try:
        if plan.device.type == "cuda":
            torch.cuda.synchronize(plan.device)
    except RuntimeError as error:
        raise DeviceFault(
            f"the device failed in the program of {plan.name} (fed {plan.feed}) by {when}: "
            f"{first_line(error)}. Its last operators: {', '.join(plan.last_operators)}. Run with "
            "debug_eager=True, which takes every way but the recording, to see whether the step itself fails"
        ) from error
