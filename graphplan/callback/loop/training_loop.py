"""Lightning's loop over training batches, without what a run does not use.

Around each step Lightning opens profiler contexts, looks up and calls hooks that nobody has overridden, asks the data
module about transfers and inspects ``training_step``'s signature: more time than a small replay takes. The *loop seam*
stands in for ``advance`` and does the rest in the same order, batch after batch for as long as nothing is due that only
Lightning's loop does: validation, the end of the epoch, a stop. It is used where it is known to do the same: see
:mod:`graphplan.callback.loop.requirements`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from graphplan.callback.instance_patch import InstancePatch, PatchedMethods, Recover
from graphplan.callback.logging.bar_metrics import LazyConnector
from graphplan.callback.logging.epoch_sums import Sums
from graphplan.callback.logging.logger_rows import LateRows
from graphplan.callback.loop.batch_hooks import BatchHooks
from graphplan.callback.loop.fetching import Again, reader
from graphplan.callback.loop.requirements import END, START, STOCK_HOOKS, unchanged
from graphplan.feed.call_arguments import hands_over
from graphplan.program.faults import lost, refusal_of

_SCHEDULE = "lr_scheduler_step"
_NONE = object()
_PLAIN = frozenset({Tensor})
_is_cpu = attrgetter("is_cpu")


class LoopSeam(PatchedMethods):
    """Stands in for ``advance`` of one fit's loop over batches. The first batch goes through Lightning's own code,
    which warns of what there is to warn of.

    Args:
        sums: of the means that the step logs.
        direct: the step takes batches in host memory and moves them itself.
    """

    def __init__(
        self, trainer: Any, module: LightningModule, sums: Sums, recover: Recover, *, direct: bool = False
    ) -> None:
        self._trainer, self._module, self._recover = trainer, module, recover
        self._direct, self._sums = direct, sums
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._strategy: Any = trainer.strategy
        self._connector: Any = trainer._logger_connector
        self._device = self._strategy.root_device
        self._is_cpu = self._device.type == "cpu"
        self._is_one_of_many = trainer.world_size > 1
        self._validates = is_overridden("validation_step", module)
        methods: dict[str, Any] = {"advance": self._advance, "on_advance_end": self._advance_end}
        methods |= dict.fromkeys(("_on_before_fetch", "_on_after_fetch"), _nothing)
        super().__init__(*(InstancePatch(self._loop, name, method) for name, method in methods.items()))
        self._rows = LateRows(trainer)
        self._hooks = BatchHooks(trainer, module)
        self._own_schedule = is_overridden(_SCHEDULE, module)
        self._unchanged: Any = None
        self._takes_index: bool | None = None
        self._step: Any = None
        self._has_ended = False
        self._batch: Any = _NONE
        self._has_begun = self._has_counted = False

    def install(self) -> None:
        """Put it in."""
        super().install()
        if isinstance(self._connector, LazyConnector):
            self._rows.install()
            self._connector.rows = self._rows

    def remove(self) -> None:
        """Take it off; rows that are on their way are written."""
        super().remove()
        if vars(self._connector).pop("rows", None) is not None:
            self._rows.remove()

    def _advance(self, fetcher: Any) -> None:
        """In place of ``advance``; Lightning's own from the batch on before which this fails."""
        self._batch, self._has_begun = _NONE, False
        try:
            self._take_batches(fetcher)
        except Exception as error:
            if self._has_begun and refusal_of(error) is not None:
                raise lost(error, f"the step of {type(self._module).__name__}") from error
            self._recover(error)
            again: Any = fetcher if self._batch is _NONE else Again(fetcher, self._batch)
            _TrainingEpochLoop.advance(self._loop, again)

    def _take_batches(self, fetcher: Any) -> None:
        """This batch and those after it, up to one after which something is due."""
        loop, own = self._loop, vars(self._module)
        self._has_ended = False
        if loop.restarting or self._takes_index is None or self._differs(own):
            _stock(_TrainingEpochLoop.advance, loop, fetcher)
            self._takes_index = "batch_idx" in loop._build_kwargs(OrderedDict(), None, 0)
            self._step = own.get("training_step")
            return
        loop.val_loop.restarting = False
        read, progress = reader(fetcher), loop.batch_progress
        while True:
            if self._is_one_of_many:
                _stock(loop._broadcast_sigterm_tensor)
            self._batch = batch = _stock(read)
            if batch is None:
                # Nothing to train on: Lightning has words for that.
                again: Any = Again(fetcher, batch)
                _stock(_TrainingEpochLoop.advance, loop, again)
                return
            progress.is_last_batch = fetcher.done
            self._train(batch, progress)
            self._batch, self._has_begun, self._has_counted = _NONE, False, False
            try:
                goes_on = self._goes_on(progress)
            except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
                self._recover(error)
                if self._has_counted:
                    # Lightning's own on_advance_end would count it again: it gets the next batch.
                    _stock(_TrainingEpochLoop.advance, loop, fetcher)
                return
            if not goes_on:
                return

    def _differs(self, own: dict[str, Any]) -> bool:
        """Whether the module got a step or a hook of its own since the last batch that Lightning's own code took."""
        return own.get("training_step") is not self._step or not own.keys().isdisjoint(STOCK_HOOKS)

    def _goes_on(self, progress: Any) -> bool:
        """What is left of Lightning's own loop after this batch; whether the next one is this seam's as well."""
        loop, ready = self._loop, progress.current.ready
        if self._unchanged is None or not self._unchanged.hold():
            goes_on = self._ask()
            if goes_on:
                self._note()
            return goes_on
        if (
            progress.is_last_batch
            or ready == self._most
            or (self._validates_every and ready % self._validates_every == 0)
            or (self._max_steps != -1 and loop.global_step >= self._max_steps)
            or (self._strategy.lr_scheduler_configs and self._schedules_wait())
        ):
            return self._ask()
        if not self._may_accumulate or not loop._should_accumulate():
            loop._batches_that_stepped += 1
        return True

    def _ask(self) -> bool:
        """:meth:`_goes_on`, asked of everybody who may have something to say."""
        if self._is_due():
            return False
        self._count_step()
        self._loop.on_iteration_done()
        if self._trainer.should_stop or self._differs(vars(self._module)):
            self._has_ended = True
            return False
        return True

    def _note(self) -> None:
        """Note what was found: while it stays so, there is nothing to ask but what differs from batch to batch."""
        loop, trainer, own = self._loop, self._trainer, vars(self._module)
        self._most, self._max_steps = trainer.fit_loop.max_batches, loop.max_steps
        self._may_accumulate = trainer.accumulate_grad_batches != 1
        self._validates_every = self._between_validations() if self._validates else 0
        self._unchanged = unchanged(trainer, own)

    def _is_due(self) -> bool:
        """Whether Lightning's own loop has anything to do, or to decide, after this batch."""
        loop, trainer, progress = self._loop, self._trainer, self._loop.batch_progress
        ready = progress.current.ready
        if trainer.should_stop or trainer.received_sigterm or loop._skip_next_val:
            return True
        if progress.is_last_batch or ready == trainer.fit_loop.max_batches:
            return True
        if loop.max_steps != -1 and loop.global_step >= loop.max_steps:
            return True
        if vars(loop).get("advance") is not self._standins[0]:
            return True
        every = self._between_validations() if self._validates else 0
        return bool(every and ready % every == 0)

    def _between_validations(self) -> int:
        """After how many batches validation may be due in the middle of an epoch, where Lightning says for sure; 0 for
        never.
        """
        trainer = self._trainer
        if trainer.check_val_every_n_epoch is None or trainer._val_check_time_interval is not None:
            return 1
        return 0 if trainer.val_check_batch == float("inf") else trainer.val_check_batch

    def _advance_end(self, fetcher: Any) -> None:
        """In place of ``on_advance_end``."""
        if self._has_ended:
            return
        loop, trainer = self._loop, self._trainer
        ends = trainer.should_stop or trainer.received_sigterm or loop._skip_next_val
        if ends or (self._validates and loop._should_check_val_fx(fetcher)):
            _stock(_TrainingEpochLoop.on_advance_end, loop, fetcher)
            return
        self._count_step()

    def _count_step(self) -> None:
        """What is left of ``on_advance_end`` where nobody validates or stops."""
        loop = self._loop
        if not self._accumulates():
            if self._schedules_wait():
                _stock(loop.update_lr_schedulers, "step", update_plateau_schedulers=True)
            loop._batches_that_stepped += 1
        self._has_counted = True
        if self._trainer.should_stop:
            loop._save_loggers_on_train_batch_end()

    def _schedules_wait(self) -> bool:
        """Whether Lightning may have schedulers to step after a batch was logged."""
        if self._schedules_are_its_own():
            return True
        for config in self._strategy.lr_scheduler_configs:  # noqa: SIM110
            if config.reduce_on_plateau:
                return True
        return False

    def _schedules_are_its_own(self) -> bool:
        """Whether the module steps schedulers, or has a say in how; it may take over in the middle of a fit."""
        module = self._module
        return self._own_schedule or not module.automatic_optimization or _SCHEDULE in vars(module)

    def _step_schedulers(self) -> None:
        """Lightning's ``update_lr_schedulers("step", update_plateau_schedulers=False)`` after a step that is no part of
        an accumulation, without what looks for the module's hook.
        """
        loop = self._loop
        if self._schedules_are_its_own():
            _stock(loop.update_lr_schedulers, "step", update_plateau_schedulers=False)
            return
        ready, progress = loop.batch_progress.current.ready, loop.scheduler_progress
        for config in self._strategy.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau and ready % config.frequency == 0:
                progress.increment_ready()
                _stock(config.scheduler.step)
                progress.increment_completed()

    def _accumulates(self) -> bool:
        return self._trainer.accumulate_grad_batches != 1 and self._loop._should_accumulate()

    def _moved(self, batch: Any) -> Any:
        """The batch on the device, unless it is there, or nobody but the step looks at it and that moves it itself."""
        if self._is_cpu or (self._direct and not self._hooks.hand_out):
            kind = type(batch)
            tensors = batch if kind is list or kind is tuple else (batch,)
            if _PLAIN.issuperset(map(type, tensors)) and all(map(_is_cpu, tensors)):
                # A list of one's own, as Lightning gives: hooks may change it.
                return list(batch) if kind is list else batch
        return move_data_to_device(batch, self._device)

    def _train(self, batch: Any, progress: Any) -> None:
        """One batch, from its hooks before to its hooks after."""
        loop, trainer, hooks, connector = self._loop, self._trainer, self._hooks, self._connector
        if not hooks.hold():
            hooks.look()
        batch = self._moved(batch)
        self._has_begun = True
        total, current = progress.total, progress.current
        total.ready += 1
        current.ready += 1
        batch_idx = current.ready - 1
        # What the logger connector does when a batch starts, without asking which loop is active.
        results = loop._results
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        if hooks.starts:
            hooks.call(START, hooks.starts, batch, batch_idx)
        total.started += 1
        current.started += 1
        kwargs = OrderedDict(batch=batch)
        if self._takes_index:
            kwargs["batch_idx"] = batch_idx
        if self._module.automatic_optimization:
            outputs = _stock(loop.automatic_optimization.run, self._strategy.optimizers[0], batch_idx, kwargs)
        else:
            outputs = _stock(loop.manual_optimization.run, kwargs)
        total.processed += 1
        current.processed += 1
        if self._strategy.lr_scheduler_configs:
            if not self._accumulates():
                self._step_schedulers()
            if progress.is_last_batch or current.ready == trainer.fit_loop.max_batches:
                _stock(loop.update_lr_schedulers, "epoch", update_plateau_schedulers=False)
        self._call_ends(outputs, batch, batch_idx)
        try:
            self._end(results)
        except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
            self._recover(error)
            _stock(connector.on_batch_end)
        total.completed += 1
        current.completed += 1
        every = trainer.log_every_n_steps
        due = every and (loop._batches_that_stepped + 1) % every == 0
        if (due or trainer.should_stop or trainer.fast_dev_run) and trainer.loggers:
            _stock(connector.update_train_step_metrics)
        elif self._rows.on_their_way:
            connector.look()

    def _call_ends(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The hooks after a batch."""
        trainer, hooks = self._trainer, self._hooks
        try:
            if not hooks.hold():
                hooks.look()
        except Exception as error:  # noqa: BLE001 - those that are not graphplan's are raised
            self._recover(error)
            _stock(call._call_callback_hooks, trainer, END, outputs, batch, batch_idx)
            _stock(call._call_lightning_module_hook, trainer, END, outputs, batch, batch_idx)
            return
        if hooks.ends:
            hooks.call(END, hooks.ends, outputs, batch, batch_idx)
        if hooks.module_ends:
            _stock(call._call_lightning_module_hook, trainer, END, outputs, batch, batch_idx)

    def _end(self, results: Any) -> None:
        """What the logger connector does when a batch ends; a lazy one when somebody asks it."""
        if not results:
            results.batch = None
        elif isinstance(self._connector, LazyConnector):
            self._connector.postpone(results, self._sums.whole(results))
            results.batch = results.batch_size = None
        else:
            self._connector.on_batch_end()


@hands_over
def _stock(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Lightning's own code: what it raises is none of graphplan's."""
    return run(*args, **kwargs)


def _nothing() -> None:
    """In place of what tells a profiler that passes everything through."""
