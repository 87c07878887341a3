"""What is said of a hyper-parameter that changes faster than steps can be captured."""

from __future__ import annotations

from collections.abc import Container, Sequence

from graphplan.errors import OptimizerError

_CYCLED = "A schedule cycles it beside the lr (OneCycleLR, CyclicLR): cycle_momentum=False avoids that. "


def churn_error(changed: Sequence[str], times: int, settings: Container[str]) -> OptimizerError:
    """The refusal of hyper-parameters with ``times`` new values in a row, each described as ``path: old then new``.
    ``settings`` are the names of those that optimizers are made with: others are the user's.
    """
    what = f"{'; '.join(changed[:3])}: the {times}rd new value before a step could be captured"
    names = [change.partition(": ")[0].rpartition(".")[2] for change in changed]
    if all(name not in settings for name in names):
        return OptimizerError(
            f"{what}. The optimizer has no setting of that name, but its groups are compared before each replay, since "
            "steps may read them. Expected a value that stays; count elsewhere: in a tensor on the device, or outside "
            "the step in a variable that the step does not read",
            component="optimizer",
        )
    cycled = any(name in ("betas", "momentum") for name in names)
    return OptimizerError(
        f"{what}, and the kernel takes it as a Python number, so that each value needs a capture of its own. Expected "
        "a constant, or an lr that the optimizer reads from the device (AdamW, Adam, SGD, Adagrad with fused=True; on "
        f"CUDA any with capturable=True). {_CYCLED if cycled else ''}Use one of those, change the value once per "
        "epoch, or leave optimizer.step() out of the step (in a Trainer that is done for you)",
        component="optimizer",
    )
