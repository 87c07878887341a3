"""Functions that torch computes in another way within a dispatch mode, computed as in an eager step.

``matmul`` of two batches of matrices, one of which has a single matrix: torch multiplies by that matrix as a matrix,
in other rounding, if it requires a gradient or a dispatch mode is active, and else repeats it.

``svdvals`` and ``eigvalsh``: likewise, torch computes vectors with the values, by another algorithm.

``prod`` and ``cumprod``: in an eager step, torch reads on the host whether there are zeros, and uses another formula
then. A capture cannot read it. Within a dispatch mode, torch uses a formula for all values, which runs an operator for
each factor. Here both formulas are computed by torch's operators in torch's order, so that each element has the bits of
an eager step.

The formulas are ``prod_backward`` and ``cumprod_backward`` of torch's ``FunctionsManual.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from graphplan.observe.replacements import Replacements
from graphplan.tensors.attributes import PLAIN_KINDS

_FULL = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@contextmanager
def own_derivatives() -> Iterator[None]:
    """Use these functions for the code that runs in this thread."""
    _FUNCTIONS.enter(get_ident())
    try:
        yield
    finally:
        _FUNCTIONS.leave(get_ident())


IS_DERIVED_HERE = ContextVar("is_derived_here", default=False)
"""Whether the operator that runs has one of these derivatives."""


class _Derived(torch.autograd.Function):
    """A torch function with ``backward(grad, x, out)`` of this module; for double backward, torch's own derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plain: Callable[[Tensor], Tensor], backward: Callable[..., Tensor]) -> Tensor:
        token = IS_DERIVED_HERE.set(True)
        try:
            out = plain(x)
        finally:
            IS_DERIVED_HERE.reset(token)
        ctx.save_for_backward(x, out)
        ctx.plain, ctx.derive = plain, backward
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, out = ctx.saved_tensors
        if not torch.is_grad_enabled():
            # Under autocast, ``out`` was computed from a cast ``x``.
            return ctx.derive(grads[0], x.to(out.dtype), out), None, None
        (found,) = torch.autograd.grad(ctx.plain(x), x, grads[0], create_graph=True)
        return found, None, None


def _derive_cumprod(dim: int, grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    if x.shape[dim] == 1:
        return grad
    x, out, is_zero = x.conj(), out.conj(), x == 0
    # Kernels that the step has already loaded save a millisecond: no integers, and masks only in torch.where.
    zeros = is_zero.to(torch.float64 if x.dtype in (torch.float64, torch.complex128) else torch.float32).cumsum(dim)
    is_before, is_from_first = zeros == 0, zeros == 1
    before = torch.where(is_before, out * grad, 0.0).flip(dim).cumsum(dim).flip(dim).div(x)
    beyond = torch.where(is_zero, 1.0, torch.where(is_from_first, x, 1.0)).cumprod(dim)
    at_first = (beyond * torch.where(is_from_first, grad, 0.0)).sum(dim, keepdim=True) * _shifted(dim, out)
    return torch.where(is_before, before, torch.where(is_from_first, torch.where(is_zero, at_first, 0.0), 0.0))


def _shifted(dim: int, x: Tensor) -> Tensor:
    """Return ``x`` moved by one along ``dim``: a one, then all elements but the last."""
    return torch.cat([torch.ones_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)], dim)


def _derive_prod(dim: int, keepdim: bool, grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    if not keepdim:
        grad, out = grad.unsqueeze(dim), out.unsqueeze(dim)
    ahead, behind = _shifted(dim, x).cumprod(dim), _shifted(dim, x.flip(dim)).cumprod(dim).flip(dim)
    others = grad * (ahead * behind).conj() if x.shape[dim] > 1 else grad
    return torch.where((x == 0).any(), others, grad * (out / x).conj())


def _derive_product(grad: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """Return the gradient for the product of all elements."""
    rows = _derive_prod(0, False, grad, x.reshape(-1), out).view(x.shape)
    return torch.where((x == 0).sum() > 1, 0.0, rows)


def _is_derived(x: Any) -> bool:
    """Return True if this thread's step needs a gradient for ``x``, and uses neither functorch nor forward mode."""
    if get_ident() not in _FUNCTIONS.entered or type(x) not in PLAIN_KINDS or not torch.is_grad_enabled():
        return False
    is_plain = x.requires_grad and x.layout is torch.strided and x.dim() > 0 and x.numel() > 1
    return is_plain and not _is_transformed() and forward_ad._current_level < 0


def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _repeats(x: Any, y: Any) -> bool:
    """Return True if an eager ``x @ y`` repeats one matrix, where torch would fold the others within a mode."""
    if get_ident() not in _FUNCTIONS.entered or type(x) not in PLAIN_KINDS or type(y) not in PLAIN_KINDS:
        return False
    if not x.dim() == y.dim() == 3 or x.shape[0] == y.shape[0] or _is_transformed():
        return False
    are_plain = all(each.layout is torch.strided and not each.is_meta for each in (x, y))
    return are_plain and any(each.shape[0] == 1 and not each.requires_grad for each in (x, y))


def _matmul(plain: Any) -> Callable[..., Tensor]:
    @wraps(plain)
    def matmul(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 1 or kwargs or not _repeats(x, *args):
            return plain(x, *args, **kwargs)
        # With a further dimension, torch never folds. Like an eager product, the result is no view.
        out = plain(x.unsqueeze(0), args[0].unsqueeze(0))
        return torch.ops.aten._unsafe_view.default(out, out.shape[1:])

    return matmul


def _cumprod(plain: Any) -> Callable[..., Tensor]:
    @wraps(plain)
    def cumprod(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dim = args[0] if len(args) == 1 and not kwargs else kwargs.get("dim") if not args and len(kwargs) == 1 else None
        if type(dim) is not int or not _is_derived(x):
            return plain(x, *args, **kwargs)
        dim = range(x.dim())[dim]
        return _Derived.apply(x, lambda it: plain(it, dim), lambda *it: _derive_cumprod(dim, *it))

    return cumprod


def _prod(plain: Any) -> Callable[..., Tensor]:
    @wraps(plain)
    def prod(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
        dim, keepdim = given.get("dim"), given.get("keepdim", False)
        is_known = len(args) <= 2 and given.keys() <= {"dim", "keepdim"} and type(keepdim) is bool
        if not (is_known and _is_derived(x)) or (given and type(dim) is not int):
            return plain(x, *args, **kwargs)
        if type(dim) is not int:
            return _Derived.apply(x, plain, _derive_product)
        dim = range(x.dim())[dim]
        return _Derived.apply(x, lambda it: plain(it, dim, keepdim), lambda *it: _derive_prod(dim, keepdim, *it))

    return prod


def _values(plain: Any, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``plain``, or ``compute`` where an eager step computes no vectors."""

    @wraps(plain)
    def values(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_here = get_ident() in _FUNCTIONS.entered and type(x) in PLAIN_KINDS and not _is_transformed()
        # Autocast casts what is in half precision.
        if not is_here or "out" in kwargs or x.dtype not in _FULL or forward_ad._current_level >= 0:
            return plain(x, *args, **kwargs)
        has_derivative = x.requires_grad and torch.is_grad_enabled()
        return plain(x, *args, **kwargs) if has_derivative else compute(x, *args, **kwargs)

    return values


def _svdvals(x: Tensor, *, driver: str | None = None) -> Tensor:
    found: Tensor = torch.ops.aten._linalg_svd.default(x, False, False, driver=driver)[1]
    return found


def _eigvalsh(x: Tensor, UPLO: str = "L") -> Tensor:
    found: Tensor = torch.ops.aten._linalg_eigh.default(x, UPLO, False)[0]
    return found


def _find_functions() -> Iterator[tuple[Any, str, Any]]:
    base = torch._C.TensorBase
    yield from ((holder, "matmul", _matmul(vars(holder)["matmul"])) for holder in (torch, torch.linalg))
    yield from ((Tensor, name, _matmul(getattr(base, name))) for name in ("matmul", "__matmul__"))
    yield torch.linalg, "svdvals", _values(torch.linalg.svdvals, _svdvals)
    yield torch.linalg, "eigvalsh", _values(torch.linalg.eigvalsh, _eigvalsh)
    yield from ((torch, "cumprod", _cumprod(torch.cumprod)), (torch, "prod", _prod(torch.prod)))
    yield from ((Tensor, "cumprod", _cumprod(base.cumprod)), (Tensor, "prod", _prod(base.prod)))


_FUNCTIONS = Replacements(_find_functions)
