"""Reasons not to capture a run's steps, or not to replace Lightning's loop."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, strategies
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.progress import _BatchProgress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from graphplan.callback.lightning_code import LOOP_METHODS, is_known

START, END = "on_train_batch_start", "on_train_batch_end"
_LIGHTNINGS = ("lightning", "pytorch_lightning")
_IGNORES_BATCH = (
    "ModelCheckpoint", "TQDMProgressBar", "RichProgressBar", "LearningRateMonitor", "Timer", "DeviceStatsMonitor",
    "EarlyStopping", "OnExceptionCheckpoint",
)  # fmt: skip
"""Lightning's callbacks whose batch hooks do not read the batch."""
_PARALLEL: Any = getattr(strategies, "ModelParallelStrategy", ())  # Exists since Lightning 2.4.
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STOCK_HOOKS = frozenset((START, *_TRANSFERS))
"""Hooks of the module that Lightning's own loop calls for each batch, but the loop seam never calls."""


def has_hook(thing: Any, name: str, base: type) -> bool:
    """Return True if ``thing`` overrides the hook of ``base`` by a function, an object or a mock."""
    return getattr(getattr(thing, name), "__func__", None) is not getattr(base, name)


def capture_obstacle(trainer: Any) -> str | None:
    """Return why no step of this run, training or evaluation, can be captured, or None if steps can be."""
    if not isinstance(trainer, Trainer):
        return (
            f"the Trainer is {type(trainer).__module__}'s, but this callback class works with "
            f"{Trainer.__module__.partition('.trainer')[0]}'s: a subclass of GraphPlanCallback belongs to the package "
            "that it was imported with. Use GraphPlanCallback itself, or a Trainer of that package"
        )
    strategy: Any = trainer.strategy
    name = type(strategy).__name__
    if isinstance(strategy, SingleDeviceStrategy):
        return None
    if isinstance(strategy, _PARALLEL):
        if strategy.device_mesh["tensor_parallel"].size() == 1:
            return None
        return f"the {name} uses tensor parallelism, which graphplan does not capture: use tensor_parallel_size=1"
    if not isinstance(strategy, DDPStrategy) or isinstance(strategy, DeepSpeedStrategy):
        return (
            f"the strategy is {name}; only single-device strategies, DDPStrategy and ModelParallelStrategy are "
            "captured: use one of those"
        )
    if strategy._ddp_comm_hook is not None or strategy._model_averaging_period is not None:
        return f"the {name} has a communication hook, and a replay would leave out its Python code; remove the hook"
    if strategy._ddp_kwargs.get("find_unused_parameters"):
        return (
            f"the {name} has find_unused_parameters=True, which inspects each step's autograd graph on the host; use "
            "all parameters in each step, or static_graph=True"
        )
    return None


def needed_warmup(strategy: Any) -> int:
    """Return the eager steps before a trace. DDP forms buckets in the second; on CUDA it times some of the first 10."""
    if not isinstance(strategy, DDPStrategy):
        return 1
    return 11 if strategy.root_device.type == "cuda" else 3


def training_obstacle(trainer: Any, module: LightningModule, *, captures_optimizer: bool) -> str | None:
    """Return why no training step of this run can be captured, or None if they can."""
    reason = capture_obstacle(trainer)
    if reason is not None:
        return reason
    if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
        return (
            "training_step takes dataloader_iter and fetches its batches itself, so graphplan cannot copy a batch "
            "into a replay's inputs; take the batch as an argument: def training_step(self, batch, batch_idx)"
        )
    if trainer._detect_anomaly:
        return "detect_anomaly=True reads every gradient on the host; turn it off"
    if not module.automatic_optimization and not captures_optimizer:
        return (
            "components names only forward and backward, but with manual optimization the module's own code decides "
            "their order: use components='auto', or graph_step in training_step"
        )
    if module.automatic_optimization and len(trainer.optimizers) != 1:
        return (
            f"the module has {len(trainer.optimizers)} optimizers, and automatic optimization steps exactly one: "
            "return one from configure_optimizers"
        )
    return None


def keeps_stock_transfer(trainer: Any, module: LightningModule) -> str | None:
    """Return why a training step cannot take batches from host memory, or None if it can."""
    if trainer.strategy.root_device.type == "cpu":
        return "the step runs on the CPU, where the batches are"
    if any(has_hook(module, hook, LightningModule) for hook in (START, END)):
        return f"{type(module).__name__} has hooks for batches"
    for callback in trainer.callbacks:
        if any(has_hook(callback, hook, Callback) for hook in (START, END)) and may_read_batch(callback):
            return f"{type(callback).__name__} has hooks for batches"
    return None


def may_read_batch(callback: Any) -> bool:
    """Return True if a callback's hooks may read the batch."""
    kind = next((k for k in type(callback).__mro__ if START in vars(k) or END in vars(k)), None)
    known = kind is not None and kind.__module__.partition(".")[0] in _LIGHTNINGS and kind.__name__ in _IGNORES_BATCH
    return not known or START in vars(callback) or END in vars(callback)


def loop_obstacle(trainer: Any, module: LightningModule) -> str | None:
    """Return why a run needs Lightning's own loop over batches, or None if the loop seam can replace it."""
    loop: Any = trainer.fit_loop.epoch_loop
    if not is_known("loop"):
        version = sys.modules[Trainer.__module__.partition(".")[0]].__version__
        return f"graphplan does not know the loop of Lightning {version}"
    for name in LOOP_METHODS:
        if getattr(type(loop), name) is not getattr(_TrainingEpochLoop, name) or name in vars(loop):
            return f"the training loop's {name} is not Lightning's own"
    if type(loop.batch_progress) is not _BatchProgress:
        return f"progress is tracked by a {type(loop.batch_progress).__name__}"
    if type(trainer.profiler) is not PassThroughProfiler:
        return f"the {type(trainer.profiler).__name__} records the calls of Lightning's loop"
    if has_hook(module, START, LightningModule):
        return f"{type(module).__name__}.{START} may end the epoch"
    for hook in _TRANSFERS:
        source = trainer._data_connector._datahook_selector.get_instance(hook)
        if source is not module or is_overridden(hook, module):
            return f"{type(source).__name__}.{hook} is overridden"
    if type(trainer.precision_plugin).convert_input is not Precision.convert_input:
        return f"the {type(trainer.precision_plugin).__name__} converts batches"
    strategy: Any = type(trainer.strategy)
    if strategy.batch_to_device is not Strategy.batch_to_device or strategy.on_train_batch_start is not (
        Strategy.on_train_batch_start
    ):
        return f"the {strategy.__name__} has hooks for batches"
    return None
