"""Other optimizers in the middle of a fit: the rest of it is Lightning's. Optimizers that step on the host."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from graphplan import RecaptureError
from tests.lightning.parts import LitDigits, assert_fit_equals_eager, assert_same_fits, fit, per_step, tape
from tests.lightning.rows_of_parts import Alternating, Manual
from tests.lightning.test_manual import Stepping
from tests.models import Lookahead, update_by_number

LEFT = "graphplan leaves the rest of the run to Lightning: the Trainer got other optimizers in the middle of the run"


def _first_of_epoch(trainer: Any) -> bool:
    return bool(trainer.fit_loop.epoch_loop.batch_idx == 0)


def _in_the_middle(trainer: Any) -> bool:
    return bool(trainer.current_epoch == 1 and trainer.fit_loop.epoch_loop.batch_idx == 5)


class Renews(Callback):
    """Gives the Trainer other optimizers before some batches; keeps weak references to those that it had."""

    def __init__(self, renew: Callable[[Any], None], at: Callable[[Any], bool] = _first_of_epoch) -> None:
        self._renew, self._at = renew, at
        self.had: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step and self._at(trainer):
            self.had += map(weakref.ref, trainer.optimizers)
            self._renew(trainer)


def _sets_up(trainer: Any) -> None:
    trainer.strategy.setup_optimizers(trainer)


def _another_kind(trainer: Any) -> None:
    kind = SGD if isinstance(trainer.optimizers[0], AdamW) else AdamW
    trainer.optimizers = [kind(trainer.lightning_module.parameters(), lr=1e-2, fused=True)]


class NotFused(LitDigits):
    """One whose flags are set while a step runs."""

    def __init__(self) -> None:
        super().__init__(partial(AdamW, lr=1e-2), None)


SCHEDULED = partial(Stepping, partial(StepLR, step_size=3, gamma=0.5))
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "set up again": (LitDigits, Renews(_sets_up), {}, {}),
    "in the middle of an epoch": (LitDigits, Renews(_another_kind, _in_the_middle), {}, {}),
    "while gradients accumulate": (
        LitDigits, Renews(_another_kind, _in_the_middle), {}, {"accumulate_grad_batches": 2, "batch": 8},
    ),
    "Lightning's loop": (LitDigits, Renews(_sets_up), {"loop": "stock"}, {}),
    "forward and backward alone": (LitDigits, Renews(_another_kind), {"components": ("forward_backward",)}, {}),
    "manual with a scheduler": (SCHEDULED, Renews(_sets_up), {"verify": "off"}, {}),
    "two of them": (Alternating, Renews(_sets_up), {"verify": "off", "variant": "is_generators_turn"}, {"batch": 8}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.crossed(2)
def test_the_rest_of_the_fit_is_lightnings(name: str, tmp_path: Path) -> None:
    make, watch, choices, options = CASES[name]
    options = {"max_epochs": 4, **options}
    expected = fit(make, tmp_path / "eager", more=[watch], **options)
    callback = tape(warmup_steps=1, **choices)
    with pytest.warns(UserWarning, match=LEFT) as caught:
        found = fit(make, tmp_path / "graphed", callback, more=[watch], **options)
    assert len([one for one in caught if "graphplan" in str(one.message)]) == 1
    assert_same_fits(expected, found)
    batches = len(found.observer.batches)
    assert callback.stats.calls == batches, callback.report()
    assert callback.stats.replayed
    assert callback.stats.skipped[RecaptureError.reason] >= batches // 2
    assert "x: the Trainer got other optimizers" in callback.report()


class Halves(Callback):
    """Gradients, in a hook inside the step."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        for param in module.parameters():
            param.grad.mul_(0.5)


def _adds_callback(trainer: Any) -> None:
    trainer.callbacks.append(Halves())


def _removes_callback(trainer: Any) -> None:
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, Halves)]


def _sets_method(trainer: Any) -> None:
    module = trainer.lightning_module
    plain = module.training_step
    module.training_step = lambda batch, batch_idx: 2 * plain(batch, batch_idx)


@dataclass
class Scales(Callback):
    """Equal to every other one of the same scale."""

    scale: float = 0.5

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        for param in module.parameters():
            param.grad.mul_(self.scale)


def _puts_an_equal_one(trainer: Any) -> None:
    at = next(at for at, callback in enumerate(trainer.callbacks) if type(callback) is Scales)
    trainer.callbacks[at] = Scales()


class Appends(Callback):
    """Hooks that come before the first step."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if not trainer.current_epoch:
            _adds_callback(trainer)
            _sets_method(trainer)


def test_hooks_that_come_before_a_step_was_traced(tmp_path: Path) -> None:
    expected = fit(LitDigits, tmp_path / "eager", more=[Appends()])
    callback = tape(verify="off")
    assert_same_fits(expected, fit(LitDigits, tmp_path / "graphed", callback, more=[Appends()]))
    assert callback.stats.replayed >= 15


@pytest.mark.parametrize("act", [_adds_callback, _removes_callback, _sets_method, _puts_an_equal_one])
def test_other_hooks_inside_the_step(act: Callable[[Any], None], tmp_path: Path) -> None:
    """The rest of the fit is Lightning's, too."""
    first: dict[Any, Any] = {_removes_callback: Halves, _puts_an_equal_one: Scales}
    more: list[Any] = [*([first[act]()] if act in first else []), Renews(act, _in_the_middle)]
    expected = fit(LitDigits, tmp_path / "eager", more=more)
    callback = tape(verify="off")
    more[-1] = Renews(act, _in_the_middle)
    with pytest.warns(
        UserWarning, match="graphplan leaves the rest of the run to Lightning: the hooks that Lightning calls"
    ):
        found = fit(LitDigits, tmp_path / "graphed", callback, more=more)
    assert_same_fits(expected, found)
    assert callback.stats.replayed
    assert callback.stats.skipped[RecaptureError.reason] >= 10


class OfLate(Callback):
    """The flags of all optimizers between two steps, and those in checkpoints."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self.saved: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.kept[id(trainer.optimizers[0])] = trainer.optimizers[0]
        self.saved += [group["fused"] for group in trainer.optimizers[0].state_dict()["param_groups"]]


@pytest.mark.filterwarnings("ignore:graphplan leaves the rest")
def test_the_flags_of_those_before_are_put_back(tmp_path: Path) -> None:
    watch = OfLate()
    callback = tape(warmup_steps=1)
    found = fit(NotFused, tmp_path, callback, more=[Renews(_sets_up), watch], max_epochs=3)
    assert len(watch.kept) == 3
    assert {group["fused"] for optimizer in watch.kept.values() for group in optimizer.param_groups} == {None}
    assert {group["fused"] for group in found.checkpoint["optimizer_states"][0]["param_groups"]} == {None}
    assert set(watch.saved) == {None}
    assert callback.report().count("prepared: AdamW.param_groups[0]['fused']: None -> True") == 1
    hooks = [optimizer._optimizer_state_dict_post_hooks for optimizer in watch.kept.values()]
    assert not any(map(len, hooks))


class LogsRate(LitDigits):
    """Validation asks for the learning rate."""

    def __init__(self) -> None:
        super().__init__(schedule=None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        self.log("rate", optimizer.param_groups[0]["lr"])


class LogsItsRate(LitDigits):
    """So does a training step, which also computes with it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        self.log("rate", optimizer.param_groups[0]["lr"])
        self.log("scaled", loss * optimizer.param_groups[-1]["lr"])
        return loss


class WarmsUp(LogsItsRate):
    """The rate rises as in Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__(schedule=None)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 20) * 1e-2


def _cycles(optimizer: Optimizer) -> Any:
    return per_step(OneCycleLR(optimizer, 0.05, total_steps=30))


RATES: dict[str, Callable[[], Any]] = {
    "an override": WarmsUp,
    "a cycle": partial(LogsItsRate, schedule=_cycles),
    "a kernel that takes numbers": partial(LogsItsRate, make_optimizer=partial(RMSprop, lr=1e-3, foreach=False)),
}


@pytest.mark.parametrize("make", RATES.values(), ids=RATES)
def test_a_step_that_reads_the_rate_of_an_optimizer_on_the_host(make: Callable[[], Any], tmp_path: Path) -> None:
    """Replays of forward and backward follow it, as they follow other numbers."""
    found = assert_fit_equals_eager(make, tmp_path, replayed=15)
    assert "(forward and backward alone)" in found.callback.report()
    assert len({float(batch["seen"]["rate"]) for batch in found.observer.batches}) > 10
    assert len({float(batch["seen"]["rate"]) for batch in found.observer.batches}) > 10


def _loads_another_rate(trainer: Any) -> None:
    optimizer = trainer.optimizers[0]
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 5e-4
    optimizer.load_state_dict(state)


def _adds_a_group(trainer: Any) -> None:
    weight = torch.zeros(3, requires_grad=True)
    trainer.optimizers[0].add_param_group({"params": [weight], "lr": 2e-4})


class Decays(LogsItsRate):
    """All rates fall, of whatever groups there are."""

    def __init__(self) -> None:
        super().__init__(schedule=None)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


@pytest.mark.filterwarnings("ignore:graphplan")
@pytest.mark.parametrize(("renews", "least"), [(_loads_another_rate, 15), (_adds_a_group, 3)])
def test_groups_that_are_others_later(renews: Callable[[Any], None], least: int, tmp_path: Path) -> None:
    """Those of a checkpoint are followed as those before; with more of them, the step that reads them is eager."""
    expected = fit(Decays, tmp_path / "eager", more=[Renews(renews, _in_the_second_epoch)])
    callback = tape(on_failure="eager", verify="off")
    found = fit(Decays, tmp_path / "graphed", callback, more=[Renews(renews, _in_the_second_epoch)])
    assert_same_fits(expected, found)
    assert callback.stats.replayed >= least, callback.report()


def _in_the_second_epoch(trainer: Any) -> bool:
    return bool(trainer.current_epoch == 1) and _first_of_epoch(trainer)


def _at_the_fourth(trainer: Any) -> bool:
    return _first_of_epoch(trainer) and bool(trainer.current_epoch == 4)


def test_an_evaluation_that_reads_the_optimizer(tmp_path: Path) -> None:
    """The validation that comes first is Lightning's; the next one has programs of its own."""
    options: dict[str, Any] = {"max_epochs": 8}
    expected = fit(LogsRate, tmp_path / "eager", more=[Renews(_another_kind, _at_the_fourth)], **options)
    callback = tape(warmup_steps=1, verify="off", eval=True)
    watch = Renews(_another_kind, _at_the_fourth)
    with pytest.warns(UserWarning, match=LEFT):
        found = fit(LogsRate, tmp_path / "graphed", callback, more=[watch], **options)
    assert len({float(seen["rate"]) for seen in found.observer.epochs}) == 2
    assert_same_fits(expected, found)
    assert callback.eval_stats.captured == 1
    assert "evaluation 2:" in callback.report()


@pytest.mark.parametrize("make", [LitDigits, Manual])
def test_others_before_the_first_replay_are_refused(make: Any, tmp_path: Path) -> None:
    with pytest.raises(RecaptureError, match=r"the Trainer got other optimizers in the middle of the run"):
        fit(make, tmp_path, tape(), more=[Renews(_sets_up, lambda trainer: True)])


def test_an_eager_backend_has_nothing_to_capture_anew(tmp_path: Path) -> None:
    callback = tape(backend="eager", max_recaptures=1)
    found = fit(LitDigits, tmp_path / "found", callback, more=[Renews(_sets_up, lambda trainer: True)])
    assert_same_fits(fit(LitDigits, tmp_path / "plain", more=[Renews(_sets_up, lambda trainer: True)]), found)
    assert callback.stats.eager == 30
    assert not callback.stats.events
    assert torch.isfinite(found.trainer.callback_metrics["train_loss"])


def _lookahead(params: Any) -> Any:
    return Lookahead(AdamW(params, lr=1e-2, fused=True))


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_a_wrapper_without_hooks_steps_on_the_host(on_failure: str, tmp_path: Path) -> None:
    """It never called ``Optimizer.__init__``: forward and backward are replayed without it."""
    make = partial(LitDigits, _lookahead, None)
    expected = fit(make, tmp_path / "eager")
    found = fit(make, tmp_path / "graphed", tape(on_failure=on_failure))
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= 15, found.callback.report()
    text = "optimizer runs eagerly after the replay of forward and backward: Lookahead cannot be captured"
    assert text in found.callback.report()
    assert "on_failure" not in found.callback.report()


class _OneByOne(Optimizer):
    """Runs its closure, and updates one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, group)
        return loss

    def update(self, param: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class _Corrected(_OneByOne):
    """Its step counts in Python, and calls a function of another file."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(step=0, mean=torch.zeros_like(param))
        state["step"] += 1
        state["mean"].lerp_(param.grad, 0.1)
        update_by_number(param, state["mean"], group["lr"], state["step"])


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_a_step_with_helpers_in_another_file_is_the_optimizers(on_failure: str, tmp_path: Path) -> None:
    """It stays on the host; forward and backward, which run in its closure, are replayed."""
    make = partial(LitDigits, _Corrected, None)
    callback = tape(on_failure=on_failure)
    assert_same_fits(fit(make, tmp_path / "eager"), fit(make, tmp_path / "graphed", callback))
    assert callback.stats.replayed >= 15, callback.report()
    assert "optimizer runs eagerly after the replay of forward and backward" in callback.report()


class _OwnRate(_OneByOne):
    """Steps by a number of its own, whatever its groups have for a learning rate."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {"speed": 1e-2, **defaults})

    def update(self, param: Tensor, group: dict[str, Any]) -> None:
        param.add_(param.grad, alpha=-group["speed"])


RATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "none": (Manual, {}),
    "nothing": (partial(LitDigits, schedule=None), {"lr": None}),
    "nothing, and a kernel that could read one": (Manual, {"lr": None, "fused": True}),
    "several numbers": (Manual, {"lr": torch.tensor([1e-2, 1e-3])}),
}


@pytest.mark.parametrize("name", RATES)
@pytest.mark.twice
def test_groups_without_a_number_for_a_learning_rate(name: str, tmp_path: Path) -> None:
    """What the step logs is no rate of theirs."""
    make, defaults = RATES[name]
    choose = partial(_OwnRate, defaults=defaults)
    found = assert_fit_equals_eager(partial(make, make_optimizer=choose), tmp_path, replayed=20)
    assert found.callback.stats.captured == 1


class _Around(Optimizer):
    """Keeps optimizers and has no groups of its own: some of its steps are theirs."""

    def __init__(self, kept: Any) -> None:
        self.kept, self.calls = kept, 0

    @property
    def _all(self) -> list[Any]:
        return self.kept if isinstance(self.kept, list) else [self.kept]

    param_groups: Any = property(lambda self: [group for each in self._all for group in each.param_groups])
    state: Any = property(lambda self: {param: state for each in self._all for param, state in each.state.items()})
    defaults: Any = property(lambda self: self._all[0].defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self._all:
            each.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.calls += 1
        for each in self._all if self.calls % 3 else ():
            each.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [each.state_dict() for each in self._all], "calls": self.calls}


@pytest.mark.parametrize("count", [1, 2])
def test_a_wrapper_that_counts_its_steps(count: int, tmp_path: Path) -> None:
    """What it counts with decides whether the optimizers step that it keeps, and it may keep several."""

    def choose(params: Any) -> Any:
        every = list(params)
        parts = [every] if count == 1 else [every[:2], every[2:]]
        kept = [AdamW(part, lr=1e-2, fused=True) for part in parts]
        return _Around(kept if count > 1 else kept[0])

    callback = tape(on_failure="eager", verify="off")
    assert_fit_equals_eager(partial(LitDigits, choose, None), tmp_path, callback=callback, replayed=15)
