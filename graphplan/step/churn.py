"""What is said of a hyper-parameter that changes faster than steps can be captured."""

from __future__ import annotations

from collections.abc import Sequence

from graphplan.errors import OptimizerError

_CYCLED = "A schedule cycles it beside the lr (OneCycleLR, CyclicLR): cycle_momentum=False avoids that. "


def churn_error(changed: Sequence[str], times: int) -> OptimizerError:
    """The refusal of hyper-parameters with ``times`` new values in a row, each described as ``path: old then new``."""
    cycled = any(change.partition(": ")[0].endswith((".betas", ".momentum")) for change in changed)
    return OptimizerError(
        f"{'; '.join(changed[:3])}: the {times}rd new value before a step could be captured, and the kernel "
        "takes it as a Python number, so that each value needs a capture of its own. Expected a constant, or "
        "an lr that the optimizer reads from the device (AdamW, Adam, SGD, Adagrad with fused=True; on CUDA "
        f"any with capturable=True). {_CYCLED if cycled else ''}Use one of those, change the "
        "value once per epoch, or leave optimizer.step() out of the step (in a Trainer that is done for you)",
        component="optimizer",
    )
