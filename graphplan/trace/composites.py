"""Dispatch modes that receive composite operators, masks in indices, and ``bincount`` in parts.

Composite operators (``narrow`` with a tensor, ``einsum``) are decomposed by autograd's dispatch key, before a dispatch
mode receives them. In inference mode, and with inference tensors, a mode receives them whole: their host reads would
not show, and autocast, which is off within a mode, would not apply to their parts.

A mask in an index becomes two operators: one finds the positions that it selects, the other one indexes with these.
The host read is then an operator of its own, whose results can be known before.

The length of the result of ``bincount`` depends on the largest input. With ``minlength``, it mostly is ``minlength``.
The call becomes a branch on whether all inputs lie below it, and an operator whose result has a fixed shape.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan.errors import Faults
from graphplan.observe.watching import Unwatched, is_kept_from_compiler
from graphplan.tensors.dtensors import is_imagined, is_wrapped
from graphplan.trace.batch_reads import Answer, BatchAnswers
from graphplan.trace.derivatives import own_derivatives
from graphplan.trace.operator_schemas import OperatorCall, schema_of

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_BINCOUNT: Any = torch.ops.aten.bincount.default
_FIND: Any = torch.ops.aten.nonzero_numpy.default
_VIEWS: Any = torch._C.DispatchKey.ADInplaceOrView
_AUTOCAST: dict[str, Any] = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that passes operators to :meth:`operate`, composites in parts; ``answers`` replaces reads."""

    def __init__(self, answers: BatchAnswers | None = None) -> None:
        super().__init__()
        self._answers = answers
        self._casts: dict[str, bool] = {}
        self._casting = ExitStack()
        self._depth = 0
        self.faults = Faults()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not is_kept_from_compiler(cls.__torch_dispatch__.__code__)

    def __enter__(self) -> Any:
        if not self._depth:
            if not torch.is_grad_enabled():
                # Casts of weights in the caller's cache are no part of the step, which may make its own casts if no
                # gradients flow out of it.
                torch.clear_autocast_cache()
            self._casts = {device: torch.is_autocast_enabled(device) for device in _AUTOCAST}
            self._casting.enter_context(_watching_autocast(self._casts))
            self._casting.enter_context(own_derivatives())
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._depth -= 1
        if not self._depth:
            self._casting.close()

    def takes(self, answer: Answer, call: OperatorCall) -> bool:
        """Return True if the call, a read of the batch, may be replaced by ``answer``."""
        return True

    @abstractmethod
    def operate(self, unwatched: Unwatched, call: OperatorCall) -> Any:
        """Run an operator with ``unwatched.run``: the step's watchers see nothing else that is done here."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and is_wrapped(types):
            return NotImplemented
        schema = schema_of(func)
        with Unwatched() as unwatched:
            call = OperatorCall(schema, args, kwargs or {})
            if schema.is_ignored or is_imagined():
                return unwatched.run(func, args, call.kwargs)
            if schema.is_composite and _comes_whole(call):
                with self, self._within(func):
                    return unwatched.run(func._op_dk, (_COMPOSITE, *args), call.kwargs)
            if func is _BINCOUNT and _has_bound(call):
                with self:
                    counts = unwatched.run(_count_below, args, call.kwargs)
                if counts is not None:
                    return counts
            try:
                if self.casts_within(call):
                    with _as_outside(func, self._casts):
                        return self._dispatch(unwatched, call)
                masks = call.masks() if schema.may_synchronize else ()
                if masks:
                    finds = (OperatorCall(schema_of(_FIND), (mask,), {}) for mask in masks)
                    call = call.with_positions([self._dispatch(unwatched, find) for find in finds])
                return self._dispatch(unwatched, call)
            except Exception as error:  # noqa: BLE001 - the step goes on
                out = unwatched.result_despite(error, func, args, kwargs or {})
                self.faults.note(error)
                return out

    def casts_within(self, call: OperatorCall) -> bool:
        """Return True if the operator runs others for which autocast casts: it must be on, as outside the mode."""
        return call.schema.casts_within and any(self._casts.values())

    @contextmanager
    def _within(self, func: Any) -> Iterator[None]:
        """Run the parts of ``func`` as outside the mode. Autocast casts for an operator or for its parts, not both."""
        outside = self._casts
        self._casts = {device: on and not _has_kernel(func, _AUTOCAST[device].name) for device, on in outside.items()}
        try:
            with _as_outside(func, self._casts):
                yield
        finally:
            self._casts = outside

    def _dispatch(self, unwatched: Unwatched, call: OperatorCall) -> Any:
        answer = None if self._answers is None else self._answers.take(call)
        if answer is None or not self.takes(answer, call):
            return self.operate(unwatched, call)
        return self.operate(unwatched, answer.call) if answer.call is not None else answer.value


def _has_kernel(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _has_bound(call: OperatorCall) -> bool:
    """Return True if ``bincount`` counts integers without weights, and has a ``minlength``."""
    numbers: Tensor = call.args[0]
    weights, minlength = call.given(1), call.given(2)
    is_plain = numbers.dim() == 1 and not numbers.is_floating_point() and numbers.dtype != torch.bool
    return is_plain and weights is None and bool(minlength)


def _count_below(numbers: Tensor, weights: None = None, minlength: int = 0) -> Tensor | None:
    """Return ``torch.bincount(numbers, minlength=minlength)`` if ``numbers`` lie in ``range(minlength)``; else None.

    This uses no composite operators, since a mode would receive these whole here.
    """
    are_below = ((numbers >= 0) & (numbers < minlength)).all()
    if not torch.ops.aten._local_scalar_dense.default(are_below):
        return None
    counts = torch.zeros(minlength, dtype=torch.int64, device=numbers.device)
    if numbers.dtype != torch.int64:
        numbers = torch.ops.aten._to_copy.default(numbers, dtype=torch.int64)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))


def _comes_whole(call: OperatorCall) -> bool:
    """Return True if torch does not decompose a composite operator with these arguments."""
    return torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in call.tensors())


@contextmanager
def _watching_autocast(casts: dict[str, bool]) -> Iterator[None]:
    """Keep the step's autocast settings in ``casts``: within a mode, torch reports that autocast is off."""
    set_enabled: Any = torch.set_autocast_enabled

    @wraps(set_enabled)
    def set_autocast_enabled(*args: Any) -> None:
        set_enabled(*args)
        device, enabled = args if len(args) > 1 else ("cuda", *args)
        casts[device] = bool(enabled)

    space = vars(torch)
    space["set_autocast_enabled"] = set_autocast_enabled
    try:
        yield
    finally:
        space["set_autocast_enabled"] = set_enabled


@contextmanager
def _as_outside(func: Any, casts: dict[str, bool]) -> Iterator[None]:
    """Run parts of ``func`` with autocast and view tracking as outside the mode: these decide how ``matmul`` folds."""
    keys = [key for device, key in _AUTOCAST.items() if casts.get(device)]
    # If torch marks the result of the whole operator as a view, it does not mark those of its parts.
    keys += [] if _has_kernel(func, _VIEWS.name) else [_VIEWS]
    off = [key for key in keys if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in off:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in off:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
