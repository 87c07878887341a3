"""Intercept random numbers that a step draws from Python's and NumPy's generators while it is traced or recorded."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from sys import getrefcount
from threading import get_ident
from types import ModuleType
from typing import Any

from graphplan.observe.replacements import Replacements
from graphplan.owners.generators import NUMPYS, PYTHONS, HostGenerators

DRAWN = "draw "
"""Prefix of the paths of drawn numbers."""
_OF_PYTHON = (
    "betavariate", "choice", "expovariate", "gammavariate", "gauss", "lognormvariate", "normalvariate", "paretovariate",
    "randint", "random", "randrange", "triangular", "uniform", "vonmisesvariate", "weibullvariate",
)  # fmt: skip
_OF_NUMPY = (
    "beta", "binomial", "exponential", "gamma", "geometric", "laplace", "logistic", "lognormal", "normal", "poisson",
    "rand", "randint", "randn", "random", "random_sample", "standard_normal", "triangular", "uniform", "weibull",
)  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """One draw of a step. ``path`` identifies it; ``given`` are its arguments as text, in which 0.0 and -0.0 differ."""

    path: str
    generator: str
    given: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = field(compare=False)
    kwargs: Mapping[str, Any] = field(compare=False)

    def __call__(self) -> Any:
        """Draw again."""
        return self.function(*self.args, **self.kwargs)


class LookAhead:
    """The results of coming draws. While it is entered, :func:`peek` makes each draw at most once and moves the
    generators as it needs; on exit they are as before.
    """

    def __init__(self) -> None:
        self._before = HostGenerators(())
        self._names: set[str] = set()
        self._made: list[tuple[Draw, Any]] = []

    def __enter__(self) -> LookAhead:
        self._token = _AHEAD.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _AHEAD.reset(self._token)
        self._before.restore()

    def results(self, draws: Sequence[Draw]) -> dict[str, Any]:
        """Return what ``draws``, the next ones of their generators, would give, by path."""
        names = {draw.generator for draw in draws} | self._names
        known = [draw for draw, _ in self._made[: len(draws)]]
        if names != self._names or known != list(draws[: len(known)]):
            # Other draws than those made: begin again, with all generators that any of them uses.
            self._before.restore()
            self._before, self._names, self._made = HostGenerators(names), names, []
        try:
            for draw in draws[len(self._made) :]:
                self._made.append((draw, draw()))
        except BaseException:
            # The draw that failed may have moved its generator.
            self._before.restore()
            self._made = []
            raise
        return {draw.path: result for draw, result in self._made[: len(draws)]}


_AHEAD: ContextVar[LookAhead | None] = ContextVar("ahead", default=None)


def peek(draws: Sequence[Draw]) -> dict[str, Any]:
    """Return what ``draws`` would give now, by path. The generators do not move, or within :class:`LookAhead` move back
    at its end.
    """
    if not draws:
        return {}
    ahead = _AHEAD.get()
    if ahead is not None:
        return ahead.results(draws)
    with LookAhead() as ahead:
        return ahead.results(draws)


OnDraw = Callable[[str, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


class HostDraws:
    """A context manager: ``on_draw(generator, function, args, kwargs)`` returns each number that its thread draws."""

    def __init__(self, on_draw: OnDraw) -> None:
        self._on_draw, self._thread = on_draw, 0

    def __enter__(self) -> HostDraws:
        self._thread = get_ident()
        _FUNCTIONS.enter(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _FUNCTIONS.leave(self)


def _drawing(generator: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        watch = next((each for each in reversed(_FUNCTIONS.entered) if each._thread == get_ident()), None)
        return function(*args, **kwargs) if watch is None else watch._on_draw(generator, function, args, kwargs)

    return drawing


def _find_functions() -> Iterator[tuple[Any, str, Any]]:
    functions = list(_functions())
    if _other_references(functions) != _searched:
        _search(functions)
    for generator, name, function in functions:
        drawing = _drawing(generator, function)
        yield from ((module, name, drawing) for module in _holders(name, function))


def _functions() -> Iterator[tuple[str, str, Any]]:
    """Yield generator, name and function of each draw. Note the modules that define them."""
    # NumPy's legacy functions are in both modules.
    numpy = [sys.modules[name] for name in ("numpy.random", "numpy.random.mtrand") if name in sys.modules]
    for generator, homes, names in ((PYTHONS, [random], _OF_PYTHON), (NUMPYS, numpy, _OF_NUMPY)):
        _HOLDERS.update(dict.fromkeys(homes))
        for name in names if homes else ():
            function = vars(homes[0]).get(name)
            # A function that is no bound method may be the user's replacement.
            if callable(function) and getattr(function, "__self__", None) is not None:
                yield generator, name, function


def _holders(name: str, function: Any) -> list[ModuleType]:
    return [module for module in _HOLDERS if vars(module).get(name) is function]


def _other_references(functions: Sequence[tuple[str, str, Any]]) -> list[int]:
    """Return for each function the number of references to it that are in none of the known modules."""
    return [getrefcount(function) - len(_holders(name, function)) for _, name, function in functions]


def _search(functions: Sequence[tuple[str, str, Any]]) -> None:
    """Find all modules that hold one of the ``functions`` under its name, since code may have imported it."""
    names, wanted = {name for _, name, _ in functions}, {(name, id(function)) for _, name, function in functions}
    for module in list(sys.modules.values()):
        space = vars(module) if type(module) is ModuleType else {}
        if any((name, id(space[name])) in wanted for name in names & space.keys()):
            _HOLDERS[module] = None
    _searched[:] = _other_references(functions)


_HOLDERS: weakref.WeakKeyDictionary[ModuleType, None] = weakref.WeakKeyDictionary()
"""Modules that held such functions."""
_searched: list[int] = []
"""The other references after the last search in all modules, which takes 10 ms on an H200 host."""
_FUNCTIONS = Replacements(_find_functions)
