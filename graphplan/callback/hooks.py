"""Hooks inside the step and around each batch, looked up once and again after a change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

from graphplan.callback.lightning_code import is_known
from graphplan.callback.logging.bars import ThrottledBar
from graphplan.compare.comparing import Checks, Row, contents_of
from graphplan.feed.call_arguments import hands_over
from graphplan.owners.naming import free_name

STEP_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that Lightning calls inside the step: a replay does not run them."""
START, END = "on_train_batch_start", "on_train_batch_end"
_METHODS = (
    "training_step", "validation_step", "test_step", "predict_step", "backward", "manual_backward", "optimizer_step",
    "optimizer_zero_grad", "toggle_optimizer", "untoggle_optimizer", "configure_gradient_clipping", "clip_gradients",
)  # fmt: skip
"""Methods of a module that are called inside the step."""
_LIGHTNINGS = ("lightning", "pytorch_lightning")
_BLIND = (
    "ModelCheckpoint", "TQDMProgressBar", "RichProgressBar", "LearningRateMonitor", "Timer", "DeviceStatsMonitor",
    "EarlyStopping", "OnExceptionCheckpoint",
)  # fmt: skip
"""Lightning's callbacks whose hooks do not look at the batch that they are given."""
_SWITCHES = ("_every_n_train_steps", "_train_time_interval")
"""Attributes of a checkpoint callback that saves nothing after a batch if they are 0 and None."""
Rests = Callable[[int], bool]
"""Says whether a callback has nothing to do after the batch with that number."""


def has_hook(thing: Any, name: str, base: type) -> bool:
    """Whether ``thing`` overrides the hook of ``base`` in whatever way: by a function, an object, a mock."""
    return getattr(getattr(thing, name), "__func__", None) is not getattr(base, name)


def hooked_callbacks(trainer: Trainer) -> dict[str, Any]:
    """Callbacks with hooks inside the step, by name. They are owners, as the module is."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    hooked: dict[str, Any] = {}
    for callback in callbacks:
        if any(has_hook(callback, hook, Callback) for hook in STEP_HOOKS):
            hooked[free_name(f"callbacks[{type(callback).__name__}]", hooked)] = callback
    return hooked


def own_of(places: Sequence[tuple[dict[str, Any], str]]) -> Row:
    """A comparison that holds while each dictionary has the value under its name that it has now, or none."""
    spaces, names = [space for space, _ in places], [name for _, name in places]
    return ("same_values", spaces, names, list(map(dict.get, spaces, names)))


def members_of(thing: Any, name: str) -> list[Row]:
    """Comparisons that hold while ``thing`` has the list that it has now, with the same items."""
    held = getattr(thing, name)
    return [("same_attributes", [thing], [name], [held]), *contents_of([held])]


class OwnHooks:
    """Counts changes of the list of callbacks, and of hooks that are attributes of instances."""

    def __init__(self, trainer: Any, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._checks: Any = None
        self._changes = 0

    def changes(self) -> int:
        """The number of changes so far."""
        if self._checks is None or not self._checks.hold():
            callbacks = self._trainer.callbacks
            places = [(vars(self._module), name) for name in (*_METHODS, *STEP_HOOKS)]
            places += [(vars(callback), name) for callback in callbacks for name in STEP_HOOKS]
            self._checks = Checks([*members_of(self._trainer, "callbacks"), own_of(places)])
            self._changes += 1
        return self._changes


def hands_out_batch(callback: Any) -> bool:
    """Whether a callback's hooks may look at the batch."""
    kind = next((k for k in type(callback).__mro__ if START in vars(k) or END in vars(k)), None)
    known = kind is not None and kind.__module__.partition(".")[0] in _LIGHTNINGS and kind.__name__ in _BLIND
    return not known or START in vars(callback) or END in vars(callback)


def switches_of(callback: Any) -> tuple[str, ...]:
    """The attributes that keep a checkpoint callback from saving after a batch; none if it may save."""
    kind, own = type(callback), vars(callback)
    for name in (END, "_should_skip_saving_checkpoint"):
        if name in own or getattr(kind, name, None) is not getattr(ModelCheckpoint, name):
            return ()
    off = [own.get(name, callback) for name in _SWITCHES] == [0, None]
    return _SWITCHES if off and is_known("checkpoint") else ()


def _resting(callback: Any) -> tuple[tuple[str, ...], Rests | None]:
    """The attributes that keep ``callback`` idle after a batch, and the test for that; nothing where it may do work."""
    switches = switches_of(callback)
    if switches:
        return switches, lambda batch_idx: True
    asked = vars(callback).get("_should_update")
    bar = getattr(getattr(asked, "func", None), "__self__", None)
    stock = END not in vars(callback) and getattr(type(callback), END, None) is TQDMProgressBar.on_train_batch_end
    if stock and isinstance(bar, ThrottledBar) and is_known("bar"):
        return ("_should_update",), bar.rests
    return (), None


class BatchHooks:
    """The hooks of one fit's callbacks and module around each batch.

    Attributes:
        hold: says whether the hooks are unchanged; if not, :meth:`look` is due.
        starts, ends: callbacks with hooks before and after a batch, and their places among all.
        module_ends: whether the module has a hook after a batch.
        hand_out: whether a hook may read the batch.
    """

    def __init__(self, trainer: Any, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self.look()

    def look(self) -> None:
        """Look the hooks up."""
        callbacks = self._trainer.callbacks
        self.starts, ends = (
            [pair for pair in enumerate(callbacks) if has_hook(pair[1], name, Callback)] for name in (START, END)
        )
        found = {id(callback): _resting(callback) for _, callback in ends}
        self._rests = {key: rests for key, (_, rests) in found.items() if rests is not None}
        # A hook before that of an idle checkpoint may change the checkpoint's attributes.
        self.ends = [] if all(switches_of(callback) for _, callback in ends) else ends
        self.module_ends = has_hook(self._module, END, LightningModule)
        self.hand_out = self.module_ends or any(hands_out_batch(callback) for _, callback in (*self.starts, *ends))
        places = [(vars(self._module), END), *((vars(c), name) for c in callbacks for name in (START, END))]
        places += [(vars(callback), name) for _, callback in ends for name in found[id(callback)][0]]
        self.hold = Checks([*members_of(self._trainer, "callbacks"), own_of(places)]).hold

    @hands_over
    def call(self, hook: str, hooked: list[tuple[int, Any]], *args: Any) -> None:
        """Call the hook of ``hooked`` as Lightning does; :attr:`hold` was asked right before."""
        inner, callbacks = vars(self._module), self._trainer.callbacks
        # A module's own __setattr__ takes longer than most hooks.
        before, inner["_current_fx_name"] = inner["_current_fx_name"], hook
        for place, callback in hooked:
            rests = self._rests.get(id(callback)) if hook is END else None
            if rests is not None and rests(args[2]):
                continue
            getattr(callback, hook)(self._trainer, self._module, *args)
            if not self.hold():
                # Lightning goes on through the list as it is now.
                for later in islice(callbacks, place + 1, None):
                    getattr(later, hook)(self._trainer, self._module, *args)
                self.look()
                break
        inner["_current_fx_name"] = before
