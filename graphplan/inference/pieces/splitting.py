"""A model taken apart at some of its modules: those, and what it computes before, between and after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from graphplan.errors import OptionError, SplitError

_FACTS = (bool, int, float, str, type(None), Tensor)


def match_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names of the modules that the patterns mean.

    Raises:
        OptionError: if one of the patterns means none.
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"at is {patterns!r}; expected a list of names of modules, such as ['blocks.*.attention']")
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise OptionError(
                f"at names {pattern!r}, and the {type(model).__name__} has no such module; expected one of: "
                f"{', '.join(names[:12])}"
            )
    matched = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    # A module within another that is matched too is a part of that one.
    return [name for name in matched if not any(name.startswith(f"{other}.") for other in matched)]


class _Tracer(fx.Tracer):
    def __init__(self, leaves: Sequence[str]) -> None:
        super().__init__()
        self._leaves = set(leaves)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)


def split(
    model: nn.Module, names: Sequence[str], literals: Mapping[str, Any]
) -> tuple[fx.GraphModule, dict[str, nn.Module]]:
    """The model as a module that calls its parts one after the other, and by name the parts that are not ``names``.

    ``literals`` are arguments that are no tensors: what the model does with them is settled here.

    Raises:
        SplitError: if torch.fx cannot follow the model's code.
    """
    tracer = _Tracer(names)
    try:
        graph = tracer.trace(model, concrete_args=dict(literals))
        whole = fx.GraphModule(tracer.root, graph)
    except Exception as error:
        raise SplitError(
            f"the {type(model).__name__} cannot be taken apart: torch.fx could not follow its code ({error}). Expected "
            "code without branches on tensors' values or sizes; list the pieces yourself: piecewise([first, second, …])"
        ) from error
    number = 0
    parts: dict[fx.Node, int] = {}
    cuts: set[int] = set()
    for node in whole.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.op == "call_module" and node.target in names:
            number += 1
            cuts.add(number)
            parts[node] = number
            number += 1
        else:
            parts[node] = number
    pieces = split_module(whole, model, lambda node: parts.get(node, 0))
    between = {
        name: part
        for name, part in pieces.named_children()
        if name.startswith("submod_") and int(name.removeprefix("submod_")) not in cuts
    }
    return pieces, between


def facts_of(model: nn.Module) -> list[Any]:
    """What a model was taken apart by: its modules, what lies in them, and the numbers and flags that they keep."""
    facts: list[Any] = []
    for module in model.modules():
        facts.append(id(module))
        facts += map(id, module._parameters.values())
        facts += map(id, module._buffers.values())
        facts += [
            id(value) if isinstance(value, Tensor) else value for value in vars(module).values() if _is_fact(value)
        ]
        facts += map(len, (module._forward_hooks, module._forward_pre_hooks))
    return facts


def _is_fact(value: Any) -> bool:
    return isinstance(value, _FACTS)
