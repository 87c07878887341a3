"""What a step may read of the Trainer: owners that stand for its numbers and objects, and the batch's index."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.optim import Optimizer

from graphplan.callback.gates import has_hook
from graphplan.callback.patches import telling
from graphplan.effects.allowed import allowing
from graphplan.errors import HostScalarError
from graphplan.observe.comparisons import COMPUTING, OPERATORS, Comparison, is_only_compared
from graphplan.observe.source import find_source
from graphplan.owners.kinds import SCALARS
from graphplan.owners.slots import Reached, Via
from graphplan.owners.views import Numbers
from graphplan.specs.paths import free_name
from graphplan.trace.mode import refuse_trace

_TRAINER = (
    "current_epoch", "global_step", "min_epochs", "max_epochs", "min_steps", "max_steps", "is_last_batch",
    "num_training_batches", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "log_every_n_steps",
)  # fmt: skip
_LOOP = ("batch_idx", "total_batch_idx", "global_step", "_batches_that_stepped")
_PROGRESS = ("ready", "started", "processed", "completed")
_STEP_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that Lightning calls inside the step: a replay does not run them."""
_CALLBACKS = (
    "callbacks", "early_stopping_callback", "early_stopping_callbacks", "checkpoint_callback", "checkpoint_callbacks",
    "progress_bar_callback",
)  # fmt: skip
WRAPPER, WRAPPERS_NOTE = "strategy.model", "require_forward_param_sync"
"""The module that DDP wraps around the LightningModule, and its note whether it broadcasts buffers before the next
forward pass: not after one without gradients, or one whose gradients stayed on the rank. A step branches on the note
and changes it."""


def optimizers_of(trainer: Trainer) -> dict[str, Any]:
    """The optimizers by name."""
    if len(trainer.optimizers) == 1:
        return {"optimizer": trainer.optimizers[0]}
    return {f"optimizers[{index}]": optimizer for index, optimizer in enumerate(trainer.optimizers)}


def trainer_numbers(trainer: Trainer, *, trains: bool) -> dict[str, Any]:
    """Owners that stand for the numbers of the Trainer, its loops and schedulers: a replay does not freeze them."""
    loop: Any = trainer.fit_loop
    owners: dict[str, Any] = {
        # Only evaluation is done to see whether it works.
        "trainer": Numbers(trainer, _TRAINER if trains else (*_TRAINER, "sanity_checking")),
        "trainer.fit_loop.epoch_loop": Numbers(loop.epoch_loop, _LOOP),
        "trainer.optim_progress": Numbers(loop.epoch_loop.automatic_optimization.optim_progress, ("optimizer_steps",)),
    }
    for holder, name in ((loop, "epoch_progress"), (loop.epoch_loop, "batch_progress")):
        progress = getattr(holder, name)
        for part in ("total", "current"):
            known = [number for number in _PROGRESS if hasattr(getattr(progress, part), number)]
            owners[f"trainer.{name}.{part}"] = Via(Numbers(getattr(progress, part), known), name)
    for index, config in enumerate(trainer.lr_scheduler_configs):
        owners[f"lr_schedulers[{index}]"] = config.scheduler
    return owners


def reached_objects(trainer: Trainer) -> dict[str, Any]:
    """Owners that a step's code comes to through the Trainer, if it names them."""
    anything: Any = trainer
    owners: dict[str, Any] = {
        "trainer (its attributes)": Reached(trainer, ["trainer"], without=["callbacks"]),
        "trainer.strategy": Reached(trainer.strategy, ["strategy"]),
        "trainer.precision_plugin": Reached(trainer.precision_plugin, ["precision_plugin"]),
    }
    for index, logger in enumerate(trainer.loggers):
        owners[f"trainer.loggers[{index}]"] = Reached(logger, ["logger", "loggers"])
    datamodule = getattr(anything, "datamodule", None)
    if datamodule is not None:
        owners["trainer.datamodule"] = Reached(datamodule, ["datamodule"])
    for name in ("dataset", "sampler", "batch_sampler"):
        part = getattr(trainer.train_dataloader, name, None)
        if part is not None:
            owners[f"trainer.train_dataloader.{name}"] = Reached(part, ["train_dataloader"])
    for callback in anything.callbacks:
        name = free_name(f"trainer.callbacks[{type(callback).__name__}]", owners)
        owners[name] = Reached(callback, _CALLBACKS)
    return owners


def hooked_callbacks(trainer: Trainer) -> dict[str, Any]:
    """Callbacks with hooks inside the step, by name. They are owners, as the module is."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    hooked: dict[str, Any] = {}
    for callback in callbacks:
        if any(has_hook(callback, hook, Callback) for hook in _STEP_HOOKS):
            hooked[free_name(f"callbacks[{type(callback).__name__}]", hooked)] = callback
    return hooked


class _Groups:
    """One number of an optimizer's groups, under the attribute that leads to them."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self._optimizer = optimizer
        self._name = name

    @property
    def param_groups(self) -> tuple[Any, ...]:
        """The number in each group."""
        return tuple(group.get(self._name) for group in self._optimizer.param_groups)


def group_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Owners that stand for an optimizer that steps on the host: code in the step may read its learning rate."""
    names = [name for name, value in optimizer.param_groups[0].items() if isinstance(value, (tuple, *SCALARS))]
    return {f"optimizer[{name}]": Numbers(_Groups(optimizer, name), ("param_groups",)) for name in names}


class WatchedIndex(int):
    """A batch index that tells what Python asks of it: ``on_question`` is called with each comparison, also of a sum,
    product or remainder with other numbers, and ``on_use`` for other uses of its value.

    Passing it on reports nothing. C code that converts it without a method call (``torch.full((), batch_idx)``) is not
    seen here, but shows as an operator's number that changes.
    """

    on_question: Callable[[Comparison], None]
    on_use: Callable[[], None]
    steps: tuple[Any, ...]

    @classmethod
    def of(
        cls, value: int, on_question: Callable[[Comparison], None], on_use: Callable[[], None], steps: Any = ()
    ) -> WatchedIndex:
        """``value``, which is the index after ``steps``."""
        index = cls(value)
        index.on_question, index.on_use, index.steps = on_question, on_use, steps
        return index

    def plain(self) -> int:
        """The number itself."""
        return int.__int__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, (self.plain(),))

    def __bool__(self) -> bool:
        self.on_question(Comparison(steps=self.steps))
        return self.plain() != 0


def refuse_number(name: str) -> None:
    """Refuse a trace in which a number that Lightning hands to a hook is used.

    Raises:
        HostScalarError: with the line of code, in a trace.
    """
    refuse_trace(
        HostScalarError,
        f"the step computes with {name} at {find_source()}, which changes in a fit; a replay would keep one value. "
        "Move that code to on_train_batch_end, pass eager_if= for the batches that are meant to run it, "
        "variant= for a program of its own for each of a few answers, or, "
        f"{allowing('batch_idx')}",
    )


def unwatch(thing: Any) -> None:
    """Leave plain numbers where a step stored its watched index."""
    for name, value in vars(thing).items():
        # ``isinstance`` would ask the value, too.
        if type(value) is WatchedIndex:
            vars(thing)[name] = value.plain()


def _compared(symbol: str, function: Callable[[Any, Any], Any]) -> Callable[[WatchedIndex, Any], Any]:
    def method(self: WatchedIndex, other: Any) -> Any:
        if type(other) in (int, float, bool):
            self.on_question(Comparison(symbol, other, self.steps))
        else:
            self.on_use()
        return function(self.plain(), other)

    return method


def _computed(
    function: Callable[[Any, Any], Any], steps_of: Callable[[int], tuple[tuple[str, int], ...]]
) -> Callable[[WatchedIndex, Any], Any]:
    """``function(number, other)``, which is what the steps for ``other`` make of the number."""

    def method(self: WatchedIndex, other: Any) -> Any:
        value = function(self.plain(), other)
        asking = sys._getframe(1)
        # C code does not say that it takes the value of what is computed.
        if type(other) is int and is_only_compared(asking.f_code, asking.f_lasti):
            return WatchedIndex.of(value, self.on_question, self.on_use, (*self.steps, *steps_of(other)))
        self.on_use()
        return value

    return method


for _symbol in ("<", "<=", ">", ">=", "==", "!="):
    setattr(WatchedIndex, f"__{OPERATORS[_symbol].__name__}__", _compared(_symbol, OPERATORS[_symbol]))
for _symbol, _function in COMPUTING.items():
    _method = _computed(_function, lambda other, symbol=_symbol: ((symbol, other),))  # type: ignore[misc]
    setattr(WatchedIndex, f"__{_function.__name__}__", _method)
for _name in ("add", "mul"):
    setattr(WatchedIndex, f"__r{_name}__", getattr(WatchedIndex, f"__{_name}__"))
_from = _computed(lambda number, other: other - number, lambda other: (("*", -1), ("+", other)))
WatchedIndex.__rsub__ = _from  # type: ignore[assignment,method-assign]
_USES = (
    "rmod rfloordiv truediv rtruediv pow rpow divmod rdivmod "
    "and rand or ror xor rxor lshift rlshift rshift rrshift neg abs invert "
    "hash format repr str int float index"
)
for _use in _USES.split():
    setattr(WatchedIndex, f"__{_use}__", telling("on_use", getattr(int, f"__{_use}__")))
# The user has given an int: what messages say of its type, Python's own too, is that.
WatchedIndex.__name__ = WatchedIndex.__qualname__ = int.__name__
WatchedIndex.__module__ = int.__module__
