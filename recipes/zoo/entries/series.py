"""Time series: pytorch-forecasting and gluonts with their own LightningModules, and networks by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.zoo.batches import COUNT, many
from recipes.zoo.registry import Case, Scale, entry

HISTORY, HORIZON = 24, 6


def _dataset(**options: Any) -> Any:
    """Sales of a few shops, as pytorch-forecasting takes them."""
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    draw = np.random.default_rng(0)
    frames = [
        pd.DataFrame({
            "time": np.arange(80), "shop": f"shop_{shop}", "price": draw.random(80).astype("float32"),
            "sales": (10 + 5 * np.sin(np.arange(80) / 6 + shop) + draw.random(80)).astype("float32"),
        })
        for shop in range(4)
    ]  # fmt: skip
    return TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True), time_idx="time", target="sales", group_ids=["shop"],
        max_encoder_length=HISTORY, max_prediction_length=HORIZON, time_varying_unknown_reals=["sales"], **options,
    )  # fmt: skip


_COVARIATES: dict[str, Any] = {
    "static_categoricals": ["shop"], "time_varying_known_reals": ["time", "price"], "add_relative_time_idx": True,
    "add_target_scales": True,
}  # fmt: skip
FORECASTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "TemporalFusionTransformer": (
        {**_COVARIATES, "add_encoder_length": True},
        {"hidden_size": 16, "attention_head_size": 2, "hidden_continuous_size": 8, "dropout": 0.1},
    ),
    "NBeats": ({}, {"widths": [32, 64], "num_blocks": [2, 2]}),
    "NHiTS": (
        {"static_categoricals": ["shop"], "time_varying_known_reals": ["time", "price"]},
        {"hidden_size": 32, "dropout": 0.1},
    ),
    "RecurrentNetwork": (
        {"static_categoricals": ["shop"], "time_varying_known_reals": ["time"]}, {"hidden_size": 16, "rnn_layers": 2}),
    "DeepAR": ({"static_categoricals": ["shop"], "time_varying_known_reals": ["time"]}, {"hidden_size": 16}),
}  # fmt: skip
"""What each asks of the data, and of itself."""


def _forecaster(name: str) -> Callable[[Scale], Case]:
    def make(scale: Scale) -> Case:
        import pytorch_forecasting

        asked, options = FORECASTERS[name]
        data = _dataset(**asked)
        made = getattr(pytorch_forecasting, name).from_dataset(
            data, learning_rate=1e-3, optimizer="adamw", log_interval=-1, reduce_on_plateau_patience=1000, **options
        )
        loader = data.to_dataloader(train=True, batch_size=scale.pick(16, 64), drop_last=True)
        return Case(made, [batch for batch, _ in zip(loader, range(COUNT), strict=False)], clip=0.1)

    return make


_FINITE = "the library's metrics look on the host whether the loss is finite"
for _name in FORECASTERS:
    entry(f"series/forecasting_{_name.lower()}", "pytorch-forecasting", "pandas", refused=_FINITE)(_forecaster(_name))


def _estimator(name: str, **options: Any) -> Callable[[Scale], Case]:
    def make(scale: Scale) -> Case:
        import gluonts.torch as gluon
        import numpy as np
        import pandas as pd
        from gluonts.dataset.common import ListDataset

        draw = np.random.default_rng(0)
        rows = [{"start": pd.Period("2020-01-01", freq="h"), "target": draw.random(200) + k} for k in range(4)]
        asked = {"prediction_length": HORIZON, "context_length": HISTORY, "batch_size": scale.pick(16, 64), **options}
        made = getattr(gluon, name)(**asked)
        data = ListDataset(rows, freq="h")
        transformation = made.create_transformation()
        module = made.create_lightning_module()
        loader = made.create_training_data_loader(transformation.apply(data, is_train=True), module)
        return Case(module, [batch for batch, _ in zip(loader, range(COUNT), strict=False)], clip=10.0)

    return make


entry("series/gluonts_deepar", "gluonts", "pandas")(_estimator("DeepAREstimator", freq="h", hidden_size=16))
entry("series/gluonts_feedforward", "gluonts", "pandas")(
    _estimator("SimpleFeedForwardEstimator", hidden_dimensions=[16])
)
entry("series/gluonts_patchtst", "gluonts", "pandas")(_estimator("PatchTSTEstimator", patch_len=4, d_model=16, nhead=2))
entry("series/gluonts_dlinear", "gluonts", "pandas")(_estimator("DLinearEstimator"))


class _Convolutions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for level in range(4):
            reach = 2 ** (level + 1)
            conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(width if level else 3, width, 3, dilation=2**level))
            layers += [nn.ConstantPad1d((reach, 0), 0.0), conv, nn.ReLU(), nn.Dropout(0.1)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, HORIZON)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.transpose(1, 2))[..., -1])
        return out


@entry("series/tcn_quantiles")
def tcn(scale: Scale) -> Case:
    """Dilated convolutions with weight normalisation and a quantile loss."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        gap = batch[1] - model(batch[0])
        return sum((torch.maximum(q * gap, (q - 1) * gap).mean() for q in (0.1, 0.5, 0.9)), gap.new_zeros(()))

    size = scale.pick(16, 128)
    return Case(
        _Convolutions(scale.pick(8, 64)),
        many(lambda: (torch.randn(size, HISTORY, 3), torch.randn(size, HORIZON))),
        loss,
    )


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, HORIZON)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.rnn(x)
        out: Tensor = self.head(hidden[-1])
        return out


@entry("series/lstm_with_names")
def lstm_names(scale: Scale) -> Case:
    """An LSTM whose batches carry the series' names as strings."""
    serial = iter(range(1_000_000))
    size = scale.pick(16, 128)

    def batch() -> dict[str, Any]:
        names = [f"series_{next(serial)}" for _ in range(size)]
        return {"x": torch.randn(size, HISTORY, 3), "y": torch.randn(size, HORIZON), "name": names}

    return Case(
        _Recurrent(scale.pick(16, 128)), many(batch), lambda model, batch: F.mse_loss(model(batch["x"]), batch["y"])
    )
