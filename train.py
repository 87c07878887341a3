"""Train or predict from a Hydra configuration: ``python train.py``, ``python train.py mode=inference ckpt_path=...``.

Every component is built from its ``_target_`` in ``conf/``. What is here is the order only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig

from graphplan import GraphPlanCallback, GraphPlanError, OptionError, Policy, graphed
from recipes.configuration import ConfigError, check_config, explain_overrides


def fit(trainer: pl.Trainer, model: pl.LightningModule, data: pl.LightningDataModule, cfg: DictConfig) -> None:
    """Train, validate, and say where the checkpoint is."""
    trainer.fit(model, datamodule=data, ckpt_path=cfg.ckpt_path)
    if not trainer.is_global_zero:
        return
    for name, value in sorted(trainer.callback_metrics.items()):
        if not name.endswith(("_step", "_epoch")):
            print(f"{name}: {value:.4f}")
    if isinstance(trainer.checkpoint_callback, ModelCheckpoint):
        print(f"checkpoint: {trainer.checkpoint_callback.best_model_path}")


def predict(trainer: pl.Trainer, model: pl.LightningModule, data: pl.LightningDataModule, cfg: DictConfig) -> None:
    """Predict the validation set from a checkpoint with a graphed method, and say how much of it is right."""
    policy = Policy.parse("inference", instantiate(cfg.mode.policies.get("inference"), _convert_="all"))
    step = graphed(
        model.predict_step,
        owners={"model": model},
        static_roles=policy.static_roles,
        copy_roles=policy.copy_roles,
        backend=cfg.backend.name,
        **instantiate(cfg.shapes, _convert_="all"),
    )
    # Lightning asks for the code of this method, so it gets a function and not what is graphed.
    model.predict_step = lambda batch: step(batch)  # type: ignore[method-assign, misc]
    batches: Any = trainer.predict(model, datamodule=data, ckpt_path=cfg.ckpt_path)
    correct = torch.cat([batch["correct"].flatten() for batch in batches])
    print(f"predictions: {correct.numel()} in {len(batches)} batches")
    print(f"accuracy: {correct.float().mean():.4f}")
    print(step.report())


def tell(callback: GraphPlanCallback) -> None:
    """Print the report of a fit, and write it as a page where what draws pages is installed."""
    print(callback.report())
    page = Path(HydraConfig.get().runtime.output_dir, "report.html")
    try:
        page.write_text(callback.report("html"), encoding="utf-8")
        print(f"report: {page}")
    except OptionError as error:
        print(f"no page: {error}")


def run(cfg: DictConfig) -> None:
    """Build everything that ``cfg`` describes and do what its mode says."""
    check_config(cfg)
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    data = instantiate(cfg.data)
    model = instantiate(cfg.model, **instantiate(cfg.optimizer, _convert_="all"))
    callbacks = {name: instantiate(node, _convert_="all") for name, node in cfg.callbacks.items()}
    trainer = instantiate(cfg.trainer, callbacks=list(callbacks.values()))
    work = {"train": fit, "inference": predict}[cfg.mode.name]
    work(trainer, model, data, cfg)
    if cfg.mode.name == "train" and "graphplan" in callbacks and trainer.is_global_zero:
        tell(callbacks["graphplan"])


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """The command line."""
    try:
        run(cfg)
    except (ConfigError, GraphPlanError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    with explain_overrides():
        main()
