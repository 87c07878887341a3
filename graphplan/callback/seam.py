"""The step seam: Lightning's automatic optimization, run through a graphed step.

Two forms. *Whole*: the bound ``automatic_optimization.run`` becomes one graphed step, optimizer included. *Components*:
where the optimizer cannot be captured or must run on the host, only the closure (forward, zero_grad, backward) is a
graphed step, and Lightning's own code clips and steps after it. Everything is set on instances and taken off again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch.utils import _pytree as pytree

from graphplan.callback.gates import hooked_callbacks
from graphplan.callback.logs import LogNotes, with_logs
from graphplan.callback.numbers import WatchedIndex, trainer_numbers, unwatch
from graphplan.compiler import is_allowed
from graphplan.errors import HostScalarError, RefusalError
from graphplan.owners import Via
from graphplan.plan import Plan
from graphplan.policy import Policy
from graphplan.stats import Stats
from graphplan.step import GraphedStep, Options
from graphplan.tracer import find_source, refuse_trace

_OWN_EFFECTS = ("model._current_fx_name", "model._metric_attributes", "optimizer._opt_called", "optimizer._step_count")
"""Bookkeeping of Lightning's and torch's own that no step depends on."""


def _refuse_index() -> None:
    refuse_trace(
        HostScalarError,
        f"the step computes with batch_idx at {find_source()}, which differs for each batch; a replay would keep one "
        "value. Move that code to on_train_batch_end, pass eager_if= for the batches that are meant to run it, or "
        "allow=('batch_idx',) if the step's results do not depend on it",
    )


class _ReplayedClosure:
    """Stands where Lightning expects its closure: calling it runs the graphed forward and backward."""

    def __init__(self, run: Callable[[], ClosureResult]) -> None:
        self._run = run
        self._result: ClosureResult | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._result = self._run()
        return self._result.loss

    def consume_result(self) -> ClosureResult:
        """The last result, once."""
        assert self._result is not None
        result, self._result = self._result, None
        return result


class StepSeam:
    """One fit's seam. ``install`` and ``remove`` are inverse; ``stats`` outlives both."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        policy: Policy,
        backend: str,
        warmup_steps: int,
        raises: bool,
        allow: Sequence[str],
        eager_if: Callable[[Any, int], bool] | int | None,
        prepare_optimizers: bool,
        verify: str | int | None,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._options = Options(
            policy=policy,
            backend=backend,
            warmup_steps=warmup_steps,
            on_failure="raise" if raises else "eager",
            allow=(*_OWN_EFFECTS, *allow),
            prepare_optimizers=prepare_optimizers,
            verify=verify,
            eager_if=self._asks_eager if eager_if is not None else None,
        )
        self._raises = raises
        self._warmup_steps = warmup_steps
        self._eager_if = eager_if
        self._watches_index = eager_if is None and not is_allowed("batch_idx", allow)
        self._logs = LogNotes(trainer)
        self._optimizer = trainer.optimizers[0]
        self._steps: list[GraphedStep] = []
        self._components: GraphedStep | None = None
        self._context: tuple[Any, int, OrderedDict[str, Any]] | None = None
        self.notes: list[str] = []
        self._whole = self._make(self._whole_body, self._owners())

    def _owners(self) -> dict[str, Any]:
        owners: dict[str, Any] = {"model": self._module, "optimizer": self._trainer.optimizers[0]}
        progress = self._loop.optim_progress.optimizer
        for name, part in (("step", progress.step), ("zero_grad", progress.zero_grad)):
            for count in ("total", "current"):
                owners[f"progress.{name}.{count}"] = Via(getattr(part, count), "optim_progress")
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            owners["scaler"] = scaler
        return owners | trainer_numbers(self._trainer) | hooked_callbacks(self._trainer)

    def _make(self, body: Callable[..., Any], owners: dict[str, Any]) -> GraphedStep:
        step = GraphedStep(body, owners, self._options)
        self._steps.append(step)
        return step

    def install(self) -> None:
        """Put the seam in."""
        self._whole.decide_refusals(lambda error: error.component == "optimizer" or self._must_raise())
        self._loop.run = self._run

    def remove(self) -> None:
        """Take everything off again, and put the optimizer's flags back."""
        for name in ("run", "_make_closure"):
            vars(self._loop).pop(name, None)
        for step in self._steps:
            step.close()

    @property
    def stats(self) -> Stats:
        """Counts of the fit so far."""
        total = Stats()
        for step in self._steps:
            total.merge(step.stats)
        return total

    @property
    def plans(self) -> int:
        """Plans that were captured."""
        return sum(step.stats.captured - step.stats.recaptured for step in self._steps)

    @property
    def plan(self) -> Plan | None:
        """The latest plan."""
        return next((step.plan for step in reversed(self._steps) if step.plan is not None), None)

    def report_notes(self) -> list[str]:
        """Facts for the report: what was prepared, what runs on the host and why."""
        prepared = [f"prepared: {change}" for step in self._steps for change in step.prepared]
        return [*prepared, *self.notes]

    def _must_raise(self) -> bool:
        return self._raises and all(step.stats.replayed == 0 for step in self._steps)

    def keep_optimizer_outside(self, reason: str) -> None:
        """Go over to the components form."""
        self.notes.append(f"optimizer runs eagerly after the replay of forward and backward: {reason}")
        owners = {name: owner for name, owner in self._owners().items() if name != "optimizer"}
        self._whole.close()
        self._components = self._make(self._closure_body, owners)
        self._components.decide_refusals(lambda error: self._must_raise())
        self._loop._make_closure = self._make_closure

    def _asks_eager(self, *args: Any) -> bool:
        assert self._context is not None
        _, batch_idx, kwargs = self._context
        if callable(self._eager_if):
            return bool(self._eager_if(next(iter(kwargs.values())), batch_idx))
        assert self._eager_if is not None
        return batch_idx % self._eager_if == 0

    def _run(self, optimizer: Any, batch_idx: int, kwargs: OrderedDict[str, Any]) -> Any:
        """In place of ``automatic_optimization.run``."""
        if self._loop._skip_backward or "batch" not in kwargs or optimizer is not self._optimizer:
            return self._stock_run(optimizer, batch_idx, kwargs)
        self._context = (optimizer, batch_idx, kwargs)
        if self._components is None:
            try:
                return self._through(self._whole)
            except RefusalError as error:
                if error.component != "optimizer":
                    raise
                self.keep_optimizer_outside(str(error))
        return self._stock_run(optimizer, batch_idx, kwargs)

    def _stock_run(self, optimizer: Any, batch_idx: int, kwargs: OrderedDict[str, Any]) -> Any:
        return type(self._loop).run(self._loop, optimizer, batch_idx, kwargs)

    def _through(self, step: GraphedStep) -> Any:
        """Run the current batch through ``step``; log what it logged."""
        assert self._context is not None
        _, batch_idx, kwargs = self._context
        last_hook = self._logs.last_hook()
        trainer = self._trainer
        divisor, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
        accumulates = trainer.fit_loop._should_accumulate()
        variant = (batch_idx % divisor == 0, accumulates, divisor, clip, str(trainer.gradient_clip_algorithm))
        out = step(kwargs["batch"], variant)
        if out["logs"]:
            self._logs.carry_out(out["logs"], last_hook)
        return pytree.tree_map_only(WatchedIndex, WatchedIndex.plain, out["result"])

    def _batch_kwargs(self, batch: Any) -> OrderedDict[str, Any]:
        assert self._context is not None
        kwargs = OrderedDict(self._context[2])
        kwargs["batch"] = batch
        if "batch_idx" in kwargs and self._watches_index:
            kwargs["batch_idx"] = WatchedIndex(kwargs["batch_idx"], _refuse_index)
        return kwargs

    def _whole_body(self, batch: Any, variant: Any) -> dict[str, Any]:
        assert self._context is not None
        optimizer, batch_idx, _ = self._context
        kwargs = self._batch_kwargs(batch)
        out = with_logs(self._logs, lambda: self._stock_run(optimizer, batch_idx, kwargs))
        unwatch(self._module)
        return out

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        """In place of ``automatic_optimization._make_closure`` in the components form."""
        if self._loop._skip_backward or self._components is None:
            return type(self._loop)._make_closure(self._loop, kwargs, optimizer, batch_idx)
        return _ReplayedClosure(self._run_components)

    def _run_components(self) -> ClosureResult:
        assert self._components is not None
        out = self._through(self._components)
        result = ClosureResult(closure_loss=None, extra={key: value for key, value in out.items() if key != "loss"})
        result.loss = out.get("loss")
        return result

    def _closure_body(self, batch: Any, variant: Any) -> dict[str, Any]:
        assert self._context is not None
        optimizer, batch_idx, _ = self._context
        kwargs = self._batch_kwargs(batch)

        def body() -> dict[str, Any]:
            closure: Closure = type(self._loop)._make_closure(self._loop, kwargs, optimizer, batch_idx)
            closure()
            return closure.consume_result().asdict()

        out = with_logs(self._logs, body)
        unwatch(self._module)
        return out
