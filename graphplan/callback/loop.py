"""Lightning's loop over training batches, without what a run does not use.

Around each step Lightning opens profiler contexts, looks up and calls hooks that nobody has overridden, asks the data
module about transfers and inspects ``training_step``'s signature: more time than a small replay takes. The *loop seam*
stands in for ``advance`` and does the rest in the same order, batch after batch for as long as nothing is due that only
Lightning's loop does: validation, the end of the epoch, a stop. It is used where it is known to do the same: see
:mod:`graphplan.callback.loop_gates`.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, islice
from operator import attrgetter, contains
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from graphplan.callback.fetching import Again, next_of
from graphplan.callback.gates import has_hook
from graphplan.callback.loop_gates import END, START, STOCK_HOOKS, hands_out_batch
from graphplan.callback.metrics import LazyConnector
from graphplan.callback.rows import LateRows
from graphplan.callback.standins import StandIn, StandsIn

_SCHEDULE = "lr_scheduler_step"
_PLAIN = frozenset({Tensor})
_is_cpu = attrgetter("is_cpu")


class LoopSeam(StandsIn):
    """Stands in for ``advance`` of one fit's loop over batches. The first batch goes through Lightning's own code,
    which warns of what there is to warn of.

    Args:
        direct: the step takes batches in host memory and moves them itself.
    """

    def __init__(self, trainer: Any, module: LightningModule, *, direct: bool = False) -> None:
        self._trainer, self._module = trainer, module
        self._direct = direct
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._connector: Any = trainer._logger_connector
        self._device = trainer.strategy.root_device
        self._is_cpu = self._device.type == "cpu"
        self._is_one_of_many = trainer.world_size > 1
        self._validates = is_overridden("validation_step", module)
        self._own_schedule = not module.automatic_optimization or is_overridden(_SCHEDULE, module)
        methods: dict[str, Any] = {"advance": self._advance, "on_advance_end": self._advance_end}
        methods |= dict.fromkeys(("_on_before_fetch", "_on_after_fetch"), _nothing)
        super().__init__(*(StandIn(self._loop, name, method) for name, method in methods.items()))
        self._rows = LateRows(trainer)
        self._callbacks: list[Any] = []
        self._hooked: dict[str, list[Any]] = {}
        self._module_ends = False
        self._unhooked: tuple[list[dict[str, Any]], list[str]] = ([], [])
        self._arguments: tuple[str, ...] | None = None
        self._step: Any = None
        self._has_ended = False

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
        """In place of ``advance``: this batch and those after it, up to one after which something is due."""
        loop, trainer, own = self._loop, self._trainer, vars(self._module)
        self._has_ended = False
        if loop.restarting or self._arguments is None or self._differs(own):
            _TrainingEpochLoop.advance(loop, fetcher)
            self._arguments = tuple(loop._build_kwargs(OrderedDict(), None, 0))
            self._step = own.get("training_step")
            return
        loop.val_loop.restarting = False
        while True:
            if self._is_one_of_many:
                loop._broadcast_sigterm_tensor()
            item = next_of(fetcher)
            if item[0] is None:
                # Nothing to train on: Lightning has words for that.
                again: Any = Again(fetcher, item)
                _TrainingEpochLoop.advance(loop, again)
                return
            loop.batch_progress.is_last_batch = fetcher.done
            self._train(self._moved(item[0]))
            if self._is_due():
                return
            self._count_step()
            loop.on_iteration_done()
            if trainer.should_stop or self._differs(own):
                self._has_ended = True
                return

    def _differs(self, own: dict[str, Any]) -> bool:
        """Whether the module got a step or a hook of its own since the last batch that Lightning's own code took."""
        return own.get("training_step") is not self._step or not own.keys().isdisjoint(STOCK_HOOKS)

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
        return self._validates and self._may_validate(ready)

    def _may_validate(self, ready: int) -> bool:
        """Whether validation may be due in the middle of an epoch: Lightning says for sure."""
        trainer = self._trainer
        if trainer.check_val_every_n_epoch is not None and trainer._val_check_time_interval is None:
            every = trainer.val_check_batch
            if every != float("inf"):
                return bool(ready % every == 0)
        return True

    def _advance_end(self, fetcher: Any) -> None:
        """In place of ``on_advance_end``."""
        if self._has_ended:
            return
        loop, trainer = self._loop, self._trainer
        ends = trainer.should_stop or trainer.received_sigterm or loop._skip_next_val
        if ends or (self._validates and loop._should_check_val_fx(fetcher)):
            _TrainingEpochLoop.on_advance_end(loop, fetcher)
            return
        self._count_step()

    def _count_step(self) -> None:
        """What is left of ``on_advance_end`` where nobody validates or stops."""
        loop = self._loop
        accumulates = self._accumulates()
        if not accumulates and self._trainer.strategy.lr_scheduler_configs:
            self._step_schedulers(plateau=True)
        if not accumulates:
            loop._batches_that_stepped += 1
        if self._trainer.should_stop:
            loop._save_loggers_on_train_batch_end()

    def _step_schedulers(self, *, plateau: bool) -> None:
        """Lightning's ``update_lr_schedulers("step", ...)`` after a step, without what looks for the module's hook."""
        loop, configs = self._loop, self._trainer.strategy.lr_scheduler_configs
        own = self._own_schedule or _SCHEDULE in vars(self._module)
        if own or (plateau and any(config.reduce_on_plateau for config in configs)):
            loop.update_lr_schedulers("step", update_plateau_schedulers=plateau)
            return
        for config in configs:
            due = config.interval == "step" and loop.batch_progress.current.ready % config.frequency == 0
            if due and not plateau and not config.reduce_on_plateau:
                loop.scheduler_progress.increment_ready()
                config.scheduler.step()
                loop.scheduler_progress.increment_completed()

    def _accumulates(self) -> bool:
        return self._trainer.accumulate_grad_batches != 1 and self._loop._should_accumulate()

    def _moved(self, batch: Any) -> Any:
        """The batch on the device, unless it is there, or nobody but the step looks at it and that moves it itself."""
        if self._is_cpu or (self._direct and not self._hands_out_batches()):
            tensors = batch if type(batch) in (list, tuple) else (batch,)
            if _PLAIN.issuperset(map(type, tensors)) and all(map(_is_cpu, tensors)):
                # A list of one's own, as Lightning gives: hooks may change it.
                return list(batch) if type(batch) is list else batch
        return move_data_to_device(batch, self._device)

    def _hands_out_batches(self) -> bool:
        """Whether anybody has a hook that is given the batch, and is not known to leave it alone."""
        self._refresh()
        return self._module_ends or any(hands_out_batch(c) for hooked in self._hooked.values() for c in hooked)

    def _train(self, batch: Any) -> None:
        """One batch, from its hooks before to its hooks after."""
        loop, trainer = self._loop, self._trainer
        total, current = loop.batch_progress.total, loop.batch_progress.current
        total.ready += 1
        current.ready += 1
        batch_idx = current.ready - 1
        results = self._begin(batch)
        self._call_callbacks(START, batch, batch_idx)
        total.started += 1
        current.started += 1
        values = {"batch": batch, "batch_idx": batch_idx}
        kwargs = OrderedDict([(name, values[name]) for name in self._arguments or ()])
        if self._module.automatic_optimization:
            outputs = loop.automatic_optimization.run(trainer.strategy.optimizers[0], batch_idx, kwargs)
        else:
            outputs = loop.manual_optimization.run(kwargs)
        total.processed += 1
        current.processed += 1
        if trainer.strategy.lr_scheduler_configs:
            if not self._accumulates():
                self._step_schedulers(plateau=False)
            if loop._num_ready_batches_reached():
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._call_callbacks(END, outputs, batch, batch_idx)
        if self._module_ends:
            call._call_lightning_module_hook(trainer, END, outputs, batch, batch_idx)
        self._end(results)
        total.completed += 1
        current.completed += 1
        if self._logs() and trainer.loggers:
            self._connector.update_train_step_metrics()
        elif self._rows.on_their_way:
            self._rows.look()

    def _begin(self, batch: Any) -> Any:
        """What the logger connector does when a batch starts, without asking which loop is active."""
        connector, results = self._connector, self._loop._results
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        return results

    def _end(self, results: Any) -> None:
        """What the logger connector does when a batch ends; a lazy one when somebody asks it."""
        if not results:
            results.batch = None
        elif isinstance(self._connector, LazyConnector):
            self._connector.postpone(results)
            results.batch = results.batch_size = None
        else:
            self._connector.on_batch_end()

    def _logs(self) -> bool:
        """Whether the logger connector may have to do with the loggers now."""
        trainer = self._trainer
        every = trainer.log_every_n_steps
        due = every and (self._loop._batches_that_stepped + 1) % every == 0
        return bool(due or trainer.should_stop or trainer.fast_dev_run)

    def _look(self) -> None:
        """Find out who has hooks for batches. Asked again when somebody comes or goes, or gets a hook of its own."""
        self._callbacks = list(self._trainer.callbacks)
        self._hooked = {name: [c for c in self._callbacks if has_hook(c, name, Callback)] for name in (START, END)}
        own = vars(self._module)
        self._module_ends = has_hook(self._module, END, LightningModule)
        holders = [] if self._module_ends else [(own, END)]
        for name, hooked in self._hooked.items():
            holders += [(vars(callback), name) for callback in self._callbacks if callback not in hooked]
        self._unhooked = [inner for inner, _ in holders], [name for _, name in holders]

    def _refresh(self) -> None:
        if self._trainer.callbacks != self._callbacks or any(map(contains, *self._unhooked)):
            self._look()

    def _call_callbacks(self, hook: str, *args: Any) -> None:
        """Lightning's way to call callbacks, of which only some have the hook."""
        self._refresh()
        hooked = self._hooked[hook]
        if not hooked:
            return
        inner, known = vars(self._module), len(self._callbacks)
        # A module's own __setattr__ takes longer than most hooks.
        before, inner["_current_fx_name"] = inner["_current_fx_name"], hook
        # Whom a hook adds to the Trainer's callbacks has its turn at once.
        for callback in chain(hooked, islice(self._trainer.callbacks, known, None)):
            getattr(callback, hook)(self._trainer, self._module, *args)
        inner["_current_fx_name"] = before


def _nothing() -> None:
    """In place of what tells a profiler that passes everything through."""
