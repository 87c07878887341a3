"""Lightning's manual optimization: the whole ``training_step``, with however many optimizers it steps, is the step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from graphplan.callback.gates import members_of
from graphplan.callback.loop.renewing import RenewingSeam
from graphplan.callback.loop.variants import Variant
from graphplan.callback.schedules import Schedules, Stepped
from graphplan.compare.comparing import Checks
from graphplan.step.gate import Gate
from graphplan.step.options import Options
from graphplan.step.runner import Backends


class ManualSeam(RenewingSeam):
    """The seam of ``manual_optimization``."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        options: Options,
        variant: Variant,
        backends: Backends,
        gate: Gate | None,
    ) -> None:
        super().__init__(trainer, module, options, variant, backends, gate)
        self._loop: Any = trainer.fit_loop.epoch_loop.manual_optimization
        self._schedules = Schedules(trainer)

    def install(self) -> None:
        """Put the seam in."""
        self._compile()
        self._put(self._loop, "run", self._run)
        self._begin()

    @override
    def _begin(self) -> None:
        self._are_same: Callable[[], bool] = Checks(members_of(self._trainer.strategy, "_optimizers")).hold
        self._whole = self._make(self._body, self._owners({"step": self._loop.optim_step_progress}))
        self._whole.machine.refusals.escalates = lambda error: self._must_raise()

    @override
    def _end(self) -> None:
        # Where no others are made, no optimizers are the same.
        self._are_same = bool
        del self._whole

    def _run(self, kwargs: OrderedDict[str, Any]) -> Any:
        """In place of ``manual_optimization.run``."""
        if "batch" not in kwargs:
            self._refuse_fetching()
            return self._stock_run(kwargs)
        if not self._are_same() and not self._renew():
            return self._stock_run(self._on_device(kwargs))
        self._context = (None, self._trainer.fit_loop.epoch_loop.batch_idx, kwargs)
        self._schedules.start()
        result = self._through(self._whole, lambda: self._stock_run(self._on_device(kwargs)))
        self._look_at(self._whole)
        return result

    def _stock_run(self, kwargs: OrderedDict[str, Any]) -> Any:
        return type(self._loop).run(self._loop, kwargs)

    def _body(self, batch: Any, *facts: Any) -> dict[str, Any]:
        with self._schedules.noting() as stepped:
            out = self._in_step(self._stock_run, batch)
        return {**out, "scheduler steps": Stepped(stepped)}

    @override
    def _finish(self, out: dict[str, Any]) -> None:
        super()._finish(out)
        self._schedules.finish(out["scheduler steps"])
