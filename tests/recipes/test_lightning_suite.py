"""Lightning's own tests with the callback in every fit: what fails only with it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning")

from recipes.benchmarks import lightning_suite

TESTS = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from graphplan import GraphPlanCallback

class Model(BoringModel):
    def on_train_start(self):
        Model.found = [each for each in self.trainer.callbacks if isinstance(each, GraphPlanCallback)]

def fit(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, max_steps=12, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, limit_val_batches=0, accelerator="cpu")
    trainer.fit(Model())
    return trainer

def test_passes(tmp_path):
    trainer = fit(tmp_path)
    assert trainer.global_step == 12
    assert not any(isinstance(each, GraphPlanCallback) for each in trainer.callbacks)

def test_fails_only_with_the_callback(tmp_path):
    fit(tmp_path)
    assert not Model.found or not Model.found[0].stats.replayed

def test_fails():
    assert False
"""


@pytest.mark.soak
def test_what_fails_only_with_the_callback_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in lightning_suite.FOLDERS:
        (tmp_path / "tests" / "tests_pytorch" / folder).mkdir(parents=True)
    name = "tests_pytorch/loops/test_fits.py"
    (tmp_path / "tests" / name).write_text(TESTS)
    with pytest.raises(SystemExit) as ended:
        lightning_suite.main([str(tmp_path), "--", "--color=no"])
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert "without the callback: 1 failed, 2 passed" in out
    assert "with the callback:    2 failed, 1 passed" in out
    assert [line.split()[-1] for line in out.splitlines() if "only with it" in line] == [
        f"{name}::test_fails_only_with_the_callback"
    ]


def test_without_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lightning_suite.main([str(tmp_path)])
    assert "expected a checkout of Lightning's repository" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"pytest could not run in "):
        (tmp_path / "tests" / "tests_pytorch").mkdir(parents=True)
        lightning_suite.main([str(tmp_path)])
