"""Owners for the parts of the Trainer that a step may read: its numbers, its objects and the batch index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.optim import Optimizer

from graphplan.callback.gates import has_hook
from graphplan.owners.kinds import SCALARS
from graphplan.owners.slots import ConditionalOwner, OwnerByAttribute
from graphplan.owners.views import ReadOnly
from graphplan.specs.paths import free_name

_TRAINER = (
    "current_epoch", "global_step", "min_epochs", "max_epochs", "min_steps", "max_steps", "is_last_batch",
    "num_training_batches", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "log_every_n_steps",
)  # fmt: skip
_LOOP = ("batch_idx", "total_batch_idx", "global_step", "_batches_that_stepped")
_PROGRESS = ("ready", "started", "processed", "completed")
STEP_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that Lightning calls inside the step: a replay does not run them."""
_CALLBACKS = (
    "callbacks", "early_stopping_callback", "early_stopping_callbacks", "checkpoint_callback", "checkpoint_callbacks",
    "progress_bar_callback",
)  # fmt: skip
ARGUMENTS = "arguments"  # The name of the owner :class:`Arguments`.
WRAPPER, SYNC_FLAG = "strategy.model", "require_forward_param_sync"
"""The module that DDP wraps around the LightningModule, and its flag to broadcast buffers before the next forward pass.
The flag is off after a pass without gradients, or one whose gradients stayed on the rank. A step branches on the flag
and changes it."""


def optimizers_of(trainer: Trainer) -> dict[str, Any]:
    """Return the optimizers by name."""
    if len(trainer.optimizers) == 1:
        return {"optimizer": trainer.optimizers[0]}
    return {f"optimizers[{index}]": optimizer for index, optimizer in enumerate(trainer.optimizers)}


def trainer_numbers(trainer: Trainer, *, trains: bool) -> dict[str, Any]:
    """Return owners for the numbers of the Trainer, its loops and schedulers, so that a replay does not freeze them."""
    loop: Any = trainer.fit_loop
    owners: dict[str, Any] = {
        # Only evaluation has a sanity check.
        "trainer": ReadOnly(trainer, _TRAINER if trains else (*_TRAINER, "sanity_checking")),
        "trainer.fit_loop.epoch_loop": ReadOnly(loop.epoch_loop, _LOOP),
        "trainer.optim_progress": ReadOnly(loop.epoch_loop.automatic_optimization.optim_progress, ("optimizer_steps",)),
    }
    for holder, name in ((loop, "epoch_progress"), (loop.epoch_loop, "batch_progress")):
        progress = getattr(holder, name)
        for part in ("total", "current"):
            known = [number for number in _PROGRESS if hasattr(getattr(progress, part), number)]
            owners[f"trainer.{name}.{part}"] = OwnerByAttribute(ReadOnly(getattr(progress, part), known), name)
    for index, config in enumerate(trainer.lr_scheduler_configs):
        owners[f"lr_schedulers[{index}]"] = config.scheduler
    return owners


def trainer_objects(trainer: Trainer) -> dict[str, Any]:
    """Return owners that a step's code may reach through the Trainer. Each is walked only if the code uses its name."""
    anything: Any = trainer
    owners: dict[str, Any] = {
        "trainer (its attributes)": ConditionalOwner(trainer, ["trainer"], without=["callbacks"]),
        "trainer.strategy": ConditionalOwner(trainer.strategy, ["strategy"]),
        "trainer.precision_plugin": ConditionalOwner(trainer.precision_plugin, ["precision_plugin"]),
    }
    for index, logger in enumerate(trainer.loggers):
        owners[f"trainer.loggers[{index}]"] = ConditionalOwner(logger, ["logger", "loggers"])
    datamodule = getattr(anything, "datamodule", None)
    if datamodule is not None:
        owners["trainer.datamodule"] = ConditionalOwner(datamodule, ["datamodule"])
    for name in ("dataset", "sampler", "batch_sampler"):
        part = getattr(trainer.train_dataloader, name, None)
        if part is not None:
            owners[f"trainer.train_dataloader.{name}"] = ConditionalOwner(part, ["train_dataloader"])
    for callback in anything.callbacks:
        name = free_name(f"trainer.callbacks[{type(callback).__name__}]", owners)
        owners[name] = ConditionalOwner(callback, _CALLBACKS)
    return owners


def hooked_callbacks(trainer: Trainer) -> dict[str, Any]:
    """Return the callbacks with hooks inside the step, by name. Like the module, they are owners."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    hooked: dict[str, Any] = {}
    for callback in callbacks:
        if any(has_hook(callback, hook, Callback) for hook in STEP_HOOKS):
            hooked[free_name(f"callbacks[{type(callback).__name__}]", hooked)] = callback
    return hooked


class _Group:
    """A parameter group of an optimizer, with its items as attributes. A trace replaces its numbers by stand-ins."""

    __slots__ = ("_index", "_optimizer")

    def __init__(self, optimizer: Optimizer, index: int) -> None:
        self._optimizer, self._index = optimizer, index

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        # Loading a checkpoint replaces the groups, and may change their number.
        groups = self._optimizer.param_groups
        return groups[self._index] if self._index < len(groups) else {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None


class _Added:
    """The numbers of the parameter groups after the first ``count``, under the name ``param_groups`` that code uses."""

    def __init__(self, optimizer: Optimizer, count: int) -> None:
        self._optimizer, self._count = optimizer, count

    @property
    def param_groups(self) -> tuple[Any, ...]:
        added = self._optimizer.param_groups[self._count :]
        return tuple((name, group[name]) for group in added for name in _numbers_in(group))


def _numbers_in(group: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, value in group.items() if isinstance(value, (tuple, *SCALARS)))


def group_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Return owners for an optimizer that steps outside the replay. Code in the step may read its learning rate."""
    groups = optimizer.param_groups
    found = {
        f"optimizer.param_groups[{index}]": ReadOnly(_Group(optimizer, index), _numbers_in(group))
        for index, group in enumerate(groups)
    }
    return {**found, "optimizer": ReadOnly(_Added(optimizer, len(groups)), ("param_groups",))}


class Arguments:
    """Numbers that Lightning passes to hooks in a step. A trace replaces them by stand-ins."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.batch_idx = 0

    @property
    def epoch(self) -> int:
        """The Trainer's current epoch."""
        return self._trainer.current_epoch
