"""The public verb that makes a graphed step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphplan.specs.policy import Policy
from graphplan.step.buckets import Buckets
from graphplan.step.dimensions import Dims
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.options import EagerIf, Options
from graphplan.step.padding import PadValue


def graph_step(
    fn: Callable[..., Any],
    *,
    owners: Mapping[str, Any] | Sequence[Any] | None = None,
    mode: str = "train",
    policy: Policy | None = None,
    backend: str = "auto",
    device: str | torch.device | None = None,
    warmup_steps: int = 3,
    on_failure: str = "raise",
    allow: Sequence[str] = (),
    watch: Sequence[str] = (),
    eager_if: EagerIf = None,
    prepare_optimizers: bool = True,
    fuse_optimizer: bool = False,
    compile: bool | Mapping[str, Any] = False,
    max_graphs: int = 16,
    memory_budget: int | None = None,
    verify: str | int | None = "geometric",
    min_speedup: float | None = None,
    max_recaptures: int = 16,
    debug: bool = False,
    debug_eager: bool = False,
    prefetch: bool = False,
    shapes: str = "exact",
    buckets: Buckets | None = None,
    pad: PadValue | Mapping[str, PadValue] = 0,
    mask: str | None = None,
    dynamic: Mapping[str, Dims] | None = None,
) -> GraphedStep:
    """Make a step that replays itself as one CUDA graph, or on the tape.

    Examples:
        >>> import torch
        >>> from graphplan import graph_step
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def train_step(x, y):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> step = graph_step(train_step, owners={"model": model, "optimizer": optimizer})
        >>> for _ in range(10):
        ...     loss = step(torch.randn(8, 4), torch.randn(8, 1))
        >>> step.stats.eager, step.stats.traced, step.stats.captured, step.stats.replayed
        (3, 2, 1, 4)

    Args:
        fn: the step: forward, backward, optimizer, or a part of these. It takes pytrees of tensors and literals, of any
            shape and dtype.
        owners: objects whose tensors make up the step's state, by name or as a sequence. Modules and optimizers that
            the step uses are found without being named.
        mode: ``"train"`` or ``"inference"``: which default policy holds.
        policy: which roles are static and which are copied in; overrides ``mode``.
        backend: ``"auto"`` (a CUDA graph if the tensors are on CUDA, the tape on the CPU), ``"cudagraph"``,
            ``"tape"``, or ``"eager"``.
        device: where to move fed tensors; without it they must be where the step computes.
        warmup_steps: number of eager calls before a feed signature is traced; at least 1. Once the step has had so
            many, a further signature that comes often takes one of its own.
        on_failure: ``"raise"`` (refusals before the first good replay raise, later ones go on eagerly with a warning)
            or ``"eager"`` (always go on).
        allow: paths (or patterns) of Python effects that replays may leave out, such as ``"model.calls"``.
        watch: installed packages (top-level names) whose globals, classes and closures are guarded as the user's own
            are, in the whole process; without it, what they hold there is trusted, and found by checks alone.
        eager_if: a predicate over the step's arguments, or n for every n-th call: these calls run eagerly.
        prepare_optimizers: whether optimizers may be made capturable (see :func:`prepare_optimizer`).
        fuse_optimizer: whether foreach optimizers are switched to torch's fused kernels if it has them on the device
            (Adam, AdamW, SGD): faster, with other rounding. On the CPU they are what makes an optimizer capturable.
        compile: ``True`` compiles the modules among ``owners`` with ``torch.compile`` before their first step: the
            captured kernels are compiled ones, and the numbers the compiler's. Or arguments of ``torch.compile`` by
            name; without them nothing is compiled on the CPU.
        max_graphs: number of programs that are kept. One that is no longer in use makes room for another. While all
            are used, or if signatures come that never come again, calls without a program are eager.
        memory_budget: bytes that all programs together may compute in; None: as many as the device has. The need of a
            program is estimated from its traces. A program that is too large is not captured: its steps are eager,
            with one warning and the reason in the report. Programs that were used least recently make room.
        verify: which replays are checked against the eager step: ``"geometric"`` (1, 2, 4, 8, … and then every 1000th,
            or so seldom that checks take 0.2 s in the first 64 replays, and then 1 % of the time; of all shapes
            together, and the first one of each), n for every n-th, or ``"off"``. A checked call runs the step eagerly
            besides, from the same state, and eager's outcome stands; it needs copies of parameters and state meanwhile.
        min_speedup: how many times as fast as eager steps the calls have to be, from the end of one to the end of the
            next (in inference: each by itself). The first seven calls (in inference: of each signature) are calls of
            ``fn`` alone, and five of them are timed. If replays are slower, or the device is busy all the time, the
            step stands down: programs go, optimizers are stock, and calls are calls of ``fn``. So they are after a
            refusal, unless that raises. 0 captures at once and keeps programs all the same. None: 1.0 on CUDA, 0 on the
            CPU.
        max_recaptures: number of captures in a row that may come to fewer than 16 replays each before the step is
            refused.
        debug: wait for the device after each capture and each first replay, and name the program in its errors; if
            torch can, also check before each replay that the memory that the recording reads was not freed.
        debug_eager: run the step itself where a program would be replayed, on the program's own inputs: tells a fault
            of the recording from one of everything around it. Nothing is replayed, and so nothing is checked.
        prefetch: with ``device=``, whether inputs of 4 MiB and more that are fed in pinned host memory are copied to
            the device while it is busy with the replay before, into buffers as large, one for each program. They
            have to be written when they are fed, not by work that the device still has to do.
        shapes: ``"exact"`` (a program for each shape), or ``"bucket"``: batches are padded to a capture size, and the
            step is trained on what they are padded to. That is right if padding has no effect: under a mask, with
            labels that the loss ignores. Before the first padded calls of each size (1, 2, 4, 8, …) and some later ones
            the step is rehearsed on the batch as it came and on the padded one, and both are undone: if something
            differs by more than rounding, the step is refused by its name, and the call has not happened; under
            ``on_failure="eager"`` this and all further batches are trained on as they came. Dropout is left out of the
            comparison; a step that draws other random numbers is refused. The first two calls, and batches beyond the
            largest size, are not padded. Results are cut to their true size.
        buckets: capture sizes of dimension 0, in elements, or by dimension; see :func:`graphplan.buckets.fit`.
        pad: what padding holds, a number or ``function(tensor, shape)``; or those by argument, by key of a dictionary
            that is fed (``"labels"``) or by path (``"batch[1]"``).
        mask: the argument that gets a boolean tensor which is true for what is not padding.
        dynamic: dimensions that may vary, by the same names; by default all but the last of an n-d tensor, all of a 1-d
            one.

    Returns:
        A callable with ``plan``, ``stats``, ``report()``, ``invalidate(why)`` and ``close()``. Tensors that the step
        returns come back as detached copies, so a replayed loss has no ``grad_fn``.

    Raises:
        OptionError: if an option has a value or a type that makes no sense.
        PolicyError: if a mode, role or policy does not exist.
        BackendError: if a backend does not exist.
        OwnersError: if ``owners`` is neither a mapping nor a sequence.
    """
    options = Options(
        mode=mode,
        policy=policy,
        backend=backend,
        device=device,
        warmup_steps=warmup_steps,
        on_failure=on_failure,
        allow=allow,
        watch=watch,
        eager_if=eager_if,
        prepare_optimizers=prepare_optimizers,
        fuse_optimizer=fuse_optimizer,
        compile=compile,
        max_graphs=max_graphs,
        memory_budget=memory_budget,
        verify=verify,
        min_speedup=min_speedup,
        max_recaptures=max_recaptures,
        debug=debug,
        debug_eager=debug_eager,
        prefetch=prefetch,
        shapes=shapes,
        buckets=buckets,
        pad=pad,
        mask=mask,
        dynamic=dynamic,
    )
    return GraphedStep(fn, owners, options)
