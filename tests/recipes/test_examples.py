"""The programs that people copy: each is run as it stands there, replays its steps, and learns something."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import NamedTuple

import pytest
import torch
from hydra.core.config_store import ConfigStore
from torch.distributions import Distribution

from tests.test_layers import imported_modules

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "examples"
REPLAYED = re.compile(r"graphplan: \d+ plans?; (\d+) of (\d+) (?:steps|calls of .*?) replayed")


class Example(NamedTuple):
    """The libraries that an example needs besides torch, what it prints of its result, and how many reports."""

    needs: tuple[str, ...]
    result: str
    reports: int = 1


EXAMPLES = {
    "diffusion": Example(("sklearn",), r"error of the averaged denoiser: 1\.\d+, at the end 0\.[2-5]\d"),
    "forecasting": Example(("lightning",), r"levels, squared: error 2\.\d+, naive 3\.\d+"),
    "gan": Example(("lightning", "sklearn"), r"generator: [01]\.\d+, critic: [01]\.\d+"),
    "graphs": Example(("torch_geometric",), r"right of the other members: 0\.[6-9]"),
    "lora": Example(("transformers", "accelerate", "peft"), r"5632 parameters trained on json\.decoder: mean loss", 2),
    "rl": Example(("gymnasium",), r"update 11: a game has (\d\d\d|[4-9]\d) steps"),
    "service": Example(("fastapi", "httpx", "sklearn"), r"all digits right in 1[12]\d\nlatency .* p99 \d+\.\d ms"),
    "sweep": Example(("hydra", "sklearn"), r"lr 0\.01, width 64: loss 0\.\d+", 4),
    "tabular": Example(("sklearn",), r"accuracy: 0\.9\d+"),
    "text": Example(("lightning", "transformers"), r"loss: 2\.\d+ nats per byte"),
    "vision": Example(("timm", "lightning", "sklearn"), r"accuracy: 0\.[5-9]\d+"),
}  # fmt: skip


def shown(name: str) -> list[str]:
    """The lines that the gallery shows of what an example prints."""
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^python recipes/examples/{name}\.py\n```\n\n```text\n(.*?)^```$", text, re.M | re.S)
    return masked(block)


def masked(text: str) -> list[str]:
    """The lines of ``text`` without their numbers."""
    return [re.sub(r"\d+(?:\.\d+)?", "#", line).rstrip() for line in text.splitlines()]


def require(needs: tuple[str, ...]) -> None:
    """Skip the test unless the libraries can be imported."""
    for name in needs:
        try:
            import_module(name)
        except (ImportError, RuntimeError) as error:  # torchvision's operators, where its build is not for this torch
            pytest.skip(f"{name} cannot be imported: {error}; the extras zoo and dev of pyproject.toml have it")


def replayed(printed: str) -> list[tuple[int, int]]:
    """Replayed steps and all steps, of each report once."""
    found = [(int(some), int(all_)) for some, all_ in REPLAYED.findall(printed)]
    # A Trainer prints the first line at the end of its fit, and the program the whole report.
    return found[1:] if len(found) == 2 and found[0] == found[1] else found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_replays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example, file = EXAMPLES[name], FOLDER / f"{name}.py"
    require(example.needs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(file)])
    # torch.compile turns it off for the rest of the process.
    monkeypatch.setattr(Distribution, "_validate_args", True)
    # What an example stores under a name that conf/ has, too, would stay for later tests.
    monkeypatch.setattr(ConfigStore.instance(), "repo", dict(ConfigStore.instance().repo))
    # In this process: to import the libraries anew takes as long as most of the examples.
    run_path(str(file), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(example.result, printed), printed
    counts = replayed(printed)
    assert len(counts) == example.reports, printed
    # Warm-up, traces and captures of a few shapes; in the service, padded calls that are compared, too.
    assert all(some >= 0.75 * all_ > 0 for some, all_ in counts), printed
    if not torch.cuda.is_available():
        lines = iter(masked(printed))
        assert [line for line in shown(name) if line not in lines] == [], printed


def test_every_example_is_run_here_and_short() -> None:
    files = sorted(file for file in FOLDER.glob("*.py") if file.name != "__init__.py")
    assert [file.stem for file in files] == sorted(EXAMPLES)
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60, file.name
        assert f"python recipes/examples/{file.name}" in text, file.name
        # It is copied alone.
        modules = {module.split(".")[0] for _, module in imported_modules(file)}
        assert "graphplan" in modules, file.name
        assert modules.isdisjoint({"recipes", "tests"}), file.name
