"""Small models, their batches and the optimizers that the equality tests combine."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from graphplan import graph_step
from tests.twins import Rig

CLASSES = 4
VOCABULARY = 24
CALLS = 20
Batch = tuple[Tensor, Tensor]


class Mlp(nn.Sequential):
    """Two layers with batch normalisation and dropout."""

    def __init__(self, features: int = 8, width: int = 16) -> None:
        layers = [nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]
        super().__init__(*layers, nn.Linear(width, CLASSES))


class Transformer(nn.Module):
    """Four encoder layers with dropout over learned token and position embeddings."""

    def __init__(self, width: int = 16, length: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(x) + self.positions).mean(dim=1))


class Lstm(nn.Module):
    """Two recurrent layers with dropout between them."""

    def __init__(self, features: int = 5, width: int = 10) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Cnn(nn.Sequential):
    """Two convolutions with batch normalisation, pooling and dropout of channels."""

    def __init__(self, channels: int = 4) -> None:
        first = [nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(channels, channels, 3, bias=False), nn.BatchNorm2d(channels), nn.GELU(), nn.Dropout2d(0.1)]
        super().__init__(*first, *second, nn.Flatten(), nn.Linear(channels * 4, CLASSES))


def _labels(values: Tensor) -> Tensor:
    """Four classes that depend on the values, so that there is something to learn."""
    flat = values.reshape(len(values), -1).double()
    half = flat.shape[1] // 2
    return 2 * (flat[:, :half].mean(1) > flat[:, half:].mean(1)).long() + (flat[:, 0] > flat.mean(1)).long()


def _floats(*shape: int, size: int, generator: torch.Generator) -> Batch:
    x = torch.randn(size, *shape, generator=generator)
    return x, _labels(x)


def _tokens(*, size: int, generator: torch.Generator) -> Batch:
    x = torch.randint(VOCABULARY, (size, 6), generator=generator)
    return x, torch.bucketize(x.double().mean(1), torch.tensor([9.5, 11.5, 13.5]).double())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "mlp": (Mlp, partial(_floats, 8)),
    "transformer": (Transformer, _tokens),
    "lstm": (Lstm, partial(_floats, 4, 5)),
    "cnn": (Cnn, partial(_floats, 1, 8, 8)),
}

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-2, weight_decay=0.05),
    "amsgrad": partial(Adam, lr=1e-2, amsgrad=True),
    "nesterov": partial(SGD, lr=5e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adagrad": partial(Adagrad, lr=3e-2, lr_decay=0.01),
}


def batches(draw: Callable[..., Batch], sizes: Iterable[int]) -> list[Batch]:
    """Draw one batch for each size from a generator of its own."""
    generator = torch.Generator().manual_seed(77)
    return [draw(size=size, generator=generator) for size in sizes]


def float_batches(count: int, size: int = 6) -> list[Batch]:
    """Draw what the MLP takes."""
    return batches(MODELS["mlp"][1], [size] * count)


def training_rig(
    model_name: str,
    optimizer_name: str,
    *,
    fused: bool | None = True,
    prepare: Callable[[Optimizer], object] | None = None,
    sizes: Iterable[int] = (8,) * 200,
) -> Rig:
    """A usual training loop: clipped gradients inside the step, a cosine schedule outside, stepped after every call."""
    make_model, draw = MODELS[model_name]
    calls = batches(draw, sizes)
    model = make_model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters(), fused=fused)
    if prepare is not None:
        prepare(optimizer)
    scheduler = CosineAnnealingLR(optimizer, T_max=len(calls))

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    owners = {"model": model, "optimizer": optimizer}
    return Rig(train_step, owners, list(calls), after=lambda index: scheduler.step())


def descent(model: nn.Module, optimizer: Optimizer, loss_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A training step on ``loss_of`` a batch, which may use ``model``; its owners are the step's attribute."""

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step.owners = {"model": model, "optimizer": optimizer}  # type: ignore[attr-defined]
    return step


def assert_losses_as_eager(
    make: Callable[[nn.Module], Optimizer], changes: Mapping[int, Callable[[Any], object]]
) -> Any:
    """Train a layer in twenty steps, eagerly and replayed, with ``changes`` to the optimizer that ``make(model)`` made
    before calls of those numbers. Every loss has to be the same; the graphed step is handed out.
    """

    def run(*, replays: bool) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = make(model)
        step: Any = descent(model, optimizer, lambda x: model(x).square().mean())
        call = graph_step(step, owners=step.owners, backend="tape", warmup_steps=1, verify="off") if replays else step
        losses = []
        for number in range(20):
            changes.get(number, _leave_alone)(optimizer)
            losses.append(call(torch.arange(8.0).view(2, 4)).item())
        return losses, call

    (replayed, call), (eager, _) = run(replays=True), run(replays=False)
    assert replayed == eager
    return call


def _leave_alone(optimizer: Optimizer) -> None:
    """Changes nothing."""


class Memory:
    """A plain object that a step keeps its state on."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


_HIDDEN = itemgetter(weakref.WeakKeyDictionary())


def _hidden() -> Any:
    """What only a C extension's object leads to."""
    _, (held,) = _HIDDEN.__reduce__()  # type: ignore[misc]
    return held


class Hidden:
    """An object that keeps its attributes where nobody looks for them."""

    def __setattr__(self, name: str, value: Any) -> None:
        _hidden().setdefault(self, {})[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return _hidden()[self][name]
        except KeyError:
            raise AttributeError(name) from None


class Lookahead(Optimizer):
    """An optimizer around another one, made as timm's is: ``Optimizer.__init__`` is not called, on purpose."""

    def __init__(self, base: Optimizer, every: int = 3) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.base, self.every, self.taken = base, every, 0
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state: Any = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """A step of the other, and now and then half of the way back."""
        loss = self.base.step(closure)
        self.taken += 1
        for param in self.param_groups[0]["params"] if self.taken % self.every == 0 else ():
            slow = self.state[param].setdefault("slow", param.clone())
            slow.lerp_(param, 0.5)
            param.copy_(slow)
        return loss

    def state_dict(self) -> Any:
        """The other's."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Into the other."""
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class Box(Hidden):
    """One thing, named ``item``, that nobody can look at."""

    def __init__(self, item: Any) -> None:
        self.item = item


def updating_rig(
    update: Callable[[nn.Module, Tensor, Tensor], Any],
    prepare: Callable[[nn.Module], object],
    after: Callable[[nn.Module, int], object] = lambda model, index: None,
) -> Rig:
    """A training step of an MLP that also calls ``update(model, x, loss)``; ``prepare`` makes what it needs."""
    model = Mlp()
    prepare(model)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)

    def train_step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss, update(model, x, loss)

    owners = {"model": model, "optimizer": optimizer}
    return Rig(train_step, owners, list(float_batches(CALLS)), after=partial(after, model))


def attributes(**values: Any) -> Callable[[nn.Module], None]:
    """Make a ``prepare`` for :func:`updating_rig` that sets attributes, calling those values that are callable."""

    def prepare(model: nn.Module) -> None:
        for name, value in values.items():
            setattr(model, name, value() if callable(value) else value)

    return prepare


def update_by_number(param: Tensor, mean: Tensor, lr: float, step: int) -> None:
    """What an optimizer has in a file of its own, as third parties do: a number that changes in each step."""
    param.add_(mean, alpha=-lr / (1 - 0.9**step))


def keeping_rig(
    body: Callable[[Any, Tensor, Tensor, Tensor], Any],
    calls: int,
    after: Callable[[Any, int], object] = lambda model, index: None,
    **kept: Any,
) -> Rig:
    """Steps of a classifier that end with ``body(model, loss, scores, y)``; ``kept`` are attributes of the model."""
    model: Any = nn.Module()
    model.layer = nn.Linear(8, 3)
    for name, value in kept.items():
        setattr(model, name, value)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5, fused=True)

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        scores = model.layer(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        optimizer.step()
        return body(model, loss, scores, y)

    batches = [(torch.randn(6, 8), torch.randint(3, (6,))) for _ in range(calls)]
    owners, extra = {"model": model, "optimizer": optimizer}, {"kept": model.__dict__}
    return Rig(step, owners, batches, after=partial(after, model), extra=extra)
