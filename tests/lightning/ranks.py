"""What each rank does in the tests of several processes: ``python -m torch.distributed.run -m tests.lightning.ranks``.
Started alone, with ``WORLD_SIZE`` and where ranks meet in the environment, the process is all of them.

Every row is fitted twice in one process group, without and with the callback; each rank compares what it ended with,
and writes down what its callback did.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import logging
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, Subset

from graphplan import GraphPlanCallback, NotCapturedError, RefusalError, SkipReason
from graphplan.step import peers
from graphplan.verify import check, schedule
from tests.facts import assert_same, flatten
from tests.lightning.parts import TRUSTED, LitDigits, Observer, digits, ignore_lightning_warnings, with_step
from tests.sharded import evaluate, sharded_rig
from tests.twins import Rig, assert_equals_eager, assert_same_runs, build, drive, managed

CUDA = os.environ.get("GRAPHPLAN_RANKS") == "cuda"
"""Whether the ranks train on a GPU each."""
BACKEND = "cudagraph" if CUDA else "tape"
EPOCHS_ON, BATCH = {"tape": 2, "cudagraph": 4}, 15
"""Each rank has ten batches per epoch. DDP wants eleven warm-up steps on CUDA."""
EPOCHS = EPOCHS_ON[BACKEND]
LONG = 4
"""Epochs of rows in which something comes late."""
HALF = {"tape": 1, "cudagraph": 2}[BACKEND]
"""Epochs before and after a checkpoint."""
LONGEST = 120
"""Seconds that a row may take: ranks that wait for ever would keep the test waiting, too."""
WORLD = int(os.environ.get("WORLD_SIZE", "2"))


def ddp(**options: Any) -> DDPStrategy:
    """DDP over gloo, or on GPUs over NCCL."""
    return DDPStrategy(process_group_backend="nccl" if CUDA else "gloo", **options)


def fsdp(ranks: int = WORLD, **options: Any) -> ModelParallelStrategy:
    """What FSDP2 takes, over gloo, or on GPUs over NCCL; of all ranks ``ranks`` for data."""
    backend = "nccl" if CUDA else "gloo"
    return ModelParallelStrategy(ranks, WORLD // ranks, process_group_backend=backend, **options)


def trainer_of(
    callbacks: list[Callback],
    kind: type[L.Trainer] = L.Trainer,
    strategy: Callable[[], Strategy] = ddp,
    **options: Any,
) -> L.Trainer:
    """A trainer on two processes."""
    defaults: dict[str, Any] = {"strategy": strategy(), "max_epochs": EPOCHS, "logger": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return kind(
        accelerator="gpu" if CUDA else "cpu", devices=WORLD, callbacks=callbacks, **{**defaults, **quiet, **options}
    )


def callback_of(**options: Any) -> GraphPlanCallback:
    """The callback, without a gate: other tests may be what takes time."""
    return GraphPlanCallback(**{"backend": BACKEND, "min_speedup": 0, **options})


def loader(train: Dataset[Any]) -> DataLoader[Any]:
    """Batches that Lightning shares out among the ranks."""
    return DataLoader(train, BATCH, shuffle=True)


def fit(
    make: Callable[[], L.LightningModule],
    callback: GraphPlanCallback | None,
    resume: Path | None = None,
    *,
    load: Callable[[Dataset[Any]], DataLoader[Any]] = loader,
    others: Sequence[Callback] = (),
    **options: Any,
) -> Any:
    """One fit; returns all that a user could look at, and the trainer. ``load`` makes the loader of training data."""
    torch.manual_seed(0)
    module, observer = make(), Observer()
    trainer = trainer_of([observer, *others, *([callback] if callback else [])], **options)
    train, validation = digits()
    torch.manual_seed(1)
    loaders = load(train), DataLoader(validation, 10)
    trainer.fit(module, *loaders, ckpt_path=resume, **(TRUSTED if resume else {}))
    for part in module.modules():
        # After an evaluation stock FSDP2 keeps the root's parameters gathered, and graphplan does not.
        if isinstance(part, FSDPModule):
            part.reshard()
    seen = {"batches": observer.batches, "epochs": observer.epochs, "metrics": dict(trainer.callback_metrics)}
    return flatten(module=module, optimizers=trainer.optimizers, steps=trainer.global_step, **seen), trainer


@cache
def eager_fit(make: Callable[[], L.LightningModule], *settings: tuple[str, Any]) -> Any:
    """What a fit without the callback ends with, once for all rows that compare with it."""
    return fit(make, None, **dict(settings))[0]


def compare(make: Callable[[], L.LightningModule] = LitDigits, **options: Any) -> dict[str, Any]:
    """Fit twice and compare; the callback's counts and report."""
    chosen = options.pop("callback", {})
    callback = callback_of(**chosen)
    settings = {name: value for name, value in options.items() if name != "others"}
    expected, (found, trainer) = eager_fit(make, *settings.items()), fit(make, callback, **options)
    assert_same(expected, found)
    stats = callback.stats
    counts = {
        "steps": trainer.global_step,
        "replayed": stats.replayed,
        "captured": stats.captured,
        "verified": stats.verified,
    }
    waits = stats.skipped[SkipReason.BUSY]
    return {**counts, "waits": waits, "evaluated": callback.eval_stats.replayed, "report": callback.report()}


class Sharded(LitDigits):
    """FSDP2 for each linear layer, and for what is left."""

    options: ClassVar[dict[str, Any]] = {}

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **self.options)
        fully_shard(self, mesh=mesh)


class Whole(LitDigits):
    """On each rank as it is."""

    def configure_model(self) -> None:
        """Nothing to do."""


class MixedSharded(Sharded):
    """Layers in bfloat16 whose gradients are reduced in float32, gathered once for forward and backward."""

    options: ClassVar[dict[str, Any]] = {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
        "reshard_after_forward": False,
    }


def sharded(kind: type[Sharded] = Sharded, **options: Any) -> dict[str, Any]:
    """:func:`compare` under FSDP2 over gloo."""
    return compare(kind, strategy=fsdp, **options)


class Offloaded(Sharded):
    """Shards lie on the host between uses."""

    options: ClassVar[dict[str, Any]] = {"offload_policy": CPUOffloadPolicy(pin_memory=CUDA)}


class Replicated(LitDigits):
    """HSDP: sharded over some ranks, and that as often as there are others."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.replicas = replicas

    def configure_model(self) -> None:
        shape = (self.replicas, WORLD // self.replicas)
        mesh = init_device_mesh("cuda" if CUDA else "cpu", shape, mesh_dim_names=("replicate", "shard"))
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)


def resumed(
    name: str, make: Callable[[], L.LightningModule] = Sharded, strategy: Callable[..., Strategy] = fsdp, **kind: Any
) -> dict[str, Any]:
    """Half of the fit, a checkpoint, and the other half from it; with the callback also from the eager fit's."""
    folder = Path(sys.argv[1]) / f"checkpoints {name}"
    callbacks = [None, *(callback_of() for _ in range(3))]
    run = partial(fit, make, strategy=partial(strategy, **kind), max_epochs=2 * HALF)
    for name, callback in zip(("eager", "graphed"), callbacks, strict=False):
        _, trainer = run(callback, max_epochs=HALF)
        trainer.save_checkpoint(folder / name)
    expected = run(None, folder / "eager")[0]
    for name, callback in zip(("eager", "graphed"), callbacks[2:], strict=True):
        assert_same(expected, run(callback, folder / name)[0])
    return {"replayed": [callback.stats.replayed for callback in callbacks[1:] if callback is not None]}


def sharded_loop() -> dict[str, Any]:
    """A loop without Lightning, in the process group that there is."""
    step = assert_equals_eager(partial(sharded_rig, evaluate))
    return {"replayed": step.stats.replayed, "report": step.report()}


def tensor_parallel() -> dict[str, Any]:
    """Both ranks hold a part of each layer."""
    trainer = trainer_of([callback_of()], strategy=partial(fsdp, ranks=1))
    try:
        trainer.fit(Whole(), DataLoader(digits()[0], BATCH))
    except NotCapturedError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def _reads_on_rank_1(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = self.loss_of(batch)
    if self.global_rank == 1:
        self.seen = complex(loss.detach()).real
    return loss


def one_rank_cannot(**options: Any) -> dict[str, Any]:
    """The step of rank 1 reads its loss on the host."""
    try:
        return compare(with_step(_reads_on_rank_1), **options)
    except RefusalError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _takes_long(self: Any, batch: Any, batch_idx: int) -> Tensor:
    # Some 70 ms on an H100: by far more than the host takes for a step.
    width = 12288 if CUDA else 8
    idle = torch.ones(width, width, device=self.device)
    return self.loss_of(batch) + 0.0 * (idle @ idle).mean()


class ComputedItem(L.Trainer):
    """On rank 0 a SIGTERM comes in after the step's own look at it and before the next broadcast."""

    @property
    def received_sigterm(self) -> bool:
        asks = sys._getframe(1).f_code.co_name
        return asks in ("_send", "_broadcast_sigterm_tensor") and self.global_rank == 0 and self.global_step >= 5


def ragged(train: Dataset[Any]) -> DataLoader[Any]:
    """Of 155 samples one rank has the last one, and the other the first once more; the last batch has three."""
    return loader(Subset(train, range(155)))


def of_other_shapes(train: Dataset[Any]) -> DataLoader[Any]:
    """Rank 1 has smaller batches from the second epoch's middle on, every third time."""
    rank = int(os.environ["RANK"])
    sizes = [9 if rank == 1 and index % 3 == 2 else BATCH for index in range(10)]
    return DataLoader(train, batch_sampler=[range(rank * 150, rank * 150 + size) for size in sizes])


def with_other_shapes() -> dict[str, Any]:
    """Votes on checks that the others do not make are waited for: three seconds are enough."""
    stock = peers.Peers.vote

    def vote(self: Any, question: str, answer: bool, patience: float = 3.0, **how: Any) -> bool | None:
        return stock(self, question, answer, patience, **how)

    peers.Peers.vote = vote  # type: ignore[method-assign]
    try:
        return compare(load=of_other_shapes, use_distributed_sampler=False, max_epochs=LONG)
    finally:
        peers.Peers.vote = stock  # type: ignore[method-assign]


class Slow(Callback):
    """Rank 1 takes its time before some batches."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx % 3 == 1:
            time.sleep(0.05)


def of_transformers(kind: str, **options: Any) -> dict[str, Any]:
    """Bit by bit, with kernels that are deterministic; None without the library."""
    if importlib.util.find_spec("transformers") is None:
        return {"missing": True}
    models = importlib.import_module("tests.lightning.ranks_of_transformers")
    torch.use_deterministic_algorithms(True)
    try:
        return compare(getattr(models, kind), **options)
    finally:
        torch.use_deterministic_algorithms(False)


def accumulated_rig() -> Rig:
    """Gradients of two batches, of which the first communicates nothing: ``no_sync``, in a loop without Lightning."""
    device = torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")
    torch.manual_seed(distributed.get_rank())
    calls = [(torch.randn(2, 8, 20, device=device), torch.randint(0, 5, (2, 8), device=device)) for _ in range(30)]
    torch.manual_seed(7)
    # As torch's notes on CUDA graphs have it: gradients are added up in the stream where DDP is made.
    with torch.cuda.stream(torch.cuda.Stream()) if CUDA else nullcontext():
        net = DistributedDataParallel(nn.Sequential(nn.Linear(20, 16), nn.GELU(), nn.Linear(16, 5)).to(device))
    optimizer = AdamW(net.parameters(), lr=1e-2, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with net.no_sync():
            first = F.cross_entropy(net(x[0]), y[0])
            first.backward()
        second = F.cross_entropy(net(x[1]), y[1])
        second.backward()
        optimizer.step()
        return first + second

    return Rig(step, {"net": net, "optimizer": optimizer}, calls)


def accumulated_runs() -> Any:
    """:func:`accumulated_rig` as it is and graphed, in the process group that there is; the graphed step."""
    rig = build(accumulated_rig)
    expected = drive(rig, rig.step)
    rig = build(accumulated_rig)
    step = managed(rig, backend=BACKEND)
    assert_same_runs(expected, drive(rig, step))
    return step


def without_synchronisation() -> dict[str, Any]:
    """How much of it was replayed."""
    step = accumulated_runs()
    return {"replayed": step.stats.replayed, "report": step.report()}


def fails() -> dict[str, Any]:
    """An error of the user's while a program with collectives is alive, which the traceback holds."""
    step = accumulated_runs()
    assert step.stats.replayed
    raise ArithmeticError("of the user's own")


class Signalled(Callback):
    """One rank gets a SIGTERM before a step, and no other does."""

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step = rank, step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, trainer.global_step) == (self._rank, self._step):
            signal.raise_signal(signal.SIGTERM)


def signalled(rank: int, step: int) -> dict[str, Any]:
    """Where each rank ends, and what it says."""
    torch.manual_seed(0)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphplan").addHandler(handler)
    callback = callback_of()
    trainer = trainer_of([Signalled(rank, step), callback], max_epochs=LONG)
    try:
        trainer.fit(LitDigits(), DataLoader(digits()[0], BATCH))
    except SIGTERMException:
        return {"ended": trainer.global_step, "said": said, "replayed": callback.stats.replayed}
    finally:
        logging.getLogger("graphplan").removeHandler(handler)
    return {"ended": None, "said": said, "replayed": callback.stats.replayed}


def sigterm() -> dict[str, Any]:
    """Every rank ends before the same step."""
    torch.manual_seed(0)
    trainer = trainer_of([callback_of()], ComputedItem, max_epochs=LONG)
    try:
        trainer.fit(LitDigits(), DataLoader(digits()[0], BATCH))
    except SIGTERMException:
        return {"ended": trainer.global_step}
    return {"ended": None}


def without_room(copy: int) -> dict[str, Any]:
    """Rank 1 has no memory for such a copy in the first check, and rank 0 finds that it differs from eager."""
    rank, copies = int(os.environ["RANK"]), []
    stock = check.Check.snapshot, check.differing

    def snapshot(self: Any, *args: Any) -> Any:
        copies.append(args)
        if rank == 1 and len(copies) == copy:
            raise torch.OutOfMemoryError("no memory")
        return stock[0](self, *args)

    def differing(*sides: Any) -> Any:
        return stock[1](*sides) if rank == 1 else ["model.net.0.bias"]

    check.Check.snapshot, check.differing = snapshot, differing
    try:
        return compare()
    finally:
        check.Check.snapshot, check.differing = stock


def wrong_on_one() -> dict[str, Any]:
    """Rank 1 finds in the first check that its program is not what the eager step does."""
    stock = check.Check.compare

    def compare_(self: Any, *args: Any) -> dict[str, str]:
        return {**stock(self, *args), "model.net.0.bias": "made up"}

    if os.environ["RANK"] == "1":
        check.Check.compare = compare_
    try:
        return compare(callback={"on_failure": "eager"})
    finally:
        check.Check.compare = stock


ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": compare,
    "clipped": lambda: compare(gradient_clip_val=0.1),
    "accumulated": lambda: compare(accumulate_grad_batches=2),
    "evaluated": lambda: compare(callback={"eval": True}),
    "slower": lambda: compare(callback={"min_speedup": 1e6}, max_epochs=12),
    "slower on one": lambda: compare(
        callback={"min_speedup": 1e6 if os.environ["RANK"] == "1" else 1e-6}, max_epochs=12
    ),
    "fsdp": sharded,
    "fsdp clipped": lambda: sharded(gradient_clip_val=0.1),
    "fsdp accumulated": lambda: sharded(accumulate_grad_batches=2),
    "fsdp evaluated": lambda: sharded(callback={"eval": True}),
    "fsdp mixed": lambda: sharded(MixedSharded),
    "fsdp offloaded": lambda: sharded(Offloaded),
    "fsdp replicated": lambda: compare(
        partial(Replicated, WORLD // 2 if WORLD > 2 else WORLD), strategy=fsdp, max_epochs=LONG
    ),
    "fsdp resumed": partial(resumed, "of ranks", save_distributed_checkpoint=True),
    "fsdp resumed from one file": partial(resumed, "in one file", save_distributed_checkpoint=False),
    "resumed": partial(resumed, "ddp", LitDigits, ddp),
    "no_sync": without_synchronisation,
    "ragged": lambda: compare(load=ragged, max_epochs=LONG),
    "other shapes on one": with_other_shapes,
    "one is slow": lambda: compare(others=[Slow()]),
    "bert": lambda: of_transformers("LitBert", precision="bf16-mixed"),
    "llama": lambda: of_transformers("LitLlama", strategy=fsdp),
    **{f"sigterm to {rank} in step {step}": partial(signalled, rank, step) for rank in (0, 1) for step in (2, 5, 20)},
    "fsdp loop": sharded_loop,
    "tensor parallel": tensor_parallel,
    "one rank cannot": lambda: one_rank_cannot(callback={"on_failure": "eager"}),
    "no room for a check": partial(without_room, 1),
    "no room to check again": partial(without_room, 2),
    "wrong on one": wrong_on_one,
    "sigterm": sigterm,
    "busy": lambda: compare(with_step(_takes_long), callback={"min_speedup": 1.0}),
    # The last ones: the ranks part in an error.
    "fails": fails,
    "one rank cannot, and that raises": one_rank_cannot,
}


def become_ranks() -> list[int]:
    """Be rank 0, and fork the others, so that everything is imported once; returns their process ids."""
    children: list[int] = []
    for rank in range(1, WORLD):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            return []
        children.append(child)
    os.environ.update(RANK="0", LOCAL_RANK="0")
    return children


def main() -> None:
    """Run the rows that are asked for and write what came out of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--longest", type=float, default=LONGEST)
    arguments = parser.parse_args()
    others = [] if "RANK" in os.environ else become_ranks()
    torch.set_num_threads(1)
    # Other tests may be what takes time.
    schedule.FREE = schedule.STEPS = math.inf
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {}
    with warnings.catch_warnings():
        ignore_lightning_warnings()
        for row in arguments.rows:
            sys.stderr.write(f"{row}\n")
            faulthandler.dump_traceback_later(arguments.longest, exit=True)
            try:
                found[row] = ROWS[row]()
            except BaseException:
                told = f"in row {row!r}:\n{traceback.format_exc()}"
                (arguments.folder / f"error of rank {os.environ['RANK']}").write_text(told)
                raise
    faulthandler.cancel_dump_traceback_later()
    rank = os.environ["RANK"]
    (arguments.folder / f"{rank}.json").write_text(json.dumps(found))
    failed = [other for other in others if os.waitpid(other, 0)[1]]
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
