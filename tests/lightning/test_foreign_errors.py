"""Objects that raise when they are asked, odd tensors, graphed methods and errors of graphplan's own, in a Trainer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphplan import EffectError, FaultError, graph_step
from tests.crossing import each
from tests.facts import assert_same
from tests.lightning.parts import (
    LitDigits,
    assert_fit_equals_eager,
    eager_state,
    fit,
    tape,
    with_step,
)
from tests.sources.test_foreign_objects import THINGS


def _with_thing(name: str) -> LitDigits:
    module: Any = LitDigits()
    # torch's own assignment would ask it.
    vars(module)["thing"] = THINGS[name]()
    return module


@pytest.mark.parametrize(
    "name", ["no attributes", "no comparison", "no class", "a dictionary without keys", "a tensor without functions"]
)
@pytest.mark.filterwarnings("ignore:graphplan")
def test_a_module_that_holds_what_raises(name: str, tmp_path: Path) -> None:
    found = fit(partial(_with_thing, name), tmp_path, tape(on_failure="eager"), max_epochs=2)
    vars(found.module).pop("thing")
    assert_same(eager_state(LitDigits, max_epochs=2), found.state)


def _vmap(self: Any, batch: Any, batch_idx: int) -> Tensor:
    def scaled(row: Tensor) -> Tensor:
        self._seen = row * 2
        return self._seen.sum()

    return self.loss_of(batch) + torch.vmap(scaled)(batch[0]).mean()


def _grad(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(self.net[0](x)[:, :10], y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().mean()


def _with_meta() -> LitDigits:
    module: Any = LitDigits()
    # Lightning itself moves buffers.
    module.template = torch.empty(3, device="meta")
    return module


def _with_other() -> Any:
    module: Any = with_step(_grad)()
    module.teacher = [nn.Linear(4, 4)]
    module.teacher[0](torch.ones(1, 4)).sum().backward()
    return module


class Graphed(LitDigits):
    """A module whose forward is graphed by itself."""


Graphed.forward = graph_step(LitDigits.forward, mode="inference", backend="tape")  # type: ignore[assignment]


KNOWN: dict[str, Callable[[], Any]] = {
    "what vmap left": with_step(_vmap),
    "a tensor on the meta device": _with_meta,
    "gradients beside another network's": _with_other,
}


@pytest.mark.parametrize("name", KNOWN)
def test_odd_tensors_in_a_trainer(name: str, tmp_path: Path) -> None:
    assert_fit_equals_eager(KNOWN[name], tmp_path, replayed=10)


@pytest.mark.parametrize(
    "place",
    [
        "callback.gates:has_hook", "callback.callback:training_obstacle", "callback.callback:loop_obstacle",
        "callback.callback:allow_fused_clipping", "callback.loop.optimization:AutomaticSeam.install",
        "callback.loop.training_loop:LoopSeam.__init__",
        "callback.logging.late_numbers:PendingRows.__init__",
        "callback.loop.seam:Seam.__init__",
        "step.planner:build_plan", "verify.check:Check.compare", "program.program:Program.fits",
    ],
)  # fmt: skip
@pytest.mark.crossed(2, 1)
def test_errors_of_graphplans_own_in_a_trainer(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(place, tmp_path, monkeypatch)


def test_errors_of_graphplans_own_after_timed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused("callback.loop.optimization:AutomaticSeam.install", tmp_path, monkeypatch, min_speedup=1.0)


def test_errors_of_graphplans_own_in_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"graphplan runs this evaluation eagerly: .*ArithmeticError"
    assert_refused("callback.callback:capture_obstacle", tmp_path, monkeypatch, told=told, eval=True)


class Shown(LitDigits):
    """Logs for the bar, and for the loggers after every other step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("shown", loss, prog_bar=True)
        self.log("mean", loss * 2, on_step=True, on_epoch=True)
        return loss


IN_FIT = [
    *("loop.training_loop:LoopSeam._is_due", "loop.training_loop:LoopSeam._ready"),
    *("logging.step_logs:StepLogs.start", "logging.step_logs:StepLogs._settled"),
    *("logging.step_logs:StepLogs._in_known_dtype", "logging.step_logs:find_source"),
    "logging.connector:LazyConnector.postpone",
    *("logging.late_numbers:PendingRows.take", "logging.late_numbers:PendingRows.look"),
    *("logging.late_numbers:AsyncHostCopy.__init__", "logging.late_numbers:AsyncHostCopy.has_arrived"),
    "logging.late_numbers:AsyncHostCopy.wait",
]
"""What stands in for Lightning's own code from batch to batch."""


@each(after=[0, 1], place=IN_FIT)
@pytest.mark.crossed(2)
def test_errors_of_graphplans_own_in_the_middle_of_a_fit(
    place: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is under way is done by Lightning's own code, once, and so is the rest of the fit."""
    shows = {"enable_progress_bar": True, "log_every_n_steps": 2}
    assert_refused(f"callback.{place}", tmp_path, monkeypatch, make=Shown, after=after, trainer=shows)


def test_logs_that_fail_after_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has run: what it logged is half done, and said to be."""
    monkeypatch.setattr("graphplan.callback.logging.step_logs.StepLogs._carry_out", _failing(lambda: None, 0))
    with pytest.raises(EffectError, match=r"ArithmeticError .*not expected\. the step of Shown has run"):
        fit(Shown, tmp_path, tape(on_failure="eager"), max_epochs=1)


def _failing(plain: Callable[..., Any], after: int) -> Callable[..., Any]:
    calls = count()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) < after:
            return plain(*args, **kwargs)
        raise ArithmeticError("not expected")

    return fail


def assert_refused(
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    make: Callable[[], Any] = LitDigits,
    after: int = 0,
    trainer: dict[str, Any] | None = None,
    told: str = r"ArithmeticError .*not expected",
    **options: Any,
) -> None:
    """Fail unless a function of graphplan's that raises is named, and a fit goes on without it where it may."""
    settings = {"max_epochs": 2, **(trainer or {})}
    run, expected = partial(fit, make, **settings), eager_state(make, **settings)
    name, _, path = place.partition(":")
    *kinds, attribute = path.split(".")
    owner: Any = importlib.import_module(f"graphplan.{name}")
    for kind in kinds:
        owner = getattr(owner, kind)

    plain = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, _failing(plain, after))
    with pytest.warns(UserWarning, match=told):
        found = run(tmp_path / "graphed", tape(on_failure="eager", **options))
    assert_same(expected, found.state)
    monkeypatch.setattr(owner, attribute, _failing(plain, after))
    with pytest.raises(FaultError, match=r"ArithmeticError .*not expected"):
        run(tmp_path / "raised", tape(**options))
