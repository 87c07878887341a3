"""Lightning's loop over training batches, without the parts that a run does not use. The *loop seam* replaces
``advance``. It returns to Lightning's loop when a task is due that only that loop does (validation, the end of the
epoch, a stop), or when a value that decides about such tasks has changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from graphplan.callback.gates import END, START, STOCK_HOOKS, has_hook, keeps_stock_transfer
from graphplan.callback.logging.connector import LazyConnector
from graphplan.callback.patches import Patches, Recover, recovering
from graphplan.compare.comparing import Checks, contents_of
from graphplan.feed.call_arguments import hands_over
from graphplan.program.faults import lost, refusal_of

_OF_TRAINER = (
    "should_stop", "received_sigterm", "accumulate_grad_batches", "check_val_every_n_epoch", "_val_check_time_interval",
    "val_check_batch", "callbacks",
)  # fmt: skip
_OF_LOOP = (
    "_skip_next_val", "max_steps", "_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint",
    "_restart_stage", "advance",
)  # fmt: skip
"""Attributes that decide whether a task is due after a batch, except those that differ from batch to batch."""
_NONE = object()
_PLAIN = frozenset({Tensor})
_is_cpu = attrgetter("is_cpu")


@hands_over
def _stock(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Lightning's own code. ``hands_over`` marks its errors as not graphplan's."""
    return run(*args, **kwargs)


@hands_over
def _call_hooks(trainer: Any, module: Any, hook: str, *args: Any) -> None:
    """Call the hook of each callback that overrides it, as Lightning does."""
    inner = vars(module)
    # Avoid the module's __setattr__, which takes longer than most hooks.
    before, inner["_current_fx_name"] = inner["_current_fx_name"], hook
    for callback in trainer.callbacks:
        if has_hook(callback, hook, Callback):
            getattr(callback, hook)(trainer, module, *args)
    inner["_current_fx_name"] = before


def _nothing() -> None:
    """Run in place of calls of a profiler that does nothing."""


class Batches(Iterator[Any]):
    """A fetcher for one ``advance``. ``batch`` is fetched, but not trained on yet. ``has_ended``: the latest one is."""

    def __init__(self, fetcher: Any) -> None:
        self.fetcher = fetcher
        self.batch: Any = _NONE
        self.has_ended = False

    def __next__(self) -> tuple[Any, int, int]:
        """Return the next batch, and two numbers that Lightning's loop does not use."""
        if self.batch is _NONE:
            found: tuple[Any, int, int] = next(self.fetcher)
            return found
        batch, self.batch = self.batch, _NONE
        return batch, 0, 0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the fetcher."""
        return getattr(self.fetcher, name)


class LoopSeam:
    """Replaces ``advance`` of one fit's loop over batches. The first batch runs through Lightning's own code, which may
    warn. If ``direct``, the step moves batches to the device itself.
    """

    def __init__(
        self, trainer: Any, module: LightningModule, recover: Recover, patches: Patches, *, direct: bool
    ) -> None:
        self._trainer, self._module, self.recover = trainer, module, recover
        self._direct = direct
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._strategy: Any = trainer.strategy
        self._connector: Any = trainer._logger_connector
        self._device = self._strategy.root_device
        self._is_cpu = self._device.type == "cpu"
        self._is_one_of_many = trainer.world_size > 1
        self._takes_index: bool | None = None
        self._unchanged: Any = None
        patches.method(self._loop, "advance", lambda fetcher: self._take_batches(Batches(fetcher)))
        for name in ("_on_before_fetch", "_on_after_fetch"):
            patches.method(self._loop, name, _nothing)

    def _advance_stock(self, batches: Any) -> None:
        """Run Lightning's own ``advance``, unless the seam has already trained on the batch."""
        if not batches.has_ended:
            _stock(_TrainingEpochLoop.advance, self._loop, batches)

    @recovering(_advance_stock)
    def _take_batches(self, batches: Any) -> None:
        """Train on this batch and on the next ones, until a task is due after a batch."""
        loop, progress = self._loop, self._loop.batch_progress
        if loop.restarting or self._takes_index is None or self._has_stock_hooks():
            self._advance_stock(batches)
            batches.has_ended = True
            self._takes_index = "batch_idx" in loop._build_kwargs(OrderedDict(), None, 0)
            return
        loop.val_loop.restarting = False
        if self._unchanged is None or not self._unchanged.hold():
            self._note()
        fetcher = batches.fetcher
        while True:
            if self._is_one_of_many:
                _stock(loop._broadcast_sigterm_tensor)
            batches.batch = batch = _stock(next, fetcher)[0]
            if batch is None:
                # Lightning's own code warns about this.
                self._advance_stock(batches)
                return
            progress.is_last_batch = fetcher.done
            batch, batches.batch = self._ready(batch), _NONE
            try:
                self._train(batch, progress)
            except Exception as error:
                if refusal_of(error) is None:
                    raise
                raise lost(error, f"the step of {type(self._module).__name__}") from error
            batches.has_ended = True
            if self._is_due(progress):
                return
            if not self._may_accumulate or not loop._should_accumulate():
                loop._batches_that_stepped += 1
            batches.has_ended = False

    def _note(self) -> None:
        """Note the values that decide whether a task is due. While they do not change, a few comparisons are enough."""
        loop, trainer = self._loop, self._trainer
        self._unchanged = None
        self._most, self._max_steps = trainer.fit_loop.max_batches, loop.max_steps
        self._may_accumulate = trainer.accumulate_grad_batches != 1
        self._validates_every = self._between_validations()
        self._hands_out = not self._direct or keeps_stock_transfer(trainer, self._module) is not None
        if trainer.should_stop or trainer.received_sigterm or loop._skip_next_val:
            return
        deciding = ((trainer, _OF_TRAINER), (loop, _OF_LOOP), (trainer.fit_loop, ("max_batches",)))
        places = [(thing, name) for thing, names in deciding for name in names if hasattr(thing, name)]
        things, names = [thing for thing, _ in places], [name for _, name in places]
        values = list(map(getattr, things, names))
        self._unchanged = Checks([("same_attributes", things, names, values), *contents_of([trainer.callbacks])])

    def _has_stock_hooks(self) -> bool:
        """Return True if code has set hooks on the module instance that only Lightning's own loop calls."""
        return not STOCK_HOOKS.isdisjoint(vars(self._module))

    def _between_validations(self) -> int:
        """Return after how many batches of an epoch validation may be due, or 0 for never."""
        trainer = self._trainer
        if not is_overridden("validation_step", self._module):
            return 0
        if trainer.check_val_every_n_epoch is None or getattr(trainer, "_val_check_time_interval", None) is not None:
            return 1
        return 0 if trainer.val_check_batch == float("inf") else trainer.val_check_batch

    def _is_due(self, progress: Any) -> bool:
        """Return True if Lightning's loop has a task or a decision after this batch."""
        loop, ready = self._loop, progress.current.ready
        if (
            self._unchanged is None
            or not self._unchanged.hold()
            or progress.is_last_batch
            or ready == self._most
            or self._has_stock_hooks()
            or (self._validates_every and ready % self._validates_every == 0)
            or (self._max_steps != -1 and loop.global_step >= self._max_steps)
        ):
            return True
        for config in self._strategy.lr_scheduler_configs:
            if config.reduce_on_plateau and config.interval == "step":
                return True
        return False

    def _ready(self, batch: Any) -> Any:
        """Return the batch, on the device unless the step moves it there and no hook needs it earlier."""
        if self._is_cpu or not self._hands_out:
            kind = type(batch)
            tensors = batch if kind is list or kind is tuple else (batch,)
            if _PLAIN.issuperset(map(type, tensors)) and all(map(_is_cpu, tensors)):
                # Lightning makes a new list, which hooks may change. Do the same.
                return list(batch) if kind is list else batch
        return move_data_to_device(batch, self._device)

    def _train(self, batch: Any, progress: Any) -> None:
        """Train on one batch, and call the hooks before and after it."""
        loop, trainer, module, connector = self._loop, self._trainer, self._module, self._connector
        total, current = progress.total, progress.current
        total.ready += 1
        current.ready += 1
        batch_idx = current.ready - 1
        # The work of ``on_batch_start`` of the logger connector.
        results = loop._results
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        _call_hooks(trainer, module, START, batch, batch_idx)
        total.started += 1
        current.started += 1
        kwargs = OrderedDict(batch=batch)
        if self._takes_index:
            kwargs["batch_idx"] = batch_idx
        if module.automatic_optimization:
            outputs = _stock(loop.automatic_optimization.run, self._strategy.optimizers[0], batch_idx, kwargs)
        else:
            outputs = _stock(loop.manual_optimization.run, kwargs)
        total.processed += 1
        current.processed += 1
        if self._strategy.lr_scheduler_configs:
            _stock(loop.update_lr_schedulers, "step", update_plateau_schedulers=False)
            if progress.is_last_batch or current.ready == trainer.fit_loop.max_batches:
                _stock(loop.update_lr_schedulers, "epoch", update_plateau_schedulers=False)
        _call_hooks(trainer, module, END, outputs, batch, batch_idx)
        if has_hook(module, END, LightningModule):
            _stock(call._call_lightning_module_hook, trainer, END, outputs, batch, batch_idx)
        if results:
            self._end(results)
        else:
            results.batch = None
        total.completed += 1
        current.completed += 1
        every = trainer.log_every_n_steps
        due = every and (loop._batches_that_stepped + 1) % every == 0
        if (due or trainer.should_stop or trainer.fast_dev_run) and trainer.loggers:
            _stock(connector.update_train_step_metrics)
        elif isinstance(connector, LazyConnector) and connector.rows.pending:
            connector.look()

    @recovering(lambda self, results: _stock(self._connector.on_batch_end))
    def _end(self, results: Any) -> None:
        """Run ``on_batch_end`` of the logger connector, or postpone it if the connector is lazy."""
        if isinstance(self._connector, LazyConnector):
            self._connector.postpone(results)
            results.batch = results.batch_size = None
        else:
            self._connector.on_batch_end()
