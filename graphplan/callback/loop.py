"""Lightning's loop over training batches, without what a run does not use.

Around each step Lightning opens profiler contexts, looks up and calls hooks that nobody has overridden, asks the data
module about transfers and inspects ``training_step``'s signature: more time than a small replay takes. The *loop seam*
stands in for ``advance`` and does the rest in the same order. It is used where it is known to do the same: every reason
against it has a name, which the report gives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from types import CodeType
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from graphplan.callback.gates import has_hook
from graphplan.callback.standins import StandIn

_START, _END = "on_train_batch_start", "on_train_batch_end"
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_NAMES = {
    "advance": """
        restarting _should_check_val_fx val_loop restarted_mid_evaluation restarted_on_last _skip_next_val
        increment_progress_to_evaluation_end torch distributed is_available is_initialized trainer world_size
        _broadcast_sigterm_tensor isinstance _DataLoaderIterDataFetcher next _batch _batch_idx batch_idx batch_progress
        done is_last_batch precision_plugin convert_input lightning_module _on_before_batch_transfer call
        _call_strategy_hook increment_ready _logger_connector on_batch_start _warning_cache warn _call_callback_hooks
        _call_lightning_module_hook increment_by increment_started _build_kwargs OrderedDict profiler profile
        automatic_optimization run optimizers manual_optimization increment_processed update_lr_schedulers
        _num_ready_batches_reached StopIteration on_batch_end increment_completed update_train_step_metrics
    """,
    "on_advance_end": """
        _should_check_val_fx _skip_next_val trainer validating _logger_connector _first_loop_iter _should_accumulate
        call _call_lightning_module_hook lightning_module zero_grad val_loop run training update_lr_schedulers
        _batches_that_stepped _save_loggers_on_train_batch_end _is_training_done received_sigterm SIGTERMException
    """,
}
"""All that Lightning's own methods name. A release that names more does more."""


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def closed_loop(trainer: Any, module: LightningModule) -> str | None:
    """Why a run needs Lightning's own loop over batches; None if nothing speaks against the loop seam."""
    loop: Any = trainer.fit_loop.epoch_loop
    for method, names in _NAMES.items():
        stock = getattr(_TrainingEpochLoop, method)
        if getattr(type(loop), method) is not stock or method in vars(loop):
            return f"the training loop's {method} is not Lightning's own"
        unknown = sorted(_names_in(stock.__code__) - set(names.split()))
        if unknown:
            return f"this Lightning's training loop does more than is known here: {', '.join(unknown)}"
    if type(trainer.profiler) is not PassThroughProfiler:
        return f"the {type(trainer.profiler).__name__} has rows of Lightning's loop"
    if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
        return "training_step takes the iterator of batches"
    if is_overridden(_START, module) or _START in vars(module):
        return f"{type(module).__name__}.{_START} may end the epoch"
    for hook in _TRANSFERS:
        source = trainer._data_connector._datahook_selector.get_instance(hook)
        if source is not module or is_overridden(hook, module):
            return f"{type(source).__name__}.{hook} is overridden"
    if type(trainer.precision_plugin).convert_input is not Precision.convert_input:
        return f"the {type(trainer.precision_plugin).__name__} converts batches"
    kind: Any = type(trainer.strategy)
    if kind.batch_to_device is not Strategy.batch_to_device or kind.on_train_batch_start is not (
        Strategy.on_train_batch_start
    ):
        return f"the {kind.__name__} has hooks for batches"
    return None


class _Again(Iterator[Any]):
    """A fetcher whose next item is one that was taken from it already."""

    def __init__(self, fetcher: Any, item: Any) -> None:
        self._fetcher, self._item = fetcher, item

    def __next__(self) -> Any:
        return self._item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)


class LoopSeam:
    """Stands in for ``advance`` of one fit's loop over batches. ``install`` and ``remove`` are inverse."""

    def __init__(self, trainer: Any, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._connector: Any = trainer._logger_connector
        self._device = trainer.strategy.root_device
        self._is_cpu = self._device.type == "cpu"
        self._validates = is_overridden("validation_step", module)
        self._standins = [StandIn(self._loop, "advance", self._advance)]
        self._standins.append(StandIn(self._loop, "on_advance_end", self._advance_end))
        self._standins += [StandIn(self._loop, name, _nothing) for name in ("_on_before_fetch", "_on_after_fetch")]
        self._callbacks: list[Any] = []
        self._hooked: dict[str, list[Any]] = {}
        self._module_ends = False
        self._unhooked: list[tuple[dict[str, Any], str]] = []
        self._arguments: tuple[str, ...] | None = None
        self._step: Any = None

    def install(self) -> None:
        """Put it in. The first batch goes through Lightning's own code, which warns of what there is to warn of."""
        for standin in self._standins:
            standin.put()

    def remove(self) -> None:
        """Take it off."""
        for standin in self._standins:
            standin.take_off()

    def _advance(self, fetcher: Any) -> None:
        """In place of ``advance``."""
        loop, trainer = self._loop, self._trainer
        own_step = vars(self._module).get("training_step")
        if loop.restarting or self._arguments is None or own_step is not self._step:
            _TrainingEpochLoop.advance(loop, fetcher)
            self._arguments, self._step = tuple(loop._build_kwargs(OrderedDict(), None, 0)), own_step
            return
        if loop.val_loop.restarting:
            loop.val_loop.restarting = False
        if trainer.world_size > 1:
            loop._broadcast_sigterm_tensor()
        item = next(fetcher)
        if item[0] is None:
            # Nothing to train on: Lightning has words for that.
            again: Any = _Again(fetcher, item)
            _TrainingEpochLoop.advance(loop, again)
            return
        loop.batch_progress.is_last_batch = fetcher.done
        self._train(self._on_device(item[0]))

    def _advance_end(self, fetcher: Any) -> None:
        """In place of ``on_advance_end``: what is left where nobody validates or stops."""
        loop, trainer = self._loop, self._trainer
        ends = trainer.should_stop or trainer.received_sigterm or loop._skip_next_val
        if ends or (self._validates and loop._should_check_val_fx(fetcher)):
            _TrainingEpochLoop.on_advance_end(loop, fetcher)
            return
        if trainer.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        if not loop._should_accumulate():
            loop._batches_that_stepped += 1

    def _on_device(self, batch: Any) -> Any:
        tensors = batch if type(batch) in (list, tuple) else (batch,)
        if self._is_cpu and all(type(tensor) is Tensor and tensor.is_cpu for tensor in tensors):
            return batch
        return move_data_to_device(batch, self._device)

    def _train(self, batch: Any) -> None:
        """One batch, from its hooks before to its hooks after."""
        loop, trainer, progress = self._loop, self._trainer, self._loop.batch_progress
        progress.increment_ready()
        batch_idx = progress.current.ready - 1
        self._begin(batch)
        self._call_callbacks(_START, batch, batch_idx)
        progress.increment_started()
        values = {"batch": batch, "batch_idx": batch_idx}
        kwargs = OrderedDict((name, values[name]) for name in self._arguments or ())
        if self._module.automatic_optimization:
            outputs = loop.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
        else:
            outputs = loop.manual_optimization.run(kwargs)
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._call_callbacks(_END, outputs, batch, batch_idx)
        if self._module_ends:
            call._call_lightning_module_hook(trainer, _END, outputs, batch, batch_idx)
        if loop._results:
            self._connector.on_batch_end()
        else:
            loop._results.batch = None
        progress.increment_completed()
        if trainer.loggers:
            self._connector.update_train_step_metrics()

    def _begin(self, batch: Any) -> None:
        """What the logger connector does when a batch starts, without asking which loop is active."""
        connector, results = self._connector, self._loop._results
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None

    def _look(self) -> None:
        """Find out who has hooks for batches. Asked again when somebody comes or goes, or gets a hook of its own."""
        self._callbacks = list(self._trainer.callbacks)
        hooks = {name: [c for c in self._callbacks if has_hook(c, name, Callback)] for name in (_START, _END)}
        self._hooked = hooks
        own = vars(self._module)
        self._module_ends = has_hook(self._module, _END, LightningModule)
        holders = [
            (vars(callback), name) for name in hooks for callback in self._callbacks if callback not in hooks[name]
        ]
        self._unhooked = holders if self._module_ends else [*holders, (own, _END)]

    def _call_callbacks(self, hook: str, *args: Any) -> None:
        """Lightning's way to call callbacks, of which only some have the hook."""
        if self._trainer.callbacks != self._callbacks or any(name in inner for inner, name in self._unhooked):
            self._look()
        if not self._hooked[hook]:
            return
        inner = vars(self._module)
        # A module's own __setattr__ takes longer than most hooks.
        before, inner["_current_fx_name"] = inner["_current_fx_name"], hook
        for callback in self._hooked[hook]:
            getattr(callback, hook)(self._trainer, self._module, *args)
        inner["_current_fx_name"] = before


def _nothing() -> None:
    """In place of what tells a profiler that passes everything through."""
