"""A model, some of whose modules run eagerly, and whose other parts are programs."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from graphplan.errors import RefusalError, VerifyError
from graphplan.feed.signature import asks_for_gradients, flatten
from graphplan.inference.graphed import Graphed
from graphplan.inference.graphed_options import ServeOptions
from graphplan.inference.pieces.scopes import Pieces, name_of
from graphplan.inference.pieces.splitting import facts_of, match_modules, split
from graphplan.program.leases import StaticOutput
from graphplan.step.capture_sizes import distance, tolerance
from graphplan.tensors.trees import flatten_result


class SplitModel(Pieces):
    """See :func:`graphplan.piecewise`: a model whose modules named in ``at`` run eagerly."""

    def __init__(self, model: nn.Module, at: Sequence[str], scope: str, options: ServeOptions) -> None:
        self._names = match_modules(model, at)
        super().__init__(model, scope, options)
        self._model = model
        self._facts: list[Any] = []
        self._splits: dict[Hashable, tuple[fx.GraphModule, list[Graphed]]] = {}
        self._calls = 0
        self._next_check = options.step.schedule.after(0)
        if self.scope == "piecewise":
            self._note_eager()

    def _note_eager(self) -> None:
        self.reasons |= dict.fromkeys(self._names, "named in at")

    def _downgrade(self, error: RefusalError) -> None:
        super()._downgrade(error)
        self._note_eager()

    def _graphed(self) -> Iterator[Graphed]:
        for _, graphed in self._splits.values():
            yield from graphed

    def _call_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts = facts_of(self._model)
        if facts != self._facts:
            # Layers, numbers or flags that the pieces were made from are others now.
            self.close()
            self._splits.clear()
            self._facts = facts
        try:
            pieces = self._split(args, kwargs)
        except RefusalError as error:
            if not self._downgrades:
                raise
            self.reasons[name_of(self._model)] = str(error)
            self.scope = "none"
            return self._model(*args, **kwargs)
        self._calls += 1
        # torch.fx gives arguments that are settled other names, and leaves their order as it is.
        names = inspect.signature(pieces.forward).parameters
        result = pieces(**dict(zip(names, _bind(self._model, args, kwargs).values(), strict=True)))
        if self._calls == self._next_check and not any(asks_for_gradients(r) for _, r in flatten_result(result)[0]):
            self._check(result, args, kwargs)
        return result

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
        feed = flatten(args, kwargs)
        literals = {name: value for name, value in _bind(self._model, args, kwargs).items() if _is_literal(value)}
        key = (feed.key[0], tuple(literals.items()))
        if key not in self._splits:
            pieces, between = split(self._model, self._names, literals)
            options = replace(self._options, outputs="static", owners=None)
            graphed = []
            for name, part in between.items():
                piece = Graphed(part, options, self.pool)
                graphed.append(piece)
                pieces.add_module(name, _Called(piece))
            self._splits[key] = (pieces, graphed)
        return self._splits[key][0]

    def _check(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare with the model itself: its code may do what torch.fx does not see."""
        self._next_check = self._options.step.schedule.after(self._calls)
        found = [leaf for _, leaf in flatten_result(result)[0]]
        for (name, wanted), leaf in zip(flatten_result(self._model(*args, **kwargs))[0], found, strict=True):
            if not isinstance(wanted, Tensor):
                apart = 0.0 if wanted == leaf else float("inf")
            elif wanted.shape != leaf.shape or wanted.dtype != leaf.dtype:
                apart = float("inf")
            else:
                plain = leaf.plain() if isinstance(leaf, StaticOutput) else leaf
                apart = distance(wanted, plain)
            if not apart <= (tolerance(wanted.dtype) if isinstance(wanted, Tensor) else 0.0):
                raise VerifyError(
                    f"the pieces of {name_of(self._model)} do not come to what it comes to itself: {name} differs. Its "
                    "code does something that torch.fx does not see. List the pieces yourself: piecewise([…])",
                    result=wanted,
                )


class _Called(nn.Module):
    """A graphed piece in its place in a model."""

    def __init__(self, piece: Graphed) -> None:
        super().__init__()
        object.__setattr__(self, "piece", piece)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.piece(*args, **kwargs)  # type: ignore[operator]


def _bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _is_literal(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
