"""A package's line that cannot be replayed is named with the argument that has the package come to it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

from graphplan import HostSyncError, graph_step
from tests.twins import BEFORE_REPLAY

CALLS = 10
Loss = Callable[[Tensor], Tensor]


def _run(net: nn.Module, loss: Loss, size: tuple[int, ...] = (6, 4)) -> Any:
    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        result = loss(x)
        result.backward()
        return result.detach()

    graphed = graph_step(step, owners={"net": net}, backend="tape")
    for _ in range(CALLS):
        graphed(torch.rand(size))
    return graphed


def _normed(**options: Any) -> tuple[nn.Module, Loss]:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **options))
    return net, lambda x: net(x).square().sum()


def _encoded(**options: Any) -> tuple[nn.Module, Loss]:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    return net, lambda x: net(x[None], mask=mask, **options).sum()


def _decoded(**options: Any) -> tuple[nn.Module, Loss]:
    net = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), 1)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    return net, lambda x: net(x[None], x[None], tgt_mask=mask, **options).sum()


def _measured(kind: Any, **options: Any) -> tuple[nn.Module, Loss]:
    net, metric = nn.Linear(4, 2), kind(**options)

    def loss(x: Tensor) -> Tensor:
        out = net(x)
        scores = out.detach().softmax(1)
        if kind is MeanMetric:
            metric(scores)
        else:
            metric(scores if kind is MulticlassAccuracy else scores[:, 0], x[:, 0].round().long())
        return out.sum()

    return net, loss


Case = tuple[Callable[..., tuple[nn.Module, Loss]], dict[str, Any], dict[str, Any], str]
NONE = r"py:\d+ does so because `{0} is None`: pass `{1}` other than None to {2}\."
KNOWN: dict[str, Case] = {
    "a module's argument": (
        _normed, {"momentum": None}, {"momentum": 0.1}, NONE.format(r"self\.momentum", "momentum", "BatchNorm1d"),
    ),
    "a call's argument": (
        _encoded, {}, {"is_causal": True}, NONE.format("is_causal", "is_causal", "the call of Trans.*r"),
    ),
    "under another name": (
        _decoded, {}, {"tgt_is_causal": True},
        NONE.format("is_causal", "tgt_is_causal", "the call of TransformerDecoder"),
    ),
    "a string that another one is wanted of": (
        partial(_measured, MeanMetric), {}, {"nan_strategy": "disable"},
        r"because `self\.nan_strategy != 'disable'`: pass `nan_strategy='disable'` to MeanMetric\.",
    ),
    "a string that decides further up": (
        partial(_measured, MulticlassAccuracy, num_classes=2), {}, {"average": "micro"},
        r"`average == 'micro'` is false \(average is 'macro'\): pass `average='micro'` to MulticlassAccuracy\.",
    ),
}  # fmt: skip
handed_on = pytest.mark.skipif(sys.version_info < (3, 11), reason="code tells lines only")


@handed_on
@pytest.mark.parametrize("name", KNOWN)
def test_the_argument_that_decides_is_named_and_does(name: str) -> None:
    make, given, advised, said = KNOWN[name]
    with pytest.raises(HostSyncError, match=said):
        _run(*make(**given))
    assert _run(*make(**{**given, **advised})).stats.replayed == CALLS - BEFORE_REPLAY


def test_an_argument_may_lead_to_the_next_read() -> None:
    """torchmetrics looks for labels first, then for logits, whatever it validates."""
    with pytest.raises(HostSyncError, match=r"`self\.validate_args` is True: pass `validate_args=False` to BinaryAcc"):
        _run(*_measured(BinaryAccuracy))
    with pytest.raises(HostSyncError, match=r"normalize_logits_if_needed.*names those\. Or pass on_failure="):
        _run(*_measured(BinaryAccuracy, validate_args=False))


def test_a_layer_that_is_left_out_by_chance() -> None:
    """With a probability of 0, how the draw compares is certain."""
    transformers = pytest.importorskip("transformers")

    def make(layerdrop: float) -> tuple[nn.Module, Loss]:
        sizes = {"hidden_size": 8, "num_attention_heads": 2, "ffn_dim": 8, "word_embed_proj_dim": 8}
        net = transformers.OPTModel(transformers.OPTConfig(vocab_size=8, layerdrop=layerdrop, **sizes)).train()
        return net, lambda x: net(input_ids=x.round().long() + 2)[0].sum()

    with pytest.raises(HostSyncError, match=r"is drawn \(.* is 0\.3\): pass `layerdrop=0\.0` to OPTConfig"):
        _run(*make(0.3))
    assert _run(*make(0.0)).stats.replayed == CALLS - BEFORE_REPLAY


PACKAGE = """
import torch


def either(x, checks=True, *, bound: int | None = None, other=None, scale=1.0):
    if not checks:
        return x
    return x * float(x.detach().sum())


def leaves(x, kind="read"):
    if kind == "plain":
        return x
    elif kind == "double":
        return x * 2
    return x * x.detach().sum().item()


def only_raises(x, kind="read"):
    if kind == "read":
        return x * x.detach().sum().item()
    else:
        raise ValueError(kind)


def missing(x, given=None):
    if given is None:
        return x * x.detach().sum().item()
    return x


def shortly(x, checks=True):
    return x * (x.detach().sum().item() if checks else 1)


def together(x, checks=True):
    if checks and (x.detach().sum() > -1e9):
        return x * 2
    return x


def one_of_two(x, checks=True, looks=True):
    if checks or looks:
        return x * x.detach().sum().item()
    return x


def reassigned(x, checks=True):
    if checks:
        checks = False
        return x * x.detach().sum().item()
    return x


def fixed(x):
    return shortly(x, checks=True)


def further(x, **options):
    return shortly(x, **options)


def within(x, checks=True):
    if checks:
        def inner():
            return x * x.detach().sum().item()
        return inner()
    return x


def whole(x, count=3):
    while count:
        return x * x.detach().sum().item()
    return x


class Layer(torch.nn.Module):
    def __init__(self, checks=True, share=0.5):
        super().__init__()
        self._checks, self.hidden = checks, True
        self.share = share

    def forward(self, x):
        if self._checks and self.hidden and self.training:
            return x * x.detach().sum().item()
        return x


class Made:
    def __init__(self, x, checks=True):
        self._checks = checks
        self.x = x * x.detach().sum().item() if self._checks else x


class Part(Made):
    def __init__(self, x, looks=True):
        super().__init__(x, checks=looks)


def makes(x):
    return Part(x).x


def by_chance(x, share=0.5):
    leaves_out = torch.rand([]) > 1
    if share:
        leaves_out = torch.rand([]) < share
    if not leaves_out:
        return x * 2
    return x
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A package that is installed."""
    file = tmp_path_factory.mktemp("venv") / "site-packages" / "installed.py"
    file.parent.mkdir()
    file.write_text(PACKAGE)
    spec = importlib.util.spec_from_file_location("installed", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SAID: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "an early return": (lambda p, x: p.either(x), r"`checks` is True: pass `checks=False` to either"),
    "one return of two": (
        lambda p, x: p.leaves(x),
        r"`kind == 'double'` is false \(kind is 'read'\): pass `kind='double'` to leaves",
    ),
    "a conditional expression": (lambda p, x: p.shortly(x), r"`checks` is True: pass `checks=False` to shortly"),
    "and": (lambda p, x: p.together(x), r"`checks` is True: pass `checks=False` to together"),
    "while": (lambda p, x: p.whole(x), r"`count` is 3: pass `count=0` to whole"),
    "by name": (lambda p, x: p.further(x, checks=True), r"`checks` is True: pass `checks=False` to further"),
    "a private attribute": (lambda p, x: p.Layer()(x), r"`self\._checks` is True: pass `checks=False` to Layer"),
    "what is being made": (lambda p, x: p.Part(x).x, r"`self\._checks` is True: pass `looks=False` to Part"),
    "around a function within": (lambda p, x: p.within(x), r"`checks` is True: pass `checks=False` to within"),
    "a draw": (
        lambda p, x: p.by_chance(x),
        r"`torch\.rand\(\[\]\) < share` is drawn \(share is 0\.5\): pass `share=0\.0` to by_chance",
    ),
}


@handed_on
@pytest.mark.parametrize("name", SAID)
def test_conditions_that_an_argument_decides(name: str, package: Any) -> None:
    call, said = SAID[name]
    net = nn.Linear(4, 2)
    with pytest.raises(HostSyncError, match=rf"installed\.py:\d+ does so because {said}\. Or pass on_failure="):
        _run(net, lambda x: call(package, net(x)).sum())


SILENT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "what is missing may be anything": lambda p, x: p.missing(x),
    "the other way only raises": lambda p, x: p.only_raises(x),
    "one of two that both lead there": lambda p, x: p.one_of_two(x),
    "a variable that has changed since": lambda p, x: p.reassigned(x),
    "an argument that the package passes": lambda p, x: p.fixed(x),
    "an object that the package makes": lambda p, x: p.makes(x),
    "the user's own code": lambda p, x: _own(x),
}


def _own(x: Tensor, checks: bool = True) -> Tensor:
    return x * x.detach().sum().item() if checks else x


@handed_on
@pytest.mark.parametrize("name", SILENT)
def test_no_argument_is_named_where_it_would_be_wrong(name: str, package: Any) -> None:
    net = nn.Linear(4, 2)
    with pytest.raises(HostSyncError, match=r"^(?!.*does so because).*names those\. Or pass on_failure="):
        _run(net, lambda x: SILENT[name](package, net(x)).sum())


def test_code_without_a_source_is_left_alone(tmp_path: Path) -> None:
    space: dict[str, Any] = {}
    exec(compile(PACKAGE, str(tmp_path / "site-packages" / "gone.py"), "exec"), space)
    net = nn.Linear(4, 2)
    with pytest.raises(HostSyncError, match=r"names those\. Or pass on_failure="):
        _run(net, lambda x: space["shortly"](net(x)).sum())
