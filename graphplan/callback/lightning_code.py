"""Digests of the Lightning source code that this package has copies of. Code with an unknown digest is not replaced.
For a new release, ``tests/lightning/test_lightning_code.py`` names the parts with new digests. Read what has changed in
their functions, and add the digests to :data:`KNOWN`.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from inspect import getblock
from linecache import getlines
from textwrap import dedent
from types import CodeType
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.progress import _BatchProgress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric

from graphplan.environment.origin import is_library

LOOP_METHODS = (
    "run", "done", "_is_training_done", "_num_ready_batches_reached", "advance", "_should_check_val_fx",
    "on_advance_end", "update_lr_schedulers", "_update_learning_rates", "_should_accumulate",
    "_accumulated_batches_reached", "on_iteration_done", "reset_restart_stage", "on_run_start", "_on_before_fetch",
    "_on_after_fetch", "_save_loggers_on_train_batch_end",
)  # fmt: skip
"""Methods of the loop over training batches. The loop seam is not used if one is overridden."""
PARTS: dict[str, tuple[tuple[Any, tuple[str, ...]], ...]] = {
    "loop": (
        (_TrainingEpochLoop, LOOP_METHODS),
        (_TrainingEpochLoop, ("_build_kwargs",)),
        (_BatchProgress, ("increment_ready", "increment_started", "increment_processed", "increment_completed")),
        (_LoggerConnector, ("on_batch_start", "on_batch_end", "update_train_step_metrics", "should_update_logs")),
        (call, ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")),
    ),
    "logs": (
        (_LoggerConnector, ("on_batch_end", "log_metrics", "metrics", "progress_bar_metrics", "should_reset_tensors")),
        (_ResultCollection, ("log", "update_metrics", "_get_cache", "_extract_batch_size", "metrics", "reset")),
        (_ResultMetric, ("update", "forward", "reset")),
        (ClosureResult, ("from_training_step_output", "__post_init__")),
        (LightningModule, ("_LightningModule__to_tensor",)),
    ),
    "bar": ((TQDMProgressBar, ("on_train_batch_end", "_should_update")),),
}
"""Functions that this package replaces or bypasses, by part, with their class or module."""
KNOWN: dict[str, dict[str, str]] = {
    "loop": {"a3eff944d7ac9f68": "2.6.0 to 2.6.6"},
    "logs": {
        "33db0b1d35c7dc28": "2.6.0 to 2.6.6",
        "470b92ba3e8344f9": "2.6.0 to 2.6.6 of pytorch_lightning, whose docstrings have its name",
    },
    "bar": {"5e84b70001174190": "2.6.0 to 2.6.6"},
}
"""The known digests of each part, and the versions of Lightning that have them."""


def _inner(function: Any) -> Any:
    """Unwrap library decorators such as ``torch.compiler.disable``. Wrappers of other packages are unknown code."""
    while hasattr(function, "__wrapped__") and is_library(function.__code__.co_filename):
        function = function.__wrapped__
    return function


def _source_of(code: CodeType) -> str:
    """Return the same text as ``inspect.getsource``, which would first ask each imported module for its file."""
    return dedent("".join(getblock(getlines(code.co_filename)[code.co_firstlineno - 1 :])))


@cache
def _digest_of(functions: tuple[Any, ...]) -> str:
    try:
        sources = [_source_of(function.__code__) for function in functions]
    except AttributeError:
        return ""
    if not all(sources):
        return ""
    return sha256("\n".join(sources).encode()).hexdigest()[:16]


def digest_of(part: str) -> str:
    """Return the digest of the installed code of a part, or an empty string if a function has no source."""
    found: list[Any] = [getattr(holder, name, None) for holder, names in PARTS[part] for name in names]
    return _digest_of(tuple(_inner(getattr(one, "fget", None) or one) for one in found))


def is_known(part: str) -> bool:
    """Return True if the copies of a part were written from the installed code."""
    return digest_of(part) in KNOWN[part]
