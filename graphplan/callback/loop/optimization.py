"""Lightning's optimization of one batch, run through a graphed step. The step is the whole ``training_step`` in manual
optimization, and ``automatic_optimization.run`` in automatic optimization. If the optimizer cannot be captured, the
step is the closure (forward, ``zero_grad``, backward), and Lightning's own code clips gradients and steps after it.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from typing_extensions import override

from graphplan.callback.loop.schedules import Schedules
from graphplan.callback.loop.seam import NAME, Seam
from graphplan.callback.trainer_state import group_numbers
from graphplan.errors import RefusalError
from graphplan.step.runner import ADVICE
from graphplan.tensors.trees import Literals


class ManualSeam(Seam):
    """The seam that replaces ``manual_optimization.run``."""

    @override
    def install(self) -> None:
        self._compile()
        self._epoch_loop: Any = self._trainer.fit_loop.epoch_loop
        self._loop: Any = self._epoch_loop.manual_optimization
        self._schedules = Schedules(self._trainer)
        self.patches.method(self._loop, "run", self._run)
        self._step = self._make(self._owners({"step": self._loop.optim_step_progress}))

    def _run(self, kwargs: OrderedDict[str, Any]) -> Any:
        """Run in place of ``manual_optimization.run``."""
        if self._hooks_changed():
            return self._stock(self._on_device(kwargs))
        self._schedules.start()
        return self._serve(self._step, self._epoch_loop.batch_idx, kwargs)

    @override
    def _stock(self, kwargs: OrderedDict[str, Any]) -> Any:
        return type(self._loop).run(self._loop, kwargs)

    @override
    def _body(self, batch: Any, *facts: Any) -> dict[str, Any]:
        with self._schedules.noting() as stepped:
            out = super()._body(batch)
        return {**out, "scheduler steps": Literals(stepped)}

    _body.__qualname__ = NAME

    @override
    def _finish(self, out: dict[str, Any]) -> None:
        super()._finish(out)
        self._schedules.finish(out["scheduler steps"])


class ReplayedClosure(Closure):
    """A Lightning closure that runs the graphed forward and backward without Lightning's own frames around them."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._result = self._step_fn()
        return self._result.loss


class AutomaticSeam(Seam):
    """The seam that replaces ``automatic_optimization.run``."""

    @override
    def install(self) -> None:
        self._compile()
        self._loop: Any = self._trainer.fit_loop.epoch_loop.automatic_optimization
        self.logs.loop = self._loop
        self.patches.method(self._loop, "run", self._run)
        self.patches.method(self._loop, "_optimizer_zero_grad", self._zero_grad)
        self._step = self._make(self._all_owners())
        if is_overridden("optimizer_step", self._module):
            name = type(self._module).__name__
            self._keep_optimizer_outside(f"{name}.optimizer_step is overridden, so it runs on the host for each step")
        elif not self._given.captures_optimizer:
            self._keep_optimizer_outside("components names only forward and backward")

    def _all_owners(self) -> dict[str, Any]:
        progress = self._loop.optim_progress.optimizer
        return self._owners({"step": progress.step, "zero_grad": progress.zero_grad})

    def _may_leave_out_optimizer(self, error: RefusalError) -> bool:
        return not self.part and self._given.components == "auto" and error.component == "optimizer"

    @override
    def _escalates(self, error: RefusalError) -> bool:
        return super()._escalates(error) or self._may_leave_out_optimizer(error)

    def _keep_optimizer_outside(self, reason: str) -> None:
        """Switch to the components form: replay forward and backward alone, and step the optimizer eagerly."""
        self.notes.append(f"optimizer runs eagerly after the replay of forward and backward: {reason}")
        optimizer = self._trainer.optimizers[0]
        owners = {name: owner for name, owner in self._all_owners().items() if owner is not optimizer}
        self._step.close()
        self.part = "forward and backward alone"
        self._step = self._make(owners | group_numbers(optimizer))
        self.patches.method(self._loop, "_make_closure", self._make_closure)

    def _run(self, optimizer: Any, batch_idx: int, kwargs: OrderedDict[str, Any]) -> Any:
        """Run in place of ``automatic_optimization.run``."""
        run = partial(type(self._loop).run, self._loop, optimizer, batch_idx)
        if self._hooks_changed() or self._loop._skip_backward:
            return run(self._on_device(kwargs))
        if not self.part:
            try:
                return self._serve(self._step, batch_idx, kwargs, *self._given_facts(batch_idx))
            except RefusalError as error:
                if not self._may_leave_out_optimizer(error):
                    raise
                self._keep_optimizer_outside(str(error).removesuffix(f". {ADVICE}"))
        # The graphed forward moves its batch to the device itself.
        result = run(kwargs)
        self._remove_if_down(self._step)
        return result

    @override
    def _stock(self, kwargs: OrderedDict[str, Any]) -> Any:
        """Run the whole optimization, or Lightning's own closure in the components form."""
        kind, optimizer = type(self._loop), self._trainer.optimizers[0]
        if not self.part:
            return kind.run(self._loop, optimizer, self._index, kwargs)
        closure: Closure = kind._make_closure(self._loop, kwargs, optimizer, self._index)
        closure()
        return closure.consume_result().asdict()

    def _given_facts(self, batch_idx: int) -> tuple[Any, ...]:
        """Return the values on which Lightning's own code in the step branches."""
        trainer = self._trainer
        divisor, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
        is_first = batch_idx % divisor == 0
        accumulates = divisor != 1 and trainer.fit_loop._should_accumulate()
        kind = clip and getattr(trainer.gradient_clip_algorithm, "value", None)
        return is_first, accumulates, divisor, clip, kind

    def _zero_grad(self, batch_idx: int, optimizer: Any) -> None:
        """Run in place of ``_optimizer_zero_grad``. In a trace, the module's hook gets stand-ins for the numbers."""
        args = (self._arguments.epoch, self._arguments.batch_idx, optimizer)
        call._call_lightning_module_hook(self._trainer, "optimizer_zero_grad", *args)
        self._loop.optim_progress.optimizer.zero_grad.increment_completed()

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        """Run in place of ``automatic_optimization._make_closure`` in the components form."""
        if self._loop._skip_backward:
            return type(self._loop)._make_closure(self._loop, kwargs, optimizer, batch_idx)
        return ReplayedClosure(partial(self._run_closure, kwargs, batch_idx))

    def _run_closure(self, kwargs: OrderedDict[str, Any], batch_idx: int) -> ClosureResult:
        out = self._through(self._step, batch_idx, kwargs, *self._given_facts(batch_idx))
        result = ClosureResult(closure_loss=None, extra={key: value for key, value in out.items() if key != "loss"})
        result.loss = out.get("loss")
        return result
