"""Validation, test and prediction steps as graphed steps, one for each hook, under the inference policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

from typing_extensions import override

from graphplan.callback.loop.seam import Seam
from graphplan.callback.patches import InstancePatch
from graphplan.step.gate import Gate
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.peers import find_peers

_ARGUMENTS = ("batch", "batch_idx", "dataloader_idx")


class EvaluationSeam(Seam):
    """The seam that replaces the strategy's evaluation steps. It stays for a whole run, also between validations."""

    called = ("validation_step", "test_step", "predict_step")

    @override
    def install(self) -> None:
        self._strategy: Any = self._trainer.strategy
        self._hook = ""
        self._by_hook: dict[str, tuple[InstancePatch, Gate | None]] = {}
        self._graphed: dict[str, GraphedStep] = {}
        for hook in self.called:
            gate = Gate.of(self._options, self._strategy.root_device, loops=False, peers=find_peers())
            self._by_hook[hook] = self.patches.method(self._strategy, hook, partial(self._run, hook)), gate

    def _run(self, hook: str, *args: Any) -> Any:
        """Run in place of the strategy's method ``hook``."""
        self._hook, kwargs = hook, OrderedDict(zip(_ARGUMENTS, args, strict=False))
        # A step that gets an iterator fetches its batches itself.
        if not args or isinstance(args[0], Iterator) or self._hooks_changed():
            return self._stock(kwargs)
        _, gate = self._by_hook[hook]
        if gate is not None and gate.eager is None:
            start = gate.begin()
            result = self._stock(kwargs)
            gate.end_eager(start)
            self._stock_stats.eager += 1
            return result
        if hook not in self._graphed:
            self._graphed[hook] = self._make(self._owners({}), gate)
        facts = kwargs.get("dataloader_idx"), self._trainer.sanity_checking
        return self._serve(self._graphed[hook], kwargs.get("batch_idx", 0), kwargs, *facts)

    @override
    def _hooked(self) -> list[Any]:
        return []

    @override
    def _remove_if_down(self, step: GraphedStep) -> None:
        """Restore Lightning's own method if its graphed step has stood down."""
        if step.is_down:
            self._by_hook[self._hook][0].remove()

    @override
    def _stock(self, kwargs: OrderedDict[str, Any]) -> Any:
        return getattr(type(self._strategy), self._hook)(self._strategy, *kwargs.values())
