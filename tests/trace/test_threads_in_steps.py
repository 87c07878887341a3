"""Steps that have something run in another thread or process: no trace sees it, and replays would leave it out."""

from __future__ import annotations

import _thread
import asyncio
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphplan import HostEffectError, SkipReason, compile_plan
from tests.models import attributes, updating_rig
from tests.twins import Rig, assert_equals_eager, assert_falls_back, assert_refused, line_of

Update = Callable[[Any, Tensor, Tensor], Any]


def add(model: Any) -> None:
    """What another thread does."""
    with torch.no_grad():
        model.total.add_(1.0)


def draw(model: Any) -> None:
    """What advances the generator, from wherever it is called."""
    with torch.no_grad():
        model.total.copy_(torch.rand(()))


class Worker(Thread):
    """A thread of the user's own class."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def run(self) -> None:
        add(self._model)


def by_thread(model: Any, x: Tensor, loss: Tensor) -> None:
    thread = Thread(target=add, args=(model,))
    thread.start()  # culprit
    thread.join()


def by_drawing(model: Any, x: Tensor, loss: Tensor) -> None:
    thread = Thread(target=draw, args=(model,))
    thread.start()  # culprit
    thread.join()


def by_daemon(model: Any, x: Tensor, loss: Tensor) -> None:
    thread = Thread(target=add, args=(model,), daemon=True)
    thread.start()  # culprit
    thread.join()


def by_subclass(model: Any, x: Tensor, loss: Tensor) -> None:
    thread = Worker(model)
    thread.start()  # culprit
    thread.join()


def by_timer(model: Any, x: Tensor, loss: Tensor) -> None:
    timer = Timer(0.0, add, (model,))
    timer.start()  # culprit
    timer.join()


def by_submitting(model: Any, x: Tensor, loss: Tensor) -> None:
    model.executor.submit(add, model).result()  # culprit


def by_mapping(model: Any, x: Tensor, loss: Tensor) -> None:
    list(model.executor.map(add, [model]))  # culprit


def by_pool(model: Any, x: Tensor, loss: Tensor) -> None:
    model.pool.apply(add, (model,))  # culprit


def by_pools_map(model: Any, x: Tensor, loss: Tensor) -> None:
    model.pool.map(add, [model])  # culprit


def by_number(model: Any, x: Tensor, loss: Tensor) -> None:
    done = threading.Event()
    _thread.start_new_thread(lambda: (add(model), done.set()), ())  # culprit
    done.wait()


def by_waiting(model: Any, x: Tensor, loss: Tensor) -> None:
    async def wait() -> None:
        await asyncio.to_thread(add, model)  # culprit

    asyncio.run(wait())


STARTS: dict[Update, str] = {
    by_thread: "Thread.start",
    by_drawing: "Thread.start",
    by_daemon: "Thread.start",
    by_subclass: "Thread.start",
    by_timer: "Thread.start",
    by_submitting: "ThreadPoolExecutor.submit",
    by_mapping: "ThreadPoolExecutor.map",
    by_pool: "ThreadPool.apply",
    by_pools_map: "ThreadPool.map",
    by_number: "_thread.start_new_thread",
    by_waiting: "ThreadPoolExecutor.submit",
}
EXECUTOR, POOL = ThreadPoolExecutor(1), ThreadPool(1)


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    yield
    EXECUTOR.shutdown()
    POOL.terminate()


def rig_of(update: Update) -> Rig:
    """A rig whose model has a total, an executor and a pool, which are not compared."""

    def prepare(model: nn.Module) -> None:
        model.register_buffer("total", torch.zeros(()))
        vars(model).update(executor=EXECUTOR, pool=POOL)

    return updating_rig(update, prepare)


@pytest.mark.parametrize("update", STARTS, ids=lambda update: update.__name__)
def test_what_another_thread_runs_is_refused(update: Update) -> None:
    """By the name of the call, with its line, and whatever the thread does: nobody knows when it is done."""
    name = STARTS[update]
    text = (
        rf"the step calls {name} at {line_of(update)}.*: work in another thread or process is not recorded, so "
        r"replays would leave it out\. Run it in the step's own thread, or before or after the step, or, .* pass "
        rf"allow=\('{name}',\)"
    )
    assert_refused(partial(rig_of, update), HostEffectError, text, verify="off")


def test_without_refusals_such_steps_are_eager() -> None:
    """As any other."""
    assert_falls_back(partial(rig_of, by_thread), SkipReason.HOST_EFFECT, r"the step calls Thread\.start at ")


def test_plans_refuse_them_too() -> None:
    """Also where the other thread's draws look as if somebody had set the generator."""

    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            thread = Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
            return super().forward(x)

    with pytest.raises(HostEffectError, match=r"the step calls Thread\.start at .*test_threads_in_steps"):
        compile_plan(Drawing(2, 2), torch.ones(1, 2))


def reporting(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    """What a thread does that changes no number of the step's."""
    thread = Thread(target=len, args=((),))
    thread.start()
    thread.join()
    return loss * 2


@pytest.mark.parametrize("name", ["Thread.start", "Thread.*"])
def test_what_changes_nothing_may_be_allowed(name: str) -> None:
    """By the name in the refusal."""
    assert_equals_eager(partial(updating_rig, reporting, attributes()), allow=(name,), verify="off")


def feeding(model: Any, x: Tensor, loss: Tensor) -> Tensor:
    """A queue of other processes has a thread that feeds it, from its first item on."""
    queue: Any = multiprocessing.Queue()
    queue.put(1)
    queue.get()
    return loss * 2


def test_what_the_standard_library_starts_for_itself_is_none_of_the_steps() -> None:
    # What is put there is lost, which is told, and another matter.
    allow = ["multiprocessing.queues.put"]
    assert_equals_eager(partial(updating_rig, feeding, attributes()), verify="off", allow=allow)


TORCH, PACKAGES = Path(torch.__file__).parent, Path("/somewhere/site-packages")
SOURCE = """
def start(daemon):
    thread = Thread(target=lambda: None, daemon=daemon)
    thread.start()
    thread.join()
"""


def starting_in(file: Path, *, daemon: bool) -> Callable[[], Rig]:
    """A step that calls a function of ``file``, which starts a thread."""
    space: dict[str, Any] = {"Thread": Thread, "__file__": str(file), "__name__": file.stem}
    exec(compile(SOURCE, str(file), "exec"), space)
    start = space["start"]

    def update(model: Any, x: Tensor, loss: Tensor) -> Tensor:
        start(daemon)  # culprit
        return loss * 2

    return partial(updating_rig, update, attributes())


@pytest.mark.parametrize(
    ("file", "daemon"),
    [
        (TORCH / "_inductor" / "compile_workers.py", False),
        (TORCH / "utils" / "data" / "loading.py", False),
        (PACKAGES / "bars" / "monitor.py", True),
    ],
    ids=str,
)
def test_threads_that_serve_torch_or_a_package_are_none_of_the_steps(file: Path, daemon: bool) -> None:
    """Compilers', loaders', and daemons such as a progress bar's monitor."""
    assert_equals_eager(starting_in(file, daemon=daemon), verify="off")


@pytest.mark.parametrize("file", [TORCH / "nn" / "parallel" / "apply.py", PACKAGES / "layers" / "both.py"], ids=str)
def test_threads_of_layers_are_the_steps(file: Path) -> None:
    """``nn.parallel.parallel_apply`` and an installed model's compute what the step computes."""
    assert_refused(starting_in(file, daemon=False), HostEffectError, r"the step calls Thread\.start at ", verify="off")
