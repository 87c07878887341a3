"""Reports as HTML: what is in the page, and that a browser opens it and searches the plan."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from graphplan import OptionError, graph_step
from graphplan.report.rendering import page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SEARCH = """
<script>
const box = document.querySelector("input.search");
box.value = "0.weight param";
box.dispatchEvent(new Event("input"));
const rows = [...box.nextElementSibling.tBodies[0].rows].filter(row => !row.hidden);
const shown = rows.map(row => row.cells[0].textContent);
document.body.insertAdjacentHTML("beforeend", `<output id="shown">${JSON.stringify(shown)}</output>`);
</script>
"""


@pytest.fixture(scope="module")
def step() -> object:
    """A step with an eager call, two traces, a capture, checks and replays."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed = graph_step(train, owners={"model": model, "optimizer": optimizer})
    for _ in range(30):
        graphed(torch.randn(3, 4))
    return graphed


def test_the_page_says_what_the_text_says(step: object) -> None:
    text, data = step.report(), json.loads(step.report("json"))  # type: ignore[attr-defined]
    html = step.report("html")  # type: ignore[attr-defined]
    assert data["headline"] == text.splitlines()[0]
    assert data["headline"].replace(">", "&gt;") in html
    assert html.count("<svg") == 2
    for name, *_ in data["programs"][0]["table"][1:]:
        assert f"<td>{name}</td>" in html
    assert re.findall(r'(?:src|href)="(?!#)', html) == [], "the page needs other files"


def test_several_steps_are_sections_of_one_page(step: object) -> None:
    data = step.data()  # type: ignore[attr-defined]
    html = page([("fit 1", data), ("fit <2>", data)])
    assert "<h2>fit 1</h2>" in html
    assert "<h2>fit &lt;2&gt;</h2>" in html


@pytest.mark.parametrize("library", ["jinja2", "matplotlib.figure"])
def test_a_page_without_what_draws_it(step: object, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(OptionError, match=r'jinja2 and matplotlib, and .* is not installed: pip install "graphplan\['):
        step.report("html")  # type: ignore[attr-defined]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_opens_the_page_and_searches_the_plan(step: object, tmp_path: Path) -> None:
    """No error in its console, and two words leave the one row that has both."""
    file = tmp_path / "report.html"
    file.write_text(step.report("html").replace("</body>", f"{SEARCH}</body>"), encoding="utf-8")  # type: ignore[attr-defined]
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    assert '<output id="shown">["model.0.weight"]</output>' in done.stdout
