"""Steps that run compiled code, and ``compile=``. The tape records uncompiled operators, and refuses other bits."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from graphplan.effects.allowed import is_allowed
from graphplan.environment.devices import is_accelerator
from graphplan.errors import CaptureError, HostScalarError, HostSyncError, RefusalError
from graphplan.owners.discovery import names_in
from graphplan.owners.slots import Walk
from graphplan.owners.views import ReadOnly, attributes_of
from graphplan.plan.plan import Plan
from graphplan.tensors.copying import copy_all
from graphplan.tensors.trees import named_leaves
from graphplan.verify.compare import differing
from graphplan.verify.state import collect_tensors


def runs_compiled(walk: Walk, fn: Callable[..., Any]) -> bool:
    """Return True if an owner holds a compiled module or function, or if ``fn`` is one or its code names one."""
    return any(True for _ in _compiled(walk, fn))


def _compiled(walk: Walk, fn: Callable[..., Any]) -> Iterator[Any]:
    """Compiled code among the owners and the names in ``fn``, which become owners only after the first step."""
    yield from (optimizer for optimizer in walk.optimizers.values() if _compiles_itself(optimizer))
    # Leave out attributes of library objects: they may be properties, whose code may raise.
    held = (scalar.get() for scalar in walk.scalars.values() if not isinstance(scalar.container, ReadOnly))
    for value in [*walk.modules, *held, fn, *(value for _, value in names_in(getattr(fn, "__func__", fn)))]:
        if _is_compiled(value):
            yield value


def refuse_graphs_within(
    walk: Walk, fn: Callable[..., Any], device: torch.device | None, ran: Mapping[int, tuple[Any, str]] | None = None
) -> None:
    """Raise CaptureError if compiled code, held by an owner or ``ran`` before, captures CUDA graphs itself."""
    if device is None or not is_accelerator(device):
        return
    contexts = {**(ran or {})}
    for value in _compiled(walk, fn):
        original = getattr(value, "_orig_mod", None) or getattr(value, "_torchdynamo_orig_callable", None) or value
        contexts[id(value)] = _context_of(value), getattr(original, "__qualname__", type(original).__name__)
    for context, name in contexts.values():
        config = getattr(context, "compiler_config", None) or {}
        if config.get("triton.cudagraphs") or any("cudagraphs" in backend for backend in _backend_names(context)):
            raise CaptureError(
                f"torch.compile gave {name} CUDA graphs of its own (mode='reduce-overhead' or 'max-autotune', the "
                "option triton.cudagraphs, or backend='cudagraphs'), and a CUDA graph cannot contain others. Compile "
                "it with the default mode or mode='max-autotune-no-cudagraphs': its kernels become part of the step's "
                "one graph. Or pass backend='eager'"
            )


def _context_of(compiled: Any) -> Any:
    """The settings with which ``compiled`` was compiled: torch keeps them in a closure."""
    call = getattr(compiled, "_compiled_call_impl", None) or compiled
    get_config = getattr(call, "get_compiler_config", None)
    return None if get_config is None else inspect.getclosurevars(get_config).nonlocals.get("self")


def _backend_names(context: Any) -> Iterator[str]:
    """The names of the compiler's backend and of its wrappers: torch wraps a backend several times."""
    backend = getattr(context, "callback", None)
    while backend is not None:
        for part in (backend, getattr(backend, "compiler_fn", None)):
            name = getattr(part, "compiler_name", None)
            if isinstance(name, str):
                yield name
        backend = getattr(backend, "_torchdynamo_orig_backend", None)


def _is_compiled(value: Any) -> bool:
    if issubclass(type(value), nn.Module):
        return getattr(value, "_compiled_call_impl", None) is not None or "dynamo_ctx" in vars(value)
    # torch.compiler.disable wraps functions in the same way, so look at its flag.
    inner = attributes_of(value)
    return inner is not None and "_torchdynamo_orig_callable" in inner and not inner.get("_torchdynamo_disable")


def _compiles_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the code of the optimizer's step names ``torch.compile``."""
    code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
    return code is not None and {"torch", "compile"} <= set(code.co_names)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code uncompiled in the block, since the compiler would trace the code that observes the step."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class Rehearsal:
    """Copies of the state and the result of an uncompiled step, for a comparison with the compiled step."""

    def __init__(self, walk: Callable[[], Walk], result: Any, allow: Sequence[str]) -> None:
        self._walk = walk
        self._allow = allow
        left = self._tensors(result)
        self._left = dict(zip(left, copy_all(list(left.values())), strict=True))

    def _tensors(self, result: Any) -> dict[str, Tensor]:
        return collect_tensors(self._walk(), named_leaves(result), {}, (), lambda path: is_allowed(path, self._allow))

    def check(self, result: Any, fn: Callable[..., Any]) -> None:
        """Raise CaptureError with the path of the first tensor that differs after the compiled run of ``fn``."""
        paths = differing(self._left, self._tensors(result))
        if paths:
            by_optimizer = all(isinstance(part, torch.optim.Optimizer) for part in _compiled(self._walk(), fn))
            raise CaptureError(
                "the step runs code that torch.compile compiled, and the tape records its operators instead: they "
                f"leave another {paths[0]} than the compiled code does. On the CPU, compile with backend='aot_eager' "
                "or not at all, or pass backend='eager'",
                component="optimizer" if by_optimizer else "step",
            )


def _from_the_top() -> AbstractContextManager[Any]:
    """Let the compiler trace the call of a container module, whose top frame is torch's own code."""
    config: Any = importlib.import_module("torch._dynamo.config")
    if not hasattr(config, "wrap_top_frame"):
        return nullcontext()
    patch: AbstractContextManager[Any] = config.patch(wrap_top_frame=True)
    return patch


class CompiledModules:
    """Modules that are compiled with ``torch.compile`` and the arguments ``how`` until :meth:`undo`. True: its
    defaults, but nothing on the CPU, where the tape records uncompiled operators anyway. False: compile nothing.
    """

    def __init__(self, modules: Iterable[nn.Module], how: bool | Mapping[str, Any]) -> None:
        self.notes: list[str] = []
        self._ours: list[nn.Module] = []
        if how is False:
            return
        for module in modules:
            name = type(module).__name__
            if how is True and all(parameter.device.type == "cpu" for parameter in module.parameters()):
                self.notes.append(
                    f"compile: {name} is not compiled on the CPU, where the tape records the operators that compiled "
                    "code is made of; compile={'backend': 'aot_eager'} compiles it anyway"
                )
            elif module._compiled_call_impl is None:
                with _from_the_top():
                    module.compile(**({} if how is True else how))
                self._ours.append(module)
                self.notes.append(f"compiled: {name}")

    def undo(self) -> None:
        """Call the modules uncompiled again."""
        for module in self._ours:
            module._compiled_call_impl = None
        self._ours = []


def name_compiled(error: RefusalError) -> None:
    """Add to an ``error`` that beside compiled code, numbers have no stand-ins and reads are not deferred."""
    if isinstance(error, (HostScalarError, HostSyncError)):
        advice = "Use the number outside the step, or do not compile that part"
        text = (
            "The step runs code that torch.compile compiled: in such a step, graphplan neither follows numbers nor "
            "delays reads"
        )
        error.args = (f"{error}. {text}. {advice}",)


def refuse_beside_compiled(plan: Plan) -> None:
    """Raise HostSyncError for reads that need a dispatch mode in a capture, as compiled code runs uncompiled in one."""
    whats = [
        f"{'asserts a value' if read.asserted else 'reads a constant on the device'} at {read.place}"
        for read in plan.traced.reads
        if read.waits
    ]
    if plan.traced.in_mode or plan.traced.derives:
        whats.append("derives a product (prod, cumprod), for which torch looks for zeros on the host")
    for transfer in plan.traced.transfers:
        whats.append(f"copies a tensor of shape {tuple(transfer.value.shape)} from host memory")
    if whats:
        raise HostSyncError(
            f"the step {whats[0]}, and runs compiled code; a capture of both would wait for the device, or always "
            "copy from one address. Expected none of this in a step with compiled code: assert with "
            "torch._assert_async, create tensors on the device (device=...), or do not use torch.compile"
        )
