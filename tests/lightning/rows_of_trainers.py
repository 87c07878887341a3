"""Rows about what a Trainer may be told: precision, clipping, accumulation, limits, profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision
from torch import Tensor
from torch.optim import SGD, AdamW, RMSprop

from tests.lightning.parts import FUSED_ADAMW, LitDigits
from tests.lightning.rows import FULL, Row
from tests.optimizers.test_gradient_scaler import prepared
from tests.twins import FURTHER

# Precision.

CLIPPING: dict[str, dict[str, Any]] = {
    "": {},
    ", clipped by norm": {"gradient_clip_val": 0.5},
    ", clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}
ADAMW, STOCK_SGD = partial(AdamW, lr=3e-3), partial(SGD, lr=0.1, momentum=0.9)


class Scaled(LitDigits):
    """Keeps the scale after each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scales: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def _scaler(scale: float = 2.0**14, **trainer: Any) -> Callable[[], dict[str, Any]]:
    """A scale that doubles after every two steps, until gradients overflow."""

    def given() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], **trainer}

    return given


def _scales_change(fit: Any) -> bool:
    """Whether replayed steps grew the scale and were skipped."""
    return {b / a for a, b in pairwise(fit.module.scales[4:])} == {0.5, 1.0, 2.0}


def scaled(make: Any, twin: Any = None, *, replayed: int = FULL, shows: Any = _scales_change, **row: Any) -> Row:
    """A row with a gradient scaler."""
    plain = None if twin is None else partial(Scaled, twin, schedule=None)
    row.setdefault("trainer", _scaler())
    left = ("fused", "foreach") if twin is not None else ()
    module = partial(Scaled, make, schedule=None)
    return Row(module, replayed, twin=plain, leaves_out=left, shows=shows, **row)


class Doubling(Precision):
    """A plugin of the user's: it doubles inputs and losses, and halves the gradients."""

    def convert_input(self, data: Any) -> Any:
        return [data[0] * 2, data[1]]

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return super().pre_backward(tensor * 2, module)

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)
        return super().post_backward(tensor, module)


class Counting(Precision):
    """A plugin of the user's that counts steps in Python."""

    def __init__(self) -> None:
        self.steps = 0

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)


PRECISION: dict[str, Row] = {}
for _clip, _options in CLIPPING.items():
    for _precision in ("32-true", "64-true", "bf16-true", "bf16-mixed"):
        # Lightning refuses to clip for a fused optimizer under autocast: its twin's AdamW is not known to be one.
        _twin = partial(LitDigits, prepared(ADAMW))
        _fits = {"twin": _twin, "leaves_out": ("fused", "foreach")}
        PRECISION[f"{_precision}{_clip}"] = Row(
            partial(LitDigits, ADAMW), trainer={"precision": _precision, **_options}, **_fits
        )
    PRECISION[f"16-mixed, AdamW{_clip}"] = scaled(ADAMW, prepared(ADAMW), trainer=_scaler(**_options))
    PRECISION[f"16-mixed, SGD{_clip}"] = scaled(STOCK_SGD, prepared(STOCK_SGD), trainer=_scaler(**_options))
    PRECISION[f"16-mixed, fused{_clip}"] = scaled(
        FUSED_ADAMW, prepared(ADAMW) if _options else None, trainer=_scaler(**_options)
    )

CLIPPED_BY = {
    "32-true": "norm", "64-true": "value", "bf16-true": "value", "bf16-mixed": "norm",
    "16-mixed, AdamW": "norm", "16-mixed, SGD": "value", "16-mixed, fused": "value",
}  # fmt: skip
"""The one kind of clipping that each precision is crossed with."""
for _precision, _kind in CLIPPED_BY.items():
    PRECISION.pop(f"{_precision}, clipped by {'value' if _kind == 'norm' else 'norm'}")
PRECISION |= {
    "16-mixed, accumulated": scaled(
        ADAMW, prepared(ADAMW), replayed=18, trainer=_scaler(accumulate_grad_batches=2, max_epochs=4)
    ),
    "16-mixed, a scale that starts too high": scaled(
        ADAMW,
        prepared(ADAMW),
        trainer=_scaler(2.0**22, max_epochs=4),
        replayed=14,
        shows=lambda fit: "the gradient scaler skipped the step" in fit.callback.report(),
    ),
    "16-mixed, RMSprop": scaled(
        partial(RMSprop, lr=1e-3), replayed=FULL - 1, shows=lambda fit: "to step RMSprop" in fit.callback.report()
    ),
    "16-mixed, skipped on the host": scaled(
        ADAMW, replayed=FULL - 1, options={"prepare_optimizers": False}, trainer=_scaler(gradient_clip_val=0.5)
    ),
    "a user's precision plugin": Row(trainer=lambda: {"plugins": [Doubling()], "gradient_clip_val": 0.5}, replayed=13),
    "a precision plugin that counts": Row(
        trainer=lambda: {"plugins": [Counting()]},
        replayed=13,
        shows=lambda fit: fit.trainer.precision_plugin.steps == 18,
    ),
    "a subclass of Lightning's plugin": Row(trainer=lambda: {"plugins": [type("Mine", (DoublePrecision,), {})()]}),
}

# Limits and intervals.


def _short(trainer: dict[str, Any], replayed: int, **row: Any) -> Row:
    return Row(trainer=trainer, replayed=replayed, **row)


RAGGED = 6 * 24 + 10
TRAINERS: dict[str, Row] = {
    **PRECISION,
    "accumulation over 2": _short({"accumulate_grad_batches": 2, "max_epochs": 4}, 18),
    "accumulation over 4, ragged end": _short({"accumulate_grad_batches": 4, "max_epochs": 4}, 14),
    "accumulation over 3, ragged batch": _short({"accumulate_grad_batches": 3, "max_epochs": 5}, 22, examples=RAGGED),
    "accumulation and clipping": _short({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 4}, 18),
    "a ragged batch": _short({"max_epochs": 6}, 6 * 7 - 4 - FURTHER, examples=RAGGED),
    "max_steps": _short({"max_steps": 14, "max_epochs": -1}, 10),
    "max_time": _short({"max_time": {"hours": 1}}, FULL, leaves_out=("time_elapsed",)),
    "limit_train_batches": _short({"limit_train_batches": 4, "max_epochs": 4}, 12),
    "overfit_batches": _short({"overfit_batches": 2, "max_epochs": 7}, 10),
    "fast_dev_run": _short({"fast_dev_run": 12}, 2, shows=lambda fit: len(fit.observer.batches) == 6),
    "barebones": _short({"barebones": True}, FULL, shows=lambda fit: fit.trainer.logger is None and not fit.rows),
    "validation twice an epoch": _short({"val_check_interval": 0.5}, 15),
    "validation after a third of an epoch": _short({"val_check_interval": 1 / 3}, 14),
    "validation across epochs": _short({"val_check_interval": 4, "check_val_every_n_epoch": None}, FULL),
    "no sanity check": _short({"num_sanity_val_steps": 0}, FULL),
    "the whole sanity check": _short({"num_sanity_val_steps": -1}, FULL),
    "deterministic": _short({"deterministic": True}, FULL),
    "inference_mode=False": _short({"inference_mode": False}, FULL),
    "simple profiler": _short({"profiler": "simple"}, FULL),
    "advanced profiler": _short({"profiler": "advanced"}, FULL),
    "pytorch profiler": _short({"profiler": "pytorch", "max_epochs": 1}, 2),
    "new loaders for each epoch": _short({"reload_dataloaders_every_n_epochs": 1}, FULL),
    "progress bar": _short({"enable_progress_bar": True}, FULL),
    "model summary": _short({"enable_model_summary": True}, FULL),
}
