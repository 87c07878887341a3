"""Why a run needs Lightning's own loop over training batches: each reason has a name, which the report gives."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.progress import _BatchProgress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle
from lightning.pytorch.utilities.model_helpers import is_overridden

from graphplan.callback.gates import has_hook, own_of
from graphplan.compare.comparing import Checks

START, END = "on_train_batch_start", "on_train_batch_end"
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STOCK_HOOKS = frozenset((START, *_TRANSFERS))
"""Hooks of the module that Lightning's own loop calls for each batch, and the loop seam never."""
_NAMES: dict[tuple[type, str], str] = {
    (_TrainingEpochLoop, "run"): "reset on_run_start done advance on_advance_end StopIteration on_iteration_done",
    (_TrainingEpochLoop, "done"): """
        _is_training_done _is_validation_done trainer should_stop fit_loop min_epochs _can_stop_early _warning_cache
        info min_steps
    """,
    (_TrainingEpochLoop, "_is_training_done"): "_is_max_limit_reached global_step max_steps _num_ready_batches_reached",
    (_TrainingEpochLoop, "_num_ready_batches_reached"): """
        batch_progress current ready trainer num_training_batches is_last_batch
    """,
    (_TrainingEpochLoop, "advance"): """
        restarting _should_check_val_fx val_loop restarted_mid_evaluation restarted_on_last _skip_next_val
        increment_progress_to_evaluation_end torch distributed is_available is_initialized trainer world_size
        _broadcast_sigterm_tensor isinstance _DataLoaderIterDataFetcher next _batch _batch_idx batch_idx batch_progress
        done is_last_batch precision_plugin convert_input lightning_module _on_before_batch_transfer call
        _call_strategy_hook increment_ready _logger_connector on_batch_start _warning_cache warn _call_callback_hooks
        _call_lightning_module_hook increment_by increment_started _build_kwargs OrderedDict profiler profile
        automatic_optimization run optimizers manual_optimization increment_processed update_lr_schedulers
        _num_ready_batches_reached StopIteration on_batch_end increment_completed update_train_step_metrics
    """,
    (_TrainingEpochLoop, "_should_check_val_fx"): """
        _should_check_val_epoch trainer val_check_batch float batch_progress is_last_batch isinstance
        _DataLoaderIterDataFetcher should_stop fit_loop _can_stop_early _val_check_time_interval time monotonic
        _last_val_time limit_train_batches int batch_idx check_val_every_n_epoch total_batch_idx
    """,
    (_TrainingEpochLoop, "on_advance_end"): """
        _should_check_val_fx _skip_next_val trainer validating _logger_connector _first_loop_iter _should_accumulate
        call _call_lightning_module_hook lightning_module zero_grad val_loop run training update_lr_schedulers
        _batches_that_stepped _save_loggers_on_train_batch_end _is_training_done received_sigterm SIGTERMException
    """,
    (_TrainingEpochLoop, "update_lr_schedulers"): "_should_accumulate _update_learning_rates",
    (_TrainingEpochLoop, "_update_learning_rates"): """
        trainer lr_scheduler_configs lightning_module automatic_optimization reduce_on_plateau batch_idx current_epoch
        interval frequency monitor _get_monitor_value strict list callback_metrics MisconfigurationException
        rank_zero_warn RuntimeWarning scheduler_progress increment_ready call _call_lightning_module_hook scheduler
        increment_completed
    """,
    (_TrainingEpochLoop, "on_iteration_done"): """
        _restarting _loaded_from_state_dict _resuming_from_checkpoint reset_restart_stage
    """,
    (_TrainingEpochLoop, "reset_restart_stage"): "RestartStage NONE _restart_stage",
    (_PrefetchDataFetcher, "__next__"): "batches pop append super __next__ StopIteration done",
    (_DataFetcher, "__next__"): "iterator _start_profiler next StopIteration done _stop_profiler fetched length",
    (CombinedLoader, "__next__"): "_iterator next isinstance _Sequential tree_unflatten _spec",
    (_MaxSizeCycle, "__next__"): "len iterators range next StopIteration _consumed all iter iterables _idx",
    (_LoggerConnector, "on_batch_end"): """
        isinstance _first_loop_iter bool metrics _progress_bar_metrics update _callback_metrics _logged_metrics trainer
        _results batch batch_size
    """,
    (_LoggerConnector, "update_train_step_metrics"): """
        trainer fit_loop _should_accumulate lightning_module automatic_optimization isinstance _first_loop_iter bool
        should_update_logs fast_dev_run log_metrics metrics
    """,
    (_LoggerConnector, "log_metrics"): """
        trainer loggers _logged_metrics update convert_tensors_to_scalars pop int setdefault current_epoch fit_loop
        epoch_loop _batches_that_stepped log_metrics save
    """,
    (_LoggerConnector, "should_update_logs"): """
        trainer log_every_n_steps _active_loop isinstance pl loops _FitLoop epoch_loop _batches_that_stepped
        _EvaluationLoop _PredictionLoop batch_progress current ready NotImplementedError should_stop
    """,
}
"""All that Lightning's own methods and properties name. A release that names more does more."""


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _code_of(kind: type, name: str) -> CodeType:
    found: Any = getattr(kind, name)
    return getattr(found, "fget", found).__code__


_BLIND = (
    "ModelCheckpoint", "TQDMProgressBar", "RichProgressBar", "LearningRateMonitor", "Timer", "DeviceStatsMonitor",
    "EarlyStopping", "OnExceptionCheckpoint",
)  # fmt: skip
"""Lightning's callbacks whose hooks leave the batch that they are given alone."""


def hands_out_batch(callback: Any) -> bool:
    """Whether a callback's hooks may look at the batch."""
    kind = next((k for k in type(callback).__mro__ if START in vars(k) or END in vars(k)), None)
    known = kind is not None and kind.__module__.startswith("lightning.") and kind.__name__ in _BLIND
    return not known or START in vars(callback) or END in vars(callback)


_SWITCHES = ("_every_n_train_steps", "_train_time_interval")
"""What a ``ModelCheckpoint`` that has nothing to do after batches has as 0 and None."""
_CHECKPOINTS = """
    automatic_optimization _every_n_train_steps global_step _should_skip_saving_checkpoint _monitor_candidates monitor
    _defer_save_until_validation hasattr isinstance saved_models dict layer torch nn Module max keys no_grad state_dict
    items detach clone TypeError load_state_dict _save_topk_checkpoint _save_last_checkpoint time monotonic
    _last_time_checked is_global_zero rank_zero_warn UserWarning _train_time_interval total_seconds strategy broadcast
    lightning pytorch trainer states lightning.pytorch.trainer.states TrainerFn bool fast_dev_run state fn FITTING
    sanity_checking _last_global_step_saved _should_save_on_train_epoch_end list sum num_val_batches getattr fit_loop
    epoch_loop batch_progress current_epoch check_val_every_n_epoch
"""
"""All that a ``ModelCheckpoint`` names after a batch."""


def switches_of(callback: Any) -> tuple[str, ...]:
    """The attributes that keep ``on_train_batch_end`` of a checkpoint callback from doing anything: it saves when an
    epoch ends. None of them if it may do something, or somebody has overridden what it does.
    """
    names: set[str] = set()
    for name in (END, "_should_skip_saving_checkpoint"):
        own: Any = getattr(type(callback), name, None)
        stock = isinstance(own, FunctionType) and own is getattr(ModelCheckpoint, name, None)
        if not stock or name in vars(callback):
            return ()
        names |= _names_in(own.__code__)
    values = [vars(callback).get(name, callback) for name in _SWITCHES]
    return _SWITCHES if values == [0, None] and names <= set(_CHECKPOINTS.split()) else ()


_OF_TRAINER = (
    "should_stop", "received_sigterm", "accumulate_grad_batches", "check_val_every_n_epoch", "_val_check_time_interval",
    "val_check_batch",
)  # fmt: skip
_OF_LOOP = (
    "_skip_next_val", "max_steps", "_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint",
    "_restart_stage",
)  # fmt: skip
"""What decides whether anything is due after a batch. What differs from batch to batch is not among it."""


def unchanged(trainer: Any, own: dict[str, Any]) -> Any:
    """Comparisons that hold while all that these name, the loop's own ``advance``, and what the module has of its own
    among ``own``, are what they are now.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    places = [(trainer, name) for name in _OF_TRAINER if hasattr(trainer, name)]
    places += [(loop, name) for name in _OF_LOOP if hasattr(loop, name)]
    places.append((trainer.fit_loop, "max_batches"))
    things, names = [thing for thing, _ in places], [name for _, name in places]
    hooks = own_of([(vars(loop), "advance"), *((own, name) for name in ("training_step", *STOCK_HOOKS))])
    return Checks([("same_attributes", things, names, list(map(getattr, things, names))), hooks])


def keeps_stock_transfer(trainer: Any, module: LightningModule) -> str | None:
    """Why a training step cannot take batches right from host memory; None if nothing speaks against it."""
    if trainer.strategy.root_device.type == "cpu":
        return "the step computes where batches are"
    if any(has_hook(module, hook, LightningModule) for hook in (START, END)):
        return f"{type(module).__name__} has hooks for batches"
    for callback in trainer.callbacks:
        if any(has_hook(callback, hook, Callback) for hook in (START, END)) and hands_out_batch(callback):
            return f"{type(callback).__name__} has hooks for batches"
    return None


def closed_loop(trainer: Any, module: LightningModule) -> str | None:
    """Why a run needs Lightning's own loop over batches; None if nothing speaks against the loop seam."""
    loop: Any = trainer.fit_loop.epoch_loop
    for (kind, name), names in _NAMES.items():
        if kind is _TrainingEpochLoop and (getattr(type(loop), name) is not getattr(kind, name) or name in vars(loop)):
            return f"the training loop's {name} is not Lightning's own"
        unknown = sorted(_names_in(_code_of(kind, name)) - set(names.split()))
        if unknown:
            return f"this Lightning's {kind.__name__}.{name} does more than is known here: {', '.join(unknown)}"
    if type(loop.batch_progress) is not _BatchProgress:
        return f"progress is kept by a {type(loop.batch_progress).__name__}"
    if type(trainer.profiler) is not PassThroughProfiler:
        return f"the {type(trainer.profiler).__name__} has rows of Lightning's loop"
    if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
        return "training_step takes the iterator of batches"
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
