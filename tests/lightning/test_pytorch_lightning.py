"""Trainers of ``pytorch_lightning``: the same callback, the same numbers, whichever package is installed."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch

from graphplan import GraphPlanCallback, NotCapturedError, OptionError
from graphplan.check import fit as checked
from graphplan.environment.lightnings import callback_class, name_of

pl = pytest.importorskip("pytorch_lightning")
if pl.__name__ != "pytorch_lightning":
    pytest.skip("another package under that name", allow_module_level=True)
callback_connector = pytest.importorskip("pytorch_lightning.trainer.connectors.callback_connector")

ADOPTS = "parent=Callback" in getsource(callback_connector._validate_callbacks_list)
"""Whether Trainers take callbacks of the other package, which they ask for their state. Since 2.6."""
MadeFirst: Any = GraphPlanCallback if ADOPTS else callback_class("pytorch_lightning")

SCRIPT = """
import torch, pytorch_lightning as pl
from graphplan import GraphPlanCallback
assert issubclass(GraphPlanCallback, pl.Callback)
from torch.utils.data import DataLoader
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
callback = GraphPlanCallback(backend="tape")
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[callback])
trainer.fit(Module(), DataLoader(torch.randn(96, 4), batch_size=8))
assert callback.stats.replayed > 3, callback.report()
"""


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Logs, draws, validates and follows a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), fused=True)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4), "interval": "step"}]


class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
    """Twelve batches."""

    def train_dataloader(self) -> Any:
        rows = torch.arange(96 * 8, dtype=torch.float32).reshape(96, 8) / 768
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(96, 8)), batch_size=8)


def trained(path: Path, *callbacks: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and metrics after two epochs."""
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=list(callbacks), default_root_dir=path, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=0.5, log_every_n_steps=4, logger=pl.loggers.CSVLogger(path),
    )  # fmt: skip
    module = Module()
    trainer.fit(module, Data())
    return module.state_dict(), trainer.callback_metrics


def test_fits_equal_eager(tmp_path: Path) -> None:
    """In Lightning's loop as this package replaces it, evaluation included."""
    callback = MadeFirst(backend="tape", eval=True)
    found, expected = trained(tmp_path / "a", callback), trained(tmp_path / "b")
    assert callback.stats.replayed > 15
    assert callback.eval_stats.replayed > 15
    code = importlib.import_module(type(callback).__module__.removesuffix("callback") + "lightning_code")
    assert any("Lightning's own loop" in note for note in callback.notes) is not code.is_known("loop")
    for ours, eager in zip(found, expected, strict=True):
        assert ours.keys() == eager.keys()
        for name, value in eager.items():
            assert torch.equal(ours[name], value), name


@pytest.mark.soak
def test_it_is_unpickled_in_another_process(tmp_path: Path) -> None:
    """Which has not asked for the second package's class before."""
    callback = MadeFirst(backend="tape")
    trained(tmp_path, callback)
    copied = copy.deepcopy(callback)
    assert type(copied) is type(callback) is callback_class("pytorch_lightning")
    assert copied.stats.replayed == callback.stats.replayed > 15
    file = tmp_path / "callback"
    file.write_bytes(pickle.dumps(callback))
    code = f"import pickle; print(pickle.load(open({str(file)!r}, 'rb')).stats.replayed)"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=600, capture_output=True, text=True)
    assert int(done.stdout) == callback.stats.replayed


def test_two_callbacks_in_one_trainer(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the Trainer has 2 GraphPlanCallbacks"):
        trained(tmp_path, MadeFirst(backend="tape"), MadeFirst(backend="tape"))


@pytest.mark.skipif(not ADOPTS, reason="Lightning itself refuses it")
def test_a_subclass_is_of_the_package_that_it_was_made_with(tmp_path: Path) -> None:
    class Mine(GraphPlanCallback):  # type: ignore[misc, valid-type]
        """With something of the user's own."""

    with pytest.raises(
        NotCapturedError, match=r"the Trainer is pytorch_lightning\.trainer\.trainer's, but this callback class"
    ):
        trained(tmp_path, Mine(backend="tape"))


def test_which_package_a_trainer_is_of() -> None:
    assert name_of(pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)) == "pytorch_lightning"
    assert name_of(object()) == "lightning.pytorch"
    assert callback_class("pytorch_lightning") is not callback_class("lightning.pytorch")
    assert issubclass(callback_class("pytorch_lightning"), pl.Callback)


@pytest.mark.parametrize("before", ["", "import sys; sys.modules['lightning'] = None"], ids=["both", "the older one"])
def test_which_packages_are_installed(before: str) -> None:
    subprocess.run([sys.executable, "-c", before + SCRIPT], check=True, timeout=600)


def test_a_check_of_its_modules() -> None:
    assert checked.check_fit(Module, Data).replayed == "each step would be one replay"
