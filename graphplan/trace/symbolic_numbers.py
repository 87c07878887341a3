"""Stand-ins for owners' numbers while a step is traced or captured: see :mod:`graphplan.tensors.symbolic`."""

from __future__ import annotations

import gc
import math
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import get_ident
from types import CodeType, MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from graphplan.errors import CaptureError, HostScalarError
from graphplan.feed.signature import is_literal
from graphplan.observe.host_draws import DRAWN, Draw, HostDraws
from graphplan.observe.source import Source, find_source, with_users_line
from graphplan.owners.generators import PYTHONS
from graphplan.owners.slots import Item, Namespace, Scalar, Walk, item_by_attribute
from graphplan.owners.views import Attributes, CallNumbers, Cell, Inherited, Members, ReadOnly, attributes_of, home
from graphplan.tensors.deferred import NumberForm, form_of, in_order, value_of
from graphplan.tensors.symbolic import Question, SymbolicNumber, has_stand_ins
from graphplan.tensors.tables import Table
from graphplan.trace.changes import same_value
from graphplan.trace.host_reads import sums_otherwise

_LARGEST = torch.finfo(torch.float16).max
_FEW = 8
"""Maximum integers or items between which a draw may choose for each of them to be an execution path of its own."""


@dataclass(slots=True, eq=False)
class NumberTensor:
    """A scalar tensor that replays fill with the ``form`` of the numbers at ``paths``. It now holds ``held``."""

    tensor: Tensor
    form: NumberForm
    paths: tuple[str, ...]
    held: Any = None

    def fill(self, numbers: Mapping[str, Any]) -> None:
        """Fill it from ``numbers`` by path."""
        self.hold(self.form.compute([numbers[path] for path in self.paths]))

    def hold(self, value: Any) -> None:
        """Fill it with ``value``, unless it holds that already: a fill is a launch."""
        if not same_value(value, self.held):
            if isinstance(value, float) and abs(value) > _LARGEST:
                # Operators round numbers that are too large to infinity, where ``fill_`` would raise.
                value = torch.tensor(value, dtype=torch.float64).to(self.tensor.dtype).item()
            with torch.no_grad():
                self.tensor.fill_(value)
            self.held = value


class SymbolicNumbers:
    """A context that replaces owners' numbers by stand-ins.

    Args:
        places: the places of the numbers, by path: see :func:`may_be_symbolic`.
        device: where the step computes.
        filled: for a capture: the tensors that hold numbers in the traced steps, which have been filled.
        expected: for a capture: the traced steps' draws from Python's and NumPy's generators.
        follows: the names of generators whose draws get stand-ins, too: replays draw again.
        questions: for a capture after a single trace: everything that the traced step has branched on.
        tables: the places of containers in which the step may look up numbers, as :meth:`Walk.tables` finds them.
        is_shared: whether other ranks take the same steps, where draws may give other numbers.
        may_fill: whether tensors can be filled while the step runs; else :attr:`pending` has what to fill.

    Attributes:
        asked: the conditions that the step has branched on, and the computed values that it has needed, with answers.
        needed: the numbers of the needed ones, and the line of code, in words.
        device: where the step computes, if that is known.
        used: the paths of numbers whose values code has needed, and where.
        needs: what needed the value, by path, if that is known.
        given: the tensors that the step got in place of numbers, by id.
        rewrites: whether an operator that no eager step runs works with one of these.
        touched: the paths of numbers that the step has compared or computed with.
        kinds: the classes of all numbers, and of truth values that count as asked, by path: code may check them.
        lies: by path, the first path of the same place, which names its stand-in, and whether an object or a subclass
            inherits the number from a class.
        counted: paths at which the step has left the previous integer plus a constant.
        draws: the draws of the step, in order; ``drawn`` has the numbers, by path; ``small_draws`` has the paths of
            draws among few integers, each of which may be an execution path.
        deciding: the paths of numbers that are arguments of draws.
        refusal: the error if replays cannot do what the step does with a draw.
        unlike: the error if the captured step differs from the traced one. Code of the step may have caught it.
        indexing_code: code objects that have needed the value of a number as an index, by id.
        behind: the paths of properties with new values, since the step has changed the values they are computed from.
    """

    def __init__(
        self,
        places: Mapping[str, Scalar] = MappingProxyType({}),
        device: torch.device | None = None,
        *,
        filled: Sequence[NumberTensor] | None = None,
        expected: Sequence[Draw] | None = None,
        follows: Collection[str] = (),
        questions: Collection[Question] | None = None,
        tables: Sequence[tuple[Any, str, str]] = (),
        may_fill: bool = True,
        is_shared: bool = False,
    ) -> None:
        found = {path: item_by_attribute(place) for path, place in places.items() if may_be_symbolic(place)}
        self.lies = lies_of(found)
        self.places = {path: found[path] for path, (first, _) in self.lies.items() if path == first}
        self.asked: dict[Question, Any] = {}
        self.needed: dict[Question, str] = {}
        self.used: dict[str, Source] = {}
        self.needs: dict[str, str] = {}
        self.given: dict[int, NumberTensor] = {}
        self.rewrites = False
        self.kinds: dict[str, type] = {}
        self.touched: set[str] = set()
        self.counted: set[str] = set()
        self.device, self._is_final = device, filled is not None
        self._tensors = {(t.form.key, t.tensor.dtype, t.tensor.device): t for t in filled or ()}
        self.draws: list[Draw] = []
        self.drawn: dict[str, Any] = {}
        self.small_draws: set[str] = set()
        self.deciding: set[str] = set()
        self.pending: list[tuple[NumberTensor, Any]] = []
        self.refusal: HostScalarError | None = None
        self.unlike: CaptureError | None = None
        self.behind: set[str] = set()
        self._expected, self._follows, self.may_fill, self._is_shared = expected, follows, may_fill, is_shared
        self._questions, self.tables = questions, tables
        self.indexing_code: dict[int, CodeType] = {}
        self._made: list[weakref.ref[Any]] = []
        self._shown: dict[str, SymbolicNumber] = {}
        """Stand-ins for properties, by path. The classes do not hold them: only the garbage collector frees a class."""
        self._is_over = False
        self._thread, self._modes, self._functions = get_ident(), 0, 0

    def __enter__(self) -> SymbolicNumbers:
        self._modes, self._functions = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
        shown: dict[int, tuple[Any, dict[Any, str]]] = {}
        with ExitStack() as undo:
            # Read all numbers first: a property may compute one from a number that gets a stand-in.
            known = {path: place.get() for path, place in self.places.items()}
            for path, place in self.places.items():
                number = SymbolicNumber(self, known[path], path)
                self._made.append(weakref.ref(number))
                self.kinds[path] = number._kind
                container = _container_of(place)
                if container is None:
                    thing = place.container.thing
                    shown.setdefault(id(thing), (thing, {}))[1][place.key] = path
                    self._shown[path] = number
                else:
                    undo.callback(_take_back, container, place.key, number, known[path])
                    container[place.key] = number
            # An object may get a number of its own, which hides that of its class: each path needs its kind.
            self.kinds.update((path, self.kinds[first]) for path, (first, is_class) in self.lies.items() if is_class)
            undo.callback(self._shown.clear)
            for thing, paths in shown.values():
                undo.callback(setattr, thing, "__class__", type(thing))
                thing.__class__ = self._showing(type(thing), paths)
            shown.clear()
            self._put_tables(undo)
            if self._follows:
                undo.enter_context(HostDraws(self._draw))
            self._undo = undo.pop_all()
        return self

    def _put_tables(self, undo: ExitStack) -> None:
        for space, name, _ in self.tables:
            if type(space[name]) is Table:
                # Several entries may lead to one place.
                continue
            table = Table(space[name])
            self._made.append(weakref.ref(table))
            undo.callback(_take_back, space, name, table, space[name])
            space[name] = table

    def __exit__(self, *exc: object) -> None:
        self._is_over = True
        self._undo.close()
        if isinstance(exc[1], BaseException):
            _put_numbers(exc[1])
            # After an error, nothing else replaces the stand-ins that the step has left.
            for place in self.places.values():
                _put_number(_container_of(place), place.key)
        if self.unlike is not None and (exc[1] is None or isinstance(exc[1], Exception)):
            raise self.unlike from None

    def put_numbers(self, walk: Walk) -> None:
        """Put numbers in place of the stand-ins that a failed step has left in attributes, lists and groups."""
        for group in (group for optimizer in walk.optimizers.values() for group in optimizer.param_groups):
            for key in list(group):
                _put_number(group, key)
        for place in walk.scalars.values():
            _put_number(place.container, place.key)
        for items in walk.lists.values():
            for index in range(len(items)):
                _put_number(items, index)

    def _showing(self, kind: type, paths: Mapping[Any, str]) -> type:
        """Return a subclass of ``kind`` whose properties return stand-ins. ``paths`` are by property name."""
        space: dict[str, Any] = {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        for name, path in paths.items():
            space[name] = property(self._getter(getattr(kind, name), path, self._shown[path]._known))
        return type(kind)(kind.__name__, (kind,), space)

    def _getter(self, plain: Any, path: str, known: Any) -> Callable[[Any], Any]:

        def get(thing: Any) -> Any:
            now = plain.__get__(thing)
            if type(now) is SymbolicNumber:
                # The property is computed from a number that has a stand-in, too.
                return now
            if same_value(now, known):
                return self._shown[path]
            self.behind.add(path)
            self._note_use(path)
            return now

        return get

    @property
    def are_there(self) -> bool:
        """Whether the step has got any stand-ins."""
        return bool(self.places or self.draws)

    def _draw(self, generator: str, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Draw for the step. Return a stand-in for the number if replays can draw it again."""
        for argument in (*args, *kwargs.values()):
            nodes = in_order(argument) if type(argument) is SymbolicNumber else ()
            self.deciding |= {node._source for node in nodes if node._source is not None}
        args, kwargs = tuple(map(value_of, args)), {name: value_of(value) for name, value in kwargs.items()}
        if function.__name__ == "choice" and generator in self._follows and _are_few(args):
            # ``choice`` makes the same draw to take an item.
            return args[0][self._draw(generator, function.__self__.randrange, (len(args[0]),), {})]  # type: ignore[attr-defined]
        value = function(*args, **kwargs)
        is_number = has_stand_ins(type(value))
        if generator not in self._follows or not is_number or not is_literal((*args, *kwargs.values())):
            return value
        path = f"{DRAWN}{len(self.draws) + 1}, {function.__name__}()"
        draw = Draw(path, generator, f"{args} {kwargs}", function, args, kwargs)
        if self._expected is not None and draw not in self._expected[len(self.draws) :][:1]:
            self._differ(f"draws {path} at {find_source()}, which the traced steps did not")
        self.draws.append(draw)
        self.drawn[path] = value
        # Only Python's randint draws its upper bound, too.
        is_closed = function.__name__ == "randint" and generator == PYTHONS
        if function.__name__ in ("randint", "randrange") and not kwargs and _outcomes(args) + is_closed <= _FEW:
            self.small_draws.add(path)
        number = SymbolicNumber(self, value, path)
        self._made.append(weakref.ref(number))
        return number

    def _differ(self, what: str) -> NoReturn:
        """End the capture with an error that says ``what`` the step does."""
        self.unlike = self.unlike or CaptureError(f"the captured step {what}")
        raise self.unlike

    def _refuse_drawn(self, path: str, does: str) -> None:
        """Refuse a use of a random number that replays cannot repeat with another number."""
        self.touched.add(path)
        if self.refusal is None:
            where = with_users_line(find_source())
            self.refusal = HostScalarError(
                f"the step {does} a random number that Python draws ({path}), at {where}. Replays draw again and "
                "compute with the new number, but an index, a size or a text stays the traced one, and several ranks "
                "take one path. Draw with torch on the step's device, or draw before the step and pass the result as "
                "an argument. In a Trainer, run an environment that draws (reinforcement learning) in "
                "on_train_batch_start or in an IterableDataset",
                path=next(draw.generator for draw in self.draws if draw.path == path),
            )

    def ask(self, question: Question, answer: Any) -> None:
        """Record that the step depends on the answer."""
        drawn = next((path for path in question.paths if path in self.drawn), None)
        if drawn is not None and self._is_shared:
            self._refuse_drawn(drawn, "branches on")
        elif self._is_in_step():
            if self._questions is not None and question not in self._questions:
                self._differ(
                    f"branches on {' and '.join(question.paths)} at {find_source()}, otherwise than the traced step "
                    "did; compare the same numbers in the same way in each step"
                )
            if question.needs_value and question not in self.asked:
                self.needed[question] = f"{' and '.join(question.paths)} at {with_users_line(find_source())}"
            self.asked[question] = answer
            self.touched.update(question.paths)

    def look_up(self, code: CodeType) -> None:
        """Record that ``code`` needs the value of a number as an index."""
        if self._is_in_step():
            self.indexing_code[id(code)] = code

    def touch(self, number: SymbolicNumber) -> None:
        """Record that code computes with the number."""
        if number._source is not None:
            self.touched.add(number._source)

    def use(self, number: SymbolicNumber, needs: str = "") -> None:
        """Record that code needs the value; ``needs`` says for what."""
        for node in in_order(number):
            if node._source is not None:
                self._note_use(node._source, needs)

    def _note_use(self, path: str, needs: str = "") -> None:
        if path in self.drawn:
            self._refuse_drawn(path, "needs the value of")
        elif path not in self.used and self._is_in_step():
            self.used[path] = with_users_line(find_source())
            self.needs[path] = needs
            self.touched.add(path)

    def told(self, path: str) -> str:
        """Return a ``path`` of :attr:`used`, and where its value is used, for a message."""
        return f"{path} at {self.used[path]}"

    def _is_in_step(self) -> bool:
        """Return True in the step: in the thread that entered this, or in autograd's, which Python does not know."""
        own = get_ident()
        return not self._is_over and (own == self._thread or all(own != other.ident for other in threading.enumerate()))

    def is_summed(self) -> bool:
        """Return True if ``sum()`` is adding the numbers, and rounds differently from ``+``."""
        return sums_otherwise()

    def may_fail(self) -> bool:
        """Return False: replays do not repeat computations that may raise an exception."""
        return False

    def tensor_of(
        self, number: SymbolicNumber, dtype: torch.dtype, device: torch.device, *, is_operand: bool = False
    ) -> Tensor | None:
        """Return a scalar tensor that holds the value in every step; None if the step computes elsewhere.
        ``is_operand``: an eager step calls the same operator with the number.
        """
        self.rewrites |= not is_operand
        if self.device is None or device.type != self.device.type or self.is_seen():
            return None
        form, paths = form_of(number)
        found = self._tensors.get((form.key, dtype, device))
        if found is None and self._is_final:
            self._differ(
                f"uses a number as a tensor at {find_source()}, which the traced steps did not; compute it in the "
                "same way in each step, or keep it in a tensor of an owner"
            )
        if found is None:
            with torch.inference_mode(False), _disable_current_modes():
                found = NumberTensor(torch.zeros((), dtype=dtype, device=device), form, tuple(paths))
            self._tensors[form.key, dtype, device] = found
        is_drawn = not self.drawn.keys().isdisjoint(found.paths)
        if not self.may_fill and is_drawn:
            self.pending.append((found, number._known))
        elif is_drawn or not self._is_final:
            try:
                with _disable_current_modes():
                    found.hold(number._known)
            except (RuntimeError, OverflowError):
                # The operator raises the same error if it gets the number itself.
                return None
        self.given[id(found.tensor)] = found
        return found.tensor

    @property
    def may_be_there(self) -> bool:
        """Whether code may get stand-ins: for owners' numbers, or for draws."""
        return bool(self.places or self._follows)

    def is_seen(self) -> bool:
        """Return True if other code of the step would see a tensor where it expects a number: in modes, and in hooks on
        saved tensors, which autograd does not call for numbers.
        """
        is_in_mode = torch._C._len_torch_dispatch_stack() > self._modes
        is_in_mode |= torch._C._len_torch_function_stack() > self._functions
        return is_in_mode or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None

    def tracks(self, path: str) -> bool:
        """Return True if a stand-in has recorded all that code has done with the number at ``path``."""
        path = self.lies.get(path, (path,))[0]
        return path in self.kinds and path not in self.used

    def ask_truth(self, path: str, value: bool) -> None:
        """Count the truth value at ``path`` as asked: it has two values only."""
        self.kinds[path] = bool
        self.asked[Question.about(path)] = value

    def settle(self, path: str, number: Any, own: Any) -> Any:
        """Return how the number that the step has left at ``path`` is computed, or the number itself if it is the
        previous integer plus a constant. ``own`` is the object that was there before, or None.
        """
        form, paths = form_of(number, own)
        if paths == [path] and len(form) > 1 and number._kind is self.kinds.get(path) is int and _counts(form):
            self.counted.add(path)
            return number._known
        return form

    def are_over(self) -> bool:
        """Return True if nothing refers to a stand-in any more."""
        if any(number() is not None for number in self._made):
            gc.collect(1)
        return all(number() is None for number in self._made)


def _are_few(args: tuple[Any, ...]) -> bool:
    """Return True if ``random.choice`` takes one of a few items."""
    return len(args) == 1 and type(args[0]) in (list, tuple) and 0 < len(args[0]) <= _FEW


def _outcomes(args: tuple[Any, ...]) -> float:
    """Return how many integers are from the lower bound to below the upper one; infinity if a bound is no integer."""
    low, high = (0, *args) if len(args) == 1 else args if len(args) == 2 else (None, None)
    return high - low if type(low) is type(high) is int else math.inf


def _counts(form: NumberForm) -> bool:
    """Return True if an integer's form only adds or subtracts constants."""
    steps = form[1:]
    is_chain = all(operands[0] == number and type(operands[0]) is not int for number, (_, operands) in enumerate(steps))
    constants = (type(operands[1]) is int for _, operands in steps if len(operands) == 2)
    functions = {function for function, _ in steps}
    return functions <= {operator.add, operator.sub} and is_chain and all(constants)


def may_be_symbolic(place: Scalar) -> bool:
    """Return True if a stand-in can be put at ``place``: an attribute of an object or a class that can be assigned, a
    property, a variable, or an item in a list or dictionary that one of these holds.
    """
    if type(item_by_attribute(place)) is Item:
        return True
    if isinstance(place.owner, Namespace) or place.name or place.others or isinstance(place.container, Members):
        return _container_of(place) is not None
    if place.key != place.attribute:
        return False
    if _container_of(place) is not None:
        return True
    thing = place.container.thing if type(place.container) in (ReadOnly, CallNumbers) else None
    return isinstance(getattr(type(thing), str(place.key), None), property)


def lies_of(places: Mapping[str, Scalar]) -> dict[str, tuple[str, bool]]:
    """Return, for each of ``places``, the first path of the same place, and whether it is inherited from a class."""
    first: dict[tuple[int, Any], str] = {}
    names = {path: first.setdefault(_identity(item_by_attribute(place)), path) for path, place in places.items()}
    return {path: (name, type(places[path].container) is Inherited) for path, name in names.items()}


def _identity(place: Scalar) -> tuple[int, Any]:
    container = _container_of(place)
    return id(place.container.thing if container is None else home(container)), place.key


def _container_of(place: Scalar) -> Any:
    """Return the object's dictionary for an attribute, or the container of an item; None for a property."""
    container = place.container
    if type(container) in (ReadOnly, CallNumbers):
        inner = attributes_of(container.thing)
        return inner if inner is not None and place.key in inner else None
    if type(place) is Item:
        return place.items
    if isinstance(container, Members):
        # A metaclass may run code of its own when an attribute is set.
        return container if type(container.kind).__setattr__ is type.__setattr__ else None
    if isinstance(container, (Attributes, Cell)):
        return container
    is_named = isinstance(place.owner, Namespace) or place.name is not None or bool(place.others)
    is_own = container is attributes_of(place.owner) or (is_named and type(container) in (dict, list))
    return container if is_own else None


def _put_number(container: Any, key: Any) -> None:
    with suppress(LookupError, TypeError, AttributeError):
        held = container[key]
        if any(type(leaf) is SymbolicNumber for leaf in pytree.tree_leaves(held)):
            container[key] = pytree.tree_map_only(SymbolicNumber, lambda number: number._known, held)


def _put_numbers(error: BaseException | None) -> None:
    """Put numbers in place of stand-ins in an error of the step, and in the errors that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        args = [error.args]
        _put_number(args, 0)
        error.args = args[0]
        for name in vars(error):
            _put_number(vars(error), name)
        error = error.__cause__ or error.__context__


def _take_back(container: Any, key: Any, number: SymbolicNumber | Table, value: Any) -> None:
    with suppress(LookupError):
        if container[key] is number:
            container[key] = value
