"""Rows about optimizers, their schedules, and what may override their steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adagrad, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from tests.lightning.parts import FUSED_ADAMW, Fit, LitDigits, per_step
from tests.lightning.rows import FULL, Row, scheduled, variant
from tests.optimizers.test_gradient_scaler import prepared

ON_THE_HOST = FULL - 2
"""Replays where the optimizer turns out to stay on the host with a trace: tracing begins anew."""


class Lion(Optimizer):
    """An optimizer that is not torch's: it steps in the direction of a sign."""

    def __init__(self, parameters: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(group["beta"]).add_(parameter.grad, alpha=1 - group["beta"])
                parameter.add_(mean.sign(), alpha=-group["lr"])
        return loss


class Grouped(LitDigits):
    """Two groups of parameters, each with its lr and schedule; batch normalisation is not trained."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[0].parameters(), "lr": 1e-2}, {"params": self.net[4].parameters()}]
        optimizer = FUSED_ADAMW(groups)
        schedules = [lambda step: 0.9**step, lambda step: 0.5 ** (step // 4)]
        return [optimizer], [per_step(LambdaLR(optimizer, schedules)), {"scheduler": ExponentialLR(optimizer, 0.9)}]


def warm_up(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 * min(1.0, (self.trainer.global_step + 1) / 10)
    optimizer.step(closure=optimizer_closure)


def every_second(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    if batch_idx % 2:
        optimizer_closure()
    else:
        optimizer.step(closure=optimizer_closure)


def closure_first(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    optimizer_closure()
    self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())
    optimizer.step()


def clip_by_epoch(self: Any, optimizer: Any, **kwargs: Any) -> None:
    bound = 0.5 if self.current_epoch < 1 else 0.05
    self.clip_gradients(optimizer, gradient_clip_val=bound, gradient_clip_algorithm="norm")


def clip_by_hand(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def scaled_backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()


def scaled_by_rate(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch) * (1 + 100 * self.optimizers().param_groups[0]["lr"])


def logs_rate(self: Any, batch: Any, batch_idx: int) -> Tensor:
    self.log("lr", self.optimizers().param_groups[0]["lr"], on_step=True, on_epoch=True, prog_bar=True)
    return self.loss_of(batch)


def just_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    optimizer.step(closure=optimizer_closure)


def step_twice(self: Any, scheduler: Any, metric: Any) -> None:
    scheduler.step()
    scheduler.step()


def _plateau(optimizer: Optimizer) -> dict[str, Any]:
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
    return {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch"}


def _halve(step: int) -> float:
    return 0.5 ** (step // 4)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "per epoch": lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
    "per step": lambda optimizer: per_step(LambdaLR(optimizer, _halve)),
    "every third step": lambda optimizer: {**per_step(LambdaLR(optimizer, _halve)), "frequency": 3},
    "plateau": _plateau,
    "one cycle without momentum": lambda opt: per_step(OneCycleLR(opt, 0.01, total_steps=40, cycle_momentum=False)),
    "every other epoch": lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.5), "frequency": 2},
    "cyclic": lambda optimizer: per_step(CyclicLR(optimizer, 1e-4, 1e-2, step_size_up=3, cycle_momentum=False)),
    "chained": lambda optimizer: per_step(
        ChainedScheduler([ExponentialLR(optimizer, 0.99), LinearLR(optimizer, 0.5, total_iters=6)])
    ),
}


def rates(fit: Fit) -> set[float]:
    """The learning rates that an observer saw, which are floats."""
    found = {lr for batch in fit.observer.batches for lr in batch["lr"]}
    assert all(type(lr) is float for lr in found)
    return found


def optimized(make: Callable[..., Optimizer], *, twin: Callable[..., Optimizer] | None = None, **row: Any) -> Row:
    """A row with another optimizer; ``twin`` is that of the side without the callback."""
    plain = None if twin is None else partial(LitDigits, twin)
    return Row(partial(LitDigits, make), twin=plain, leaves_out=() if twin is None else ("fused", "foreach"), **row)


def on_the_host(make: Callable[..., Optimizer], name: str, **row: Any) -> Row:
    """A row whose optimizer, which the report names, steps on the host after each replay."""
    return Row(
        partial(LitDigits, make),
        shows=lambda fit: name in fit.callback.report() and "optimizer runs eagerly" in fit.callback.report(),
        **{"replayed": ON_THE_HOST, **row},
    )


_CYCLED = partial(LitDigits, schedule=lambda optimizer: per_step(OneCycleLR(optimizer, 0.01, total_steps=40)))
_WARM = partial(variant(optimizer_step=warm_up), schedule=None)

OPTIMIZERS: dict[str, Row] = {
    "SGD": optimized(partial(SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True)),
    "a stock AdamW": optimized(partial(AdamW, lr=3e-3), twin=prepared(partial(AdamW, lr=3e-3))),
    "a stock SGD": optimized(partial(SGD, lr=0.1), twin=prepared(partial(SGD, lr=0.1))),
    "a stock Adagrad": optimized(partial(Adagrad, lr=0.01), twin=prepared(partial(Adagrad, lr=0.01))),
    "AdamW that stays as it is": on_the_host(
        partial(AdamW, lr=3e-3), "AdamW", options={"prepare_optimizers": False}
    ),
    "RMSprop": on_the_host(partial(RMSprop, lr=1e-3, momentum=0.5), "RMSprop"),
    "RMSprop with clipping": on_the_host(partial(RMSprop, lr=1e-3), "RMSprop", trainer={"gradient_clip_val": 0.5}),
    "NAdam": on_the_host(partial(NAdam, lr=3e-3), "NAdam"),
    "a third-party optimizer": on_the_host(Lion, "Lion"),
    # Each evaluation of its closure is a replay.
    "LBFGS": on_the_host(partial(LBFGS, lr=0.1, max_iter=2), "LBFGS", replayed=32),
    "two groups with their own schedules": Row(Grouped, replayed=12),
    "one cycle with betas": Row(
        _CYCLED, replayed=ON_THE_HOST, shows=lambda fit: "betas" in fit.callback.report()
    ),
    "one cycle with momentum": Row(
        partial(_CYCLED, partial(SGD, lr=0.1, momentum=0.9, fused=True)), replayed=ON_THE_HOST,
        shows=lambda fit: "momentum" in fit.callback.report(),
    ),
    "lr warm-up in optimizer_step": Row(_WARM, shows=lambda fit: len(rates(fit)) == 10),
    "optimizer_step that only accumulates every other batch": Row(variant(optimizer_step=every_second)),
    "optimizer_step that calls the closure itself and logs": Row(variant(optimizer_step=closure_first)),
    "clipping that follows the epoch": Row(variant(configure_gradient_clipping=clip_by_epoch), replayed=10),
    "clipping by hand": Row(variant(configure_gradient_clipping=clip_by_hand)),
    "optimizer_step, and a loss that reads the lr": Row(
        partial(variant(training_step=scaled_by_rate, optimizer_step=just_step), schedule=SCHEDULES["per epoch"]),
        replayed=6, options={"verify": "off"},
    ),
    # The step itself is refused for it, and the optimizer goes to the host.
    "a loss that reads the lr": Row(
        partial(variant(training_step=scaled_by_rate), schedule=SCHEDULES["per epoch"]), replayed=14,
        shows=lambda fit: "optimizer runs eagerly" in fit.callback.report(),
    ),
    "a step that logs the lr": Row(variant(training_step=logs_rate), shows=lambda fit: len(rates(fit)) == 18),
    "backward twice": Row(variant(backward=scaled_backward)),
    "zero_grad": Row(variant(optimizer_zero_grad=lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad())),
    "lr_scheduler_step": Row(
        partial(variant(lr_scheduler_step=step_twice), schedule=SCHEDULES["per step"]),
        shows=lambda fit: len(rates(fit)) > 5,
    ),
    "no schedule": Row(scheduled(None), shows=lambda fit: len(rates(fit)) == 1),
}  # fmt: skip
for _name, _schedule in SCHEDULES.items():
    OPTIMIZERS[f"schedule {_name}"] = Row(scheduled(_schedule), shows=lambda fit: len(rates(fit)) > 1)
