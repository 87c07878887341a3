"""Entries of the zoo for some steps on the CPU: replayed or justly refused, and equal to eager. What needs a library of
the extra ``zoo`` is skipped without it.
"""

from __future__ import annotations

from typing import Any

import pytest

from recipes.zoo.clock import Turns
from recipes.zoo.measuring import in_loop, in_service, in_trainer
from recipes.zoo.registry import load_entries
from recipes.zoo.training import Run, recording_warnings

WITH_TORCH = (
    "science/mlp", "science/pinn", "science/functional_ensemble", "generative/vae", "generative/gan_manual",
    "generative/nerf", "language/lstm", "language/torch_encoder", "rl/sac_manual", "series/tcn_quantiles",
    "vision/moco", "vision/dino",
)  # fmt: skip
WITH_LIBRARIES = (
    "language/bert", "language/gpt2", "language/t5", "language/lora_gpt2", "vision/hf_vit", "speech/wav2vec2",
    "vision/timm_mobilenetv3_small_050", "vision/smp_unet", "vision/torchmetrics", "graphs/gcn", "science/ode_rk4",
    "science/e3nn_tensor_product", "generative/diffusion_unet", "series/forecasting_nbeats",
)  # fmt: skip


def _run(name: str) -> Run:
    entry = load_entries()[name]
    for need in entry.needs:
        pip, _, module = need.partition(":")
        pytest.importorskip(module or pip.replace("-", "_"))
    return Run(entry, gpu=False, warm=12, steps=10, turns=Turns(None))


def _assert_held(run: Run, row: dict[str, Any]) -> None:
    assert row["equal"] in ("bitwise", "within spread"), row
    replayed = row["form"] == "whole" and row["counts"]["replayed"] > 0
    assert replayed or run.entry.refused, (row["reasons"], row.get("warnings"))


@pytest.mark.parametrize("name", WITH_TORCH + WITH_LIBRARIES)
@pytest.mark.crossed(2)
def test_in_a_trainer(name: str) -> None:
    run, row = _run(name), dict[str, Any]()
    with recording_warnings():
        in_trainer(run, row)
    _assert_held(run, row)


@pytest.mark.parametrize("name", WITH_TORCH[:6])
@pytest.mark.crossed(2, 1)
def test_in_a_plain_loop(name: str) -> None:
    run, row = _run(name), dict[str, Any]()
    with recording_warnings():
        in_loop(run, row)
    _assert_held(run, row)


@pytest.mark.parametrize("name", ["language/bert", "vision/hf_vit"])
def test_predictions(name: str) -> None:
    run, row = _run(name), dict[str, Any]()
    with recording_warnings():
        in_service(run, row)
    _assert_held(run, row)
