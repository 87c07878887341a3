"""Rows about what a module is made of and how it is optimized: by hand, compiled, checkpointed, frozen, tied."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.checkpoint import checkpoint

from tests.lightning.parts import LitDigits
from tests.lightning.rows import FULL, Row
from tests.lightning.rows_of_trainers import scaled

# Manual optimization.


class Manual(LitDigits):
    """The digits' classifier with its optimizer stepped by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(schedule=None, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss_of(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "size": loss.new_tensor(1.0)}


class Gan(LitDigits):
    """A generator and a critic of digits, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__(schedule=None)
        self.automatic_optimization = False
        self.make = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
        self.judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def critic_loss(self, real: Tensor) -> Tensor:
        fake = self.make(torch.randn(len(real), 8, device=real.device)).detach()
        return F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake)).mean()

    def generator_loss(self, real: Tensor) -> Tensor:
        return F.softplus(-self.judge(self.make(torch.randn(len(real), 8, device=real.device)))).mean()

    def turn(self, optimizer: Any, loss_of: Any, real: Tensor, name: str) -> None:
        self.toggle_optimizer(optimizer)
        loss = loss_of(real)
        self.log(name, loss, on_step=True, on_epoch=True)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        self.turn(critic, self.critic_loss, batch[0], "critic")
        self.turn(generator, self.generator_loss, batch[0], "generator")

    def configure_optimizers(self) -> Any:
        generator = AdamW(self.make.parameters(), lr=2e-3, betas=(0.5, 0.9), fused=True)
        return [generator, SGD(self.judge.parameters(), lr=0.05, momentum=0.9, fused=True)], []


class Alternating(Gan):
    """Two batches for the critic, then one for the generator."""

    def is_generators_turn(self, batch: Any, batch_idx: int) -> bool:
        return batch_idx % 3 == 2

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        if batch_idx % 3 == 2:
            self.turn(generator, self.generator_loss, batch[0], "generator")
        else:
            self.turn(critic, self.critic_loss, batch[0], "critic")


class Accumulating(Manual):
    """Gradients of two batches per step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss_of(batch) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


class ByEpoch(Gan):
    """Schedulers stepped by hand where that is free of the graph: at an epoch's end."""

    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        return optimizers, [StepLR(optimizer, 1, 0.5) for optimizer in optimizers]

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()


class ByStep(Gan):
    """Schedulers stepped in the step: the critic's between the two optimizers and again in the end."""

    def configure_optimizers(self) -> Any:
        optimizers, _ = super().configure_optimizers()
        return optimizers, [ExponentialLR(optimizer, 0.95) for optimizer in optimizers]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[misc]
        schedulers: Any = self.lr_schedulers()
        self.turn(critic, self.critic_loss, batch[0], "critic")
        schedulers[1].step()
        self.turn(generator, self.generator_loss, batch[0], "generator")
        schedulers[1].step()
        schedulers[0].step()


class ScaledByHand(Manual):
    """Lightning scales in ``manual_backward`` and steps through the scaler; it refuses to clip there."""

    def __init__(self, make_optimizer: Any = None, schedule: Any = None) -> None:
        super().__init__()
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss_of(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_batch_end(self, *args: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def _scaled_by_hand() -> Row:
    row = scaled(None)
    row.make = ScaledByHand
    return row


def _steps(number: int) -> Any:
    return lambda fit: (fit.trainer.global_step, fit.callback.stats.captured) == (number, 1)


def _two_programs(fit: Any) -> bool:
    return fit.callback.stats.captured == 2


MANUAL: dict[str, Row] = {
    "optimized by hand": Row(Manual, shows=_steps(18)),
    "a GAN with toggled optimizers": Row(Gan, shows=_steps(36)),
    "schedulers by hand": Row(ByEpoch, shows=_steps(36)),
    "schedulers by hand, in the step": Row(ByStep, shows=_steps(36)),
    "variant, a method": Row(Alternating, 10, options={"variant": "is_generators_turn"}, shows=_two_programs),
    "variant, a function": Row(
        Alternating, 10, options={"variant": lambda batch, index: (index % 3 == 2, "turn")}, shows=_two_programs
    ),
    "accumulation by hand": Row(Accumulating, 10, options={"variant": lambda batch, index: index % 2}),
    "a scaler by hand": _scaled_by_hand(),
}

# Kinds of modules.


class Network(nn.Module):
    """A part of the user's own: torch's are only compiled as parts of one."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Compiled(LitDigits):
    """A network that is compiled, in place or not."""

    def __init__(self, in_place: bool = False, backend: str = "aot_eager") -> None:
        super().__init__()
        torch._dynamo.reset()
        self.net: Any = Network(self.net)
        if in_place:
            self.net.compile(backend=backend, fullgraph=True)
        else:
            self.net = torch.compile(self.net, backend=backend, fullgraph=True)


class Silent(LitDigits):
    """Logs nothing, which Lightning cannot do in a compiled step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch)


def compiled_as_a_whole() -> Any:
    """A compiled LightningModule, as Lightning takes it."""
    torch._dynamo.reset()
    return torch.compile(Silent(), backend="eager")


class Checkpointed(LitDigits):
    """Computes its activations a second time in the backward pass."""

    def __init__(self, drops: float = 0.1, **options: Any) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(drops), nn.Linear(64, 64))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.net(checkpoint(self.hidden, x.requires_grad_(), **self.options))


class Tied(LitDigits):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
        self.net[2].weight = self.net[0].weight


class Averaging(LitDigits):
    """Rebinds a buffer in every step and reads it in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.center = 0.9 * self.center + 0.1 * logits.detach().mean(0)
        return F.cross_entropy(logits - self.center, y)


def frozen() -> LitDigits:
    """The first layer gets no gradients and stays."""
    module = LitDigits()
    module.net[0].requires_grad_(False)
    return module


_KEEPS = {"preserve_rng_state": False}
PARTS: dict[str, Row] = {
    **MANUAL,
    # Its code runs for Python to see from the first trace on, which makes tracing begin anew.
    "compiled part": Row(Compiled, FULL - 1),
    "part compiled in place": Row(partial(Compiled, in_place=True), FULL - 1),
    "compiled as a whole": Row(compiled_as_a_whole, FULL - 1),
    "checkpointed activations": Row(partial(Checkpointed, use_reentrant=False, **_KEEPS)),
    "checkpointed activations, reentrant": Row(partial(Checkpointed, use_reentrant=True, **_KEEPS)),
    "checkpointed activations that draw nothing": Row(partial(Checkpointed, 0.0, use_reentrant=False)),
    "tied weights": Row(Tied),
    "a frozen layer": Row(frozen),
    "a buffer that is bound anew": Row(Averaging, FULL),
}
