"""Who has hooks for batches: asked once, and again when somebody comes or goes, or gets or loses a hook."""

from __future__ import annotations

from itertools import islice
from typing import Any

from lightning.pytorch import Callback, LightningModule

from graphplan.callback.gates import has_hook, members_of, own_of
from graphplan.callback.logging.bars import resting
from graphplan.callback.loop.requirements import END, START, hands_out_batch, switches_of
from graphplan.compare.comparing import Checks
from graphplan.feed.call_arguments import hands_over


class BatchHooks:
    """The hooks of one fit's callbacks and module around each batch.

    Attributes:
        hold: says whether all that was found is still so; where it is not, :meth:`look` is due.
        starts, ends: callbacks that have something to do before and after a batch, and their places among all.
        module_ends: whether the module has something to do after one.
        hand_out: whether anybody is given the batch, and is not known to leave it alone.
    """

    def __init__(self, trainer: Any, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self.look()

    def look(self) -> None:
        """Find out who has hooks."""
        callbacks = self._trainer.callbacks
        self.starts, ends = (
            [pair for pair in enumerate(callbacks) if has_hook(pair[1], name, Callback)] for name in (START, END)
        )
        starting, ending = ([callback for _, callback in pairs] for pairs in (self.starts, ends))
        switches = {id(callback): switches_of(callback) for callback in ending}
        # Those that do nothing now may be given something to do by those that come before them.
        self._idle = {number for number, names in switches.items() if names}
        self.ends = ends if len(self._idle) < len(switches) else []
        silent = {id(callback): resting(callback) for callback in ending if END not in vars(callback)}
        self._resting = {number: rests for number, rests in silent.items() if rests is not None}
        self.module_ends = has_hook(self._module, END, LightningModule)
        self.hand_out = self.module_ends or any(map(hands_out_batch, [*starting, *ending]))
        places = [(vars(self._module), END), *((vars(c), name) for c in callbacks for name in (START, END))]
        # A hook that does nothing does so while what switches it off stays as it is.
        places += [(vars(callback), name) for callback in ending for name in switches[id(callback)]]
        places += [(vars(callback), "_should_update") for callback in ending if id(callback) in self._resting]
        self.hold = Checks([*members_of(self._trainer, "callbacks"), own_of(places)]).hold

    def _passes(self, number: int, batch_idx: int) -> bool:
        """Whether a callback has nothing to do after this batch, as things were when somebody looked last."""
        return number in self._idle or (number in self._resting and self._resting[number](batch_idx))

    @hands_over
    def call(self, hook: str, hooked: list[tuple[int, Any]], *args: Any) -> None:
        """Lightning's way to call callbacks, of which only some have the hook; :attr:`hold` was asked right before."""
        inner, callbacks = vars(self._module), self._trainer.callbacks
        # A module's own __setattr__ takes longer than most hooks.
        before, inner["_current_fx_name"] = inner["_current_fx_name"], hook
        for place, callback in hooked:
            if hook is END and self._passes(id(callback), args[2]):
                continue
            getattr(callback, hook)(self._trainer, self._module, *args)
            if not self.hold():
                # Lightning goes on in its list as that is by now, with the hooks that there are by now.
                for later in islice(callbacks, place + 1, None):
                    getattr(later, hook)(self._trainer, self._module, *args)
                self.look()
                break
        inner["_current_fx_name"] = before
