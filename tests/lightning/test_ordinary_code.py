"""What training code in people's repositories does in a step, and no one thinks of: the fit is the fit without the
callback, and most of its steps are replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import Metric
from torchmetrics.image import PeakSignalNoiseRatio

from tests.lightning.parts import LitDigits, assert_fit_equals_eager, assert_same_fits, fit, tape, with_step


def replayed(make: Callable[[], LitDigits], folder: Path, **options: Any) -> int:
    """Fit with the callback and without; return the number of replays."""
    callback = tape(**options)
    found, eager = fit(make, folder / "graphed", callback), fit(make, folder / "eager")
    assert_same_fits(eager, found)
    replays: int = callback.stats.replayed
    return replays


class Keeps(LitDigits):
    """Keeps what it computes, and clears that after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.asked: list[Any] = []

    def on_train_epoch_end(self) -> None:
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(self.kept) if isinstance(leaf, Tensor)]
        self.asked += [(tensor.sum().item(), tensor.requires_grad) for tensor in tensors]
        self.kept.clear()


KEPT: dict[str, Callable[[Keeps, Tensor, Tensor], Any]] = {
    "losses": lambda module, logits, loss: loss,
    "results": lambda module, logits, loss: {"loss": loss, "logits": logits},
    "views without gradients": lambda module, logits, loss: logits.view(-1),
    "the step and a dictionary": lambda module, logits, loss: (module.global_step, {"logits": logits.detach()}),
    "the step and a list": lambda module, logits, loss: (module.global_step, [logits.detach()]),
    "a constant and a dictionary": lambda module, logits, loss: (0, {"logits": logits.detach()}),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str, tmp_path: Path) -> None:
    """With ``requires_grad`` as eager steps leave it; checks compare what lies within tuples."""

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss: Tensor = F.cross_entropy(logits, batch[1])
        with torch.set_grad_enabled(name != "views without gradients"):
            self.kept.append(KEPT[name](self, logits, loss))
        return loss

    assert replayed(with_step(step, Keeps), tmp_path, verify=5) >= 15


class Decay(Optimizer):
    """Counts its steps in an attribute, and computes a rate from that."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / math.sqrt(self.steps))
        return loss


def test_an_optimizer_that_counts_its_steps(tmp_path: Path) -> None:
    """It steps on the host; forward and backward are replayed."""
    assert replayed(lambda: LitDigits(Decay), tmp_path) >= 15


class Averaging(LitDigits):
    """Averages its weights in the step, by torch's own means, which look at a counter and count it up afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.averaged.update_parameters(self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.05, fused=True)


def test_averaged_weights(tmp_path: Path) -> None:
    assert replayed(Averaging, tmp_path) >= 15


class Share(Metric):
    """A state that is reduced by its mean, which the count of updates weights."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("share", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, logits: Tensor, target: Tensor) -> None:
        self.share = (logits > target).float().mean()

    def compute(self) -> Tensor:
        return self.share * 1.0


@pytest.mark.parametrize("make", [Share, lambda: PeakSignalNoiseRatio(data_range=1.0)])
def test_metrics_with_a_mean(make: Callable[[], Metric], tmp_path: Path) -> None:
    """torchmetrics multiplies with the number of updates, which only its own code names."""

    class Measured(LitDigits):
        def __init__(self) -> None:
            super().__init__()
            self.metric = make()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self(batch[0])
            self.metric(logits.detach(), F.one_hot(batch[1], 10).float())
            self.log("metric", self.metric)
            loss: Tensor = F.cross_entropy(logits, batch[1])
            return loss

    assert replayed(Measured, tmp_path) >= 15


class Weighted(LitDigits):
    """Weights its classes with a list of numbers, one of which is raised once."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0] * 10

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], weight=torch.tensor(self.weights))

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 13:
            self.weights[0] += 0.1


def test_a_list_of_numbers_that_changes_once(tmp_path: Path) -> None:
    """It is captured anew, and nothing else is blamed."""
    assert replayed(Weighted, tmp_path) >= 10


def test_names_that_are_returned(tmp_path: Path) -> None:
    """Of files, which are others in each batch: the step hands them on, and does not read them."""
    given: list[Any] = []

    def named(self: Any, batch: Any, index: int) -> Any:
        x, y = batch
        names = [f"{float(row.sum()):.6f}.png" for row in x]
        return {"x": x, "y": y, "names": names} if self.trainer.training else batch

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self(batch["x"]), batch["y"]), "names": batch["names"], "first": batch["x"]}

    def compare(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["names"] == batch["names"] == [f"{float(row.sum()):.6f}.png" for row in outputs["first"]]
        given.append(outputs["names"])

    assert replayed(with_step(step, on_before_batch_transfer=named, on_train_batch_end=compare), tmp_path) >= 14
    assert len({str(names) for names in given}) > 20


class Smooth(LitDigits):
    """Keeps a moving average of its loss in Python, and logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = F.cross_entropy(self(batch[0]), batch[1])
        self.smooth = 0.9 * self.smooth + 0.1 * loss.item()
        self.log("smooth", self.smooth)
        return loss


def test_a_moving_average_that_is_logged(tmp_path: Path) -> None:
    """It is computed of an owner's number and of one that is read from the device, in double precision as in Python."""
    assert replayed(Smooth, tmp_path) >= 15


class Asking(LitDigits):
    """Tells containers apart by their class, as much code does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if type(batch) not in (list, tuple):
            raise TypeError(type(batch))
        loss: Tensor = F.cross_entropy(self(batch[0]), batch[1])
        self.log("step", self.global_step)
        return loss


class Telling(LitDigits):
    """Says in an error what it got."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if not torch.is_tensor(x):
            raise TypeError(f"expected a tensor, got {type(x)}")
        loss: Tensor = F.cross_entropy(self(x), y)
        return loss


class AskingNumbers(LitDigits):
    """Takes other ways for what is not quite a number."""

    asks: Callable[[Any, Any], bool] = lambda module, batch_idx: type(batch_idx) is int

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = F.cross_entropy(self(batch[0]), batch[1])
        return loss * (2 if self.asks(batch_idx) else 3)


@pytest.mark.parametrize("kind", [Asking, Telling])
def test_code_that_asks_for_classes(kind: type[LitDigits], tmp_path: Path) -> None:
    """Of what is no stand-in, or only to say it in an error: stand-ins are followed as without."""
    assert replayed(kind, tmp_path) >= 15


ASKING: dict[str, Callable[..., bool]] = {
    "an argument": lambda module, batch_idx: type(batch_idx) is int,
    "an attribute": lambda module, batch_idx: type(module.global_step) is int,
    "an argument of another name": lambda module, batch_idx: is_integer(batch_idx),
    "a variable": lambda module, batch_idx: [type(each) for each in (module, batch_idx)][1] is int,
    "in an error that is handled": lambda module, batch_idx: told_by_an_error(batch_idx) == "int",
    "by what another gives": lambda module, batch_idx: its_class()(batch_idx) is int,
    "by another function": lambda module, batch_idx: list(map(type, (module, batch_idx)))[1] is int,
}


def told_by_an_error(value: Any) -> str:
    (held,) = (value,)
    try:
        raise ValueError(type(held).__name__)
    except ValueError as error:
        return str(error)


def its_class() -> Any:
    return type


def is_integer(value: Any, /) -> bool:
    return type(value) is int


@pytest.mark.filterwarnings("ignore:graphplan runs this step eagerly")
@pytest.mark.parametrize("name", ASKING)
def test_code_that_asks_for_the_class_of_a_stand_in(name: str, tmp_path: Path) -> None:
    """It gets that of a number, though no replay is for the numbers of all steps then, and hears how to ask."""
    callback = tape(on_failure="eager", verify="off")
    make = with_step(AskingNumbers.training_step, asks=ASKING[name])
    assert_same_fits(fit(make, tmp_path / "eager"), fit(make, tmp_path / "graphed", callback))
    assert "use isinstance()" in str(list(callback.stats.reasons))


class Checkpointing(torch.autograd.Function):
    """Recomputes its part in the backward pass, as people did before torch could."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *params: Tensor) -> Tensor:
        ctx.run, ctx.x, ctx.params = run, x, params
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.run(x.view_as(x))
        found = torch.autograd.grad(made, [x, *ctx.params], grads, allow_unused=True)
        return (None, *found)


class Checkpointed(LitDigits):
    """Has the gradients of parameters as results of a function of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, *others = self.net
        logits = Checkpointing.apply(torch.nn.Sequential(*others), first(batch[0]), *others[-1].parameters())
        loss: Tensor = F.cross_entropy(logits, batch[1])
        return loss


def test_gradients_that_a_function_of_the_users_returns(tmp_path: Path) -> None:
    """Autograd takes one that nobody else holds as it is, and copies others: a trace holds none."""
    assert replayed(Checkpointed, tmp_path) >= 15


class Players(LitDigits):
    """Steps two optimizers itself, and then asks how many steps there were."""

    def __init__(self, rate: int) -> None:
        super().__init__(schedule=None)
        self.automatic_optimization = False
        self.rate = rate
        self.register_buffer("slow", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = F.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        if self.global_step % self.rate == 0:
            self.slow += loss.detach()
        self.log("steps", self.global_step)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), 0.1, fused=True) for layer in (self.net[0], self.net[-1])]


@pytest.mark.parametrize(("rate", "least"), [(1, 12), (4, 8)])
def test_steps_counted_within_the_step(rate: int, least: int, tmp_path: Path) -> None:
    """Lightning's count has gone on by then: it follows from what it was before the step."""
    assert replayed(lambda: Players(rate), tmp_path) >= least


class Adversaries(Players):
    """Has a loss of each player begin at a step, as ports of adversarial training to Lightning 2 do."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            weight = 0.0 if self.global_step < self.rate else 1.0
            loss = F.cross_entropy(self(batch[0]), batch[1]) + weight * self(batch[0]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss.detach())


@pytest.mark.parametrize(("begins", "least"), [(30, 18), (31, 18), (1000, 24)])
def test_a_threshold_of_steps_counted_within_the_step(begins: int, least: int, tmp_path: Path) -> None:
    """The count is read before the first optimizer steps and after it; at an odd one the losses begin in one step."""
    assert_fit_equals_eager(lambda: Adversaries(begins), tmp_path, replayed=least, max_epochs=4)


class Curriculum(LitDigits):
    """Raises a share in each step until it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.share = min(1.0, self.share + 0.08)
        loss: Tensor = F.cross_entropy(self(batch[0] * self.share), batch[1])
        return loss


def test_a_curriculum_that_reaches_its_bound(tmp_path: Path) -> None:
    """Before that the number is followed; the two traces of what comes after may straddle it."""
    assert replayed(Curriculum, tmp_path) >= 15


class Alternating(LitDigits):
    """Counts its steps, and does something else in each fourth of them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss * 2 if self.count % 4 == 3 else loss


@pytest.mark.parametrize("warmup_steps", [1, 2, 3])
def test_a_counter_that_is_first_seen_to_change_between_traces(warmup_steps: int, tmp_path: Path) -> None:
    assert replayed(Alternating, tmp_path, warmup_steps=warmup_steps) >= 12


_INSTALLED = """
def note(module, loss):
    module.rows.append((module.global_step, loss.item()))


def warmed_up(module, loss):
    return loss if module.current_epoch else loss * 0.1


def masked(loss):
    def element(batch_idx: int) -> int:
        return batch_idx

    return loss * element(1)
"""


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module that is installed in ``folder``."""
    home = folder / "site-packages"
    home.mkdir()
    (home / "recordlike.py").write_text(_INSTALLED, encoding="utf-8")
    monkeypatch.syspath_prepend(str(home))
    return import_module("recordlike")


def test_counts_that_a_package_keeps_for_batches_of_two_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a package reads has a stand-in from the first trace on, as what the user's code reads."""
    package = installed(tmp_path, monkeypatch)

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss_of(batch)
        package.note(self, loss)
        return loss

    callback = tape()
    kind = with_step(step, rows=[])
    found = fit(kind, tmp_path / "run", callback, sizes=(20, 12) * 15, max_epochs=1)
    assert [count for count, _ in found.module.rows] == list(range(30))
    assert callback.stats.replayed >= 12, callback.report()
    assert not [event for event in callback.stats.events if event.startswith("traced anew")]


def test_a_package_with_an_argument_named_like_a_number_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of annotated arguments are texts in its code. That is no reason to guard the number."""
    package = installed(tmp_path, monkeypatch)

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = package.masked(self.loss_of(batch))
        return loss

    callback = tape()
    fit(with_step(step), tmp_path / "run", callback, sizes=(20,) * 20, max_epochs=1)
    assert callback.stats.replayed == 15, callback.report()
    assert not [event for event in callback.stats.events if event.startswith("traced anew")]


def test_a_package_that_branches_on_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch is the same in both traces, and only a property of Lightning's leads the package to it."""
    package = installed(tmp_path, monkeypatch)

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = package.warmed_up(self, self.loss_of(batch))
        return loss

    callback, kind = tape(verify=False), with_step(step)
    found = fit(kind, tmp_path / "graphed", callback, sizes=(20,) * 20, max_epochs=2)
    assert_same_fits(fit(kind, tmp_path / "eager", sizes=(20,) * 20, max_epochs=2), found)
    assert callback.stats.replayed >= 12, callback.report()


class Playing(LitDigits):
    """Returns a reward that an installed package keeps: alike in the traced steps, and another one later."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self(batch[0]), batch[1]), "reward": torchmetrics.reward}

    def on_train_batch_end(self, *args: Any) -> None:
        torchmetrics.reward = float(self.global_step > 8)


def test_a_replay_that_differs_is_told_of_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager step's outcome stands, so that the fit is the one without the callback."""
    monkeypatch.setattr(torchmetrics, "reward", 0.0, raising=False)
    with pytest.warns(UserWarning, match=r"replay \d+ of the training step is not what the eager step does: .*reward"):
        found = fit(Playing, tmp_path / "graphed", tape(on_failure="eager", verify=1))
    torchmetrics.reward = 0.0
    assert_same_fits(fit(Playing, tmp_path / "eager"), found)
