"""Validation, test and prediction steps, each a graphed step of its own under the inference policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from graphplan.callback.loop.seam import Run, Seam
from graphplan.specs.policy import Policy
from graphplan.specs.roles import Role
from graphplan.step.gate import Gate
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.peers import find_peers

_HOOKS = ("validation_step", "test_step", "predict_step")
_ARGUMENTS = ("batch", "batch_idx", "dataloader_idx")


class EvaluationSeam(Seam):
    """The seam of the strategy's evaluation steps. It stays for the whole of a run, from one validation to the next."""

    def __init__(self, run: Run) -> None:
        # State is static as well: metrics that a step updates are state.
        policy = run.options.policy or Policy("inference", static_roles=tuple(Role))
        options = replace(run.options, mode="inference", policy=policy, eager_if=None, shapes="exact", buckets=None)
        super().__init__(replace(run, options=options))
        self._strategy: Any = run.trainer.strategy
        self._gates: dict[str, Gate | None] = {}
        self._by_hook: dict[str, GraphedStep] = {}
        self._hook = ""

    @override
    def install(self) -> None:
        for hook in _HOOKS:
            self._put(self._strategy, hook, partial(self._run, hook))
            self._gates[hook] = Gate.of(self._options, self._strategy.root_device, loops=False, peers=find_peers())

    def _run(self, hook: str, *args: Any) -> Any:
        """In place of the strategy's method of that name."""
        self._hook, kwargs = hook, OrderedDict(zip(_ARGUMENTS, args, strict=False))
        # A step that gets an iterator takes batches from the loader itself.
        if not args or isinstance(args[0], Iterator) or self._has_other_optimizers():
            return self._stock(kwargs)
        gate = self._gates[hook]
        if gate is not None and gate.eager is None:
            start = gate.begin()
            result = self._stock(kwargs)
            gate.end_eager(start)
            self._stock_stats.eager += 1
            return result
        self._enter(kwargs.get("batch_idx", 0), kwargs)
        step = self._by_hook.get(hook)
        if step is None:
            step = self._by_hook[hook] = self._make(self._owners({}), gate)
        result = self._through(step, kwargs, (kwargs.get("dataloader_idx"), self._trainer.sanity_checking))
        self._look_at(step)
        return result

    @override
    def _look_at(self, step: GraphedStep) -> None:
        """Have Lightning's own method back where its step stands down."""
        if step.is_down:
            self._patches[_HOOKS.index(self._hook)].remove()

    @override
    def _stock(self, kwargs: OrderedDict[str, Any]) -> Any:
        return getattr(type(self._strategy), self._hook)(self._strategy, *kwargs.values())
