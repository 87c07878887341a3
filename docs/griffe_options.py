"""What the API reference shows of functions that take options: a decorator makes their signatures and arguments."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

TAKING = ("takes", "takes_optionally")


class TakenOptions(griffe.Extension):
    """Gives what is decorated by one of :data:`TAKING` the parameters and the documentation that it has at run time."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """See :class:`griffe.Extension`."""
        if not any(str(decorator.value).partition("(")[0] in TAKING for decorator in func.decorators):
            return
        made = griffe.dynamic_import(func.path, import_paths=[])
        kinds = {kind.name.lower(): kind for kind in griffe.ParameterKind}
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    each.name,
                    annotation=None if each.annotation is each.empty else str(each.annotation),
                    kind=kinds[each.kind.name.lower()],
                    default=None if each.default is each.empty else repr(each.default),
                )
                for each in inspect.signature(made).parameters.values()
            )
        )
        shown = func.parent if func.name == "__init__" else func
        assert shown is not None
        of = made if shown is func else griffe.dynamic_import(shown.path, import_paths=[])
        shown.docstring = griffe.Docstring(inspect.getdoc(of) or "", parent=shown, parser=griffe.Parser.google)
