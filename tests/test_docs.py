"""README and docs/: links lead somewhere, blocks and docstrings' examples run, commands and options exist."""

from __future__ import annotations

import doctest
import inspect
import io
import json
import re
import shlex
import statistics
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

import graphplan
from graphplan import GraphPlanCallback, graph_step, graphed
from recipes.benchmarks import chart

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d+(?:\.\d+)?")

NO_OPTION = "\N{EN DASH}"

each_page = pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)


class Block(NamedTuple):
    """A fenced block: its language and its text, and where it begins."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(found[1], found[2], text.count("\n", 0, found.start()) + 2) for found in FENCE.finditer(text)]


def prose(page: Path) -> str:
    """The text without fenced blocks and code."""
    return re.sub(r"`[^`\n]*`", "`code`", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_linked_from_the_readme_and_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    linked = set(LINK.findall(prose(ROOT / "README.md")))
    index = LINK.findall(prose(ROOT / "docs/index.md"))
    for page in PAGES[1:]:
        assert page.name in site
        assert page.name == "index.md" or (f"docs/{page.name}" in linked and page.name in index)


def test_pages_are_as_short_as_they_are_meant_to_be() -> None:
    for name, most in (("README.md", 200), ("docs/decisions.md", 250), ("docs/architecture.md", 150)):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most, name


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    places = (ROOT, ROOT / "graphplan", ROOT / "recipes/results", ROOT / "tests")
    named = re.findall(r"`([\w/]+\.(?:py|cpp|h|json|md|yaml|yml|toml|txt))`", page.read_text(encoding="utf-8"))
    made_by_commands = {"core.json", "core.md"}
    assert [name for name in named if not any((place / name).exists() for place in places)] == [
        name for name in named if name in made_by_commands
    ]


def test_templates_of_issues_ask_for_what_a_report_needs() -> None:
    asked = {"bug": ("graphplan env", "report()"), "model": ("graphplan env", "report()", "graphplan check")}
    files = {path.stem: path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    assert set(files) == set(asked)
    for name, needed in asked.items():
        form = yaml.safe_load(files[name].read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form)
        fields = [part["attributes"] for part in form["body"] if part.get("validations", {}).get("required")]
        text = " ".join(f"{field['label']} {field.get('description', '')}" for field in fields)
        assert [words for words in needed if words not in text] == [], name


# Python blocks.


def shows(shown: str, printed: str) -> bool:
    """Return True if ``printed`` begins like ``shown``, but for the numbers, and for what a line leaves out with …"""
    lines = [[NUMBER.sub("#", line).rstrip() for line in text.strip().splitlines()] for text in (shown, printed)]
    return len(lines[0]) <= len(lines[1]) and all(
        actual.startswith(line[:-1].rstrip()) if line.endswith("…") else actual == line
        for line, actual in zip(*lines, strict=False)
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.language == "python" for b in blocks(p))], ids=lambda p: p.stem
)
def test_python_blocks_run_one_after_another(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    every = blocks(page)
    for block, following in zip(every, [*every[1:], None], strict=True):
        if block.language != "python":
            continue
        # A file with the block on its own lines, so that what fails names the line of the page.
        script = tmp_path / f"{page.stem}_{block.line}.py"
        script.write_text("\n" * (block.line - 1) + block.text, encoding="utf-8")
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), names)
        if following is None or following.language != "text" or "print(" not in block.text:
            continue
        # What is shown was printed on a CPU.
        if not torch.cuda.is_available():
            assert shows(following.text, printed.getvalue()), printed.getvalue()


REFUSED = """
class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        loss = self.network(batch).square().mean()
        weight = int(loss)
        return loss * weight

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""


@pytest.mark.filterwarnings("ignore")
def test_the_refusal_in_the_readme_is_the_one_that_is_raised(tmp_path: Path) -> None:
    shown = next(block.text for block in blocks(ROOT / "README.md") if block.text.startswith("graphplan.errors."))
    line = int(re.findall(r"digits.py:(\d+)", shown)[0])
    script = tmp_path / "digits.py"
    script.write_text("\n" * (line - 1 - REFUSED.splitlines().index("        weight = int(loss)")) + REFUSED)
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch, "LightningModule": LightningModule}
    exec(compile(script.read_text(), str(script), "exec"), names)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[GraphPlanCallback()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(graphplan.HostSyncError) as raised:
        trainer.fit(names["Digits"](), DataLoader(torch.randn(80, 64), batch_size=8))
    assert f"graphplan.errors.{raised.type.__name__}: {raised.value}" == " ".join(shown.split())


# Commands.


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every line of the shell blocks, and of code in the text that calls Python or make."""
    for block in blocks(page):
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                yield shlex.split(line, comments=True)
    code = re.findall(r"`((?:python|make|bash) [^`]*)`", FENCE.sub("", page.read_text(encoding="utf-8")))
    yield from (shlex.split(" ".join(text.split())) for text in code)


def makes(target: str) -> bool:
    return (
        re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE) is not None
    )


def module_of(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    found = [file for file in (path.with_suffix(".py"), path / "__main__.py") if file.exists()]
    return found[0] if found else None


def knows_options(source: str, words: list[str]) -> list[str]:
    """The options among ``words`` that a program does not have."""
    return [word for word in words if word.startswith("--") and word != "--help" and f'"{word}"' not in source]


def sources_of(module: Path) -> str:
    """What may define a program's options: its own file, and those beside a ``__main__``."""
    files = module.parent.rglob("*.py") if module.name == "__main__.py" else [module]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def check_hydra(overrides: list[str]) -> None:
    """Compose the configuration with these overrides: a key or a choice that does not exist raises."""
    given = [word for word in overrides if "=" in word]
    # Several values are several runs.
    single = [word.split(",")[0] if "[" not in word else word for word in given]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        compose("config", overrides=single)


@each_page
def test_commands_exist(page: Path) -> None:
    for words in commands(page):
        text = " ".join(words)
        if not words or words[0] in ("pip", "."):
            continue
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            assert all(map(makes, targets)), text
            for word in words[1:]:
                if word.startswith("ARGS="):
                    check_hydra(word.removeprefix("ARGS=").split())
        elif words[0] == "graphplan":
            assert knows_options(sources_of(ROOT / "graphplan" / "check" / "command.py"), words[1:]) == [], text
        elif "train.py" in words:
            check_hydra(words[words.index("train.py") + 1 :])
        elif words[:2] == ["python", "-m"]:
            module = module_of(words[2])
            assert module is not None, text
            assert knows_options(sources_of(module), words[3:]) == [], text
        else:
            assert words[0] in ("bash", "python", "torchrun", "srun"), text
            assert words[0] not in ("bash", "python") or (ROOT / words[1]).exists(), text


# Options.


def option_rows() -> dict[str, list[str]]:
    """The cells of the tables of options, by option."""
    rows = re.findall(
        r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/configuration.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    return {name: cells.split(" | ") for name, cells in rows if cells.count(" | ") >= 3}


def test_tables_of_options_are_those_of_the_signatures() -> None:
    rows = option_rows()
    verbs: list[Callable[..., Any]] = [graph_step, graphed, GraphPlanCallback]
    for column, verb in enumerate(verbs):
        defaults = {name: p.default for name, p in inspect.signature(verb).parameters.items() if name != "fn"}
        shown = {name: eval(cells[column].strip("`")) for name, cells in rows.items() if cells[column] != NO_OPTION}
        assert shown == defaults, verb.__name__


def test_every_option_is_in_the_callbacks_configuration() -> None:
    text = (ROOT / "conf/callbacks/graphplan.yaml").read_text(encoding="utf-8")
    for name in inspect.signature(GraphPlanCallback).parameters:
        assert re.search(rf"^  # .*\n  {name}:", text, re.MULTILINE), name


# The API reference and its docstrings.


def public_names() -> set[str]:
    """What ``graphplan`` exports: its ``from ... import name as name``, and the callback."""
    source = (ROOT / "graphplan/__init__.py").read_text(encoding="utf-8")
    return set(re.findall(r"^from \S+ import (\w+) as \1$", source, re.MULTILINE)) | {"GraphPlanCallback"}


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: graphplan\.(\S+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name in listed if "." not in name} == public_names() - {"buckets"}
    assert {name for name in listed if "." in name} == {"step.buckets.fit", "step.buckets.Fit"}


def test_every_error_is_explained() -> None:
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    kinds = {name for name in public_names() if name.endswith(("Error", "Fault"))}
    assert {name for name in kinds if f"`{name}`" not in text} == set()


DESCRIBED: list[Any] = [
    graph_step, graphed, graphplan.compile_plan, graphplan.compile_cached, graphplan.capture, graphplan.Policy,
    GraphPlanCallback, graphplan.piecewise, graphplan.buckets.fit, graphplan.Pool,
    graphplan.prepare_optimizer,
]  # fmt: skip
EXAMPLES = [*DESCRIBED, *(thing for name in sorted(public_names()) if callable(thing := getattr(graphplan, name)))]
EXAMPLES = [thing for thing in dict.fromkeys(EXAMPLES) if not str(thing.__name__).endswith(("Error", "Fault"))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("verb", EXAMPLES, ids=lambda verb: verb.__name__)
def test_examples_of_docstrings_run(verb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert verb.__doc__
    example = doctest.DocTestParser().get_doctest(verb.__doc__, {"__name__": "__main__"}, verb.__name__, None, None)
    assert example.examples, "there is no example"
    said = io.StringIO()
    result = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.write)
    assert result.failed == 0, said.getvalue()


@pytest.mark.parametrize("verb", DESCRIBED, ids=lambda verb: verb.__name__)
def test_docstrings_describe_every_argument(verb: Any) -> None:
    text = inspect.getdoc(verb) or ""
    names = {name for name in inspect.signature(verb).parameters if name not in ("self",)}
    assert {name for name in names if not re.search(rf"^ +\**{name}: ", text, re.MULTILINE)} == set()


# The chart.


def test_the_chart_is_that_of_the_results(tmp_path: Path) -> None:
    chart.main(["--to", str(tmp_path / "chart.svg")])
    text = re.compile(r"<text [^>]*>([^<]*)</text>|<!-- (.*?) -->")
    drawn, kept = (
        (path / name).read_text() for path, name in ((tmp_path, "chart.svg"), (ROOT, "docs/assets/speedup.svg"))
    )
    assert text.findall(drawn) == text.findall(kept)
    result = json.loads((ROOT / "recipes/results/h200.json").read_text())
    assert all(label in kept for _, _, label in chart.bars(result))


# Figures.


def tables(page: str) -> list[list[str]]:
    """The cells of every row of the tables of a page."""
    rows = re.findall(r"^\| (.*) \|$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows]


@pytest.mark.parametrize("file", sorted((ROOT / "recipes/results").glob("*.json")), ids=lambda file: file.stem)
def test_results_name_no_folder_of_a_machine(file: Path) -> None:
    assert not re.search(r"(?<![\w.<])/(?:home|root|opt|tmp|usr|work|mnt|Users)/", file.read_text())


def results(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "recipes/results" / name).read_text())["rows"]
    return rows


def training_times(name: str) -> dict[tuple[str, str], float]:
    """The time of each workload and contender."""
    return {(row["workload"], row["contender"]): row["us"] for row in results(name) if "us" in row}


def test_times_of_training_are_those_of_the_results() -> None:
    newest = training_times("h200.json") | training_times("h200_bars.json")
    times = {key: f"{us:.0f}" for key, us in newest.items()}
    shown = {cells[-2].split()[0]: cells for cells in tables("performance.md") if len(cells) == 7}
    for workload in chart.NAMES:
        cells = shown[times[workload, "typical_callback"]]
        contenders = ("eager", "floor", "graph_step", "typical", "typical_callback")
        for cell, contender in zip(cells[1:6], contenders, strict=True):
            assert cell.split() == [] or cell.split()[0] == times[workload, contender], cells


TIMES = "\N{MULTIPLICATION SIGN}"


def test_times_with_the_speed_gate_are_those_of_the_results() -> None:
    times = training_times("h200_bars.json")
    rows = [cells for cells in tables("performance.md") if len(cells) == 7 and cells[6].endswith(TIMES)]
    contenders = ("eager", "floor", "graph_step", "typical", "typical_callback")
    for cells, workload in zip(rows[:3], ("mlp", "gpt", "resnet"), strict=True):
        found = [times[workload, contender] for contender in contenders]
        assert [cell.split()[0] for cell in cells[1:6]] == [f"{us:.0f}" for us in found]
        assert cells[3].split()[1] == f"({found[2] / found[1]:.2f})"
        assert cells[5].split()[1] == f"({found[4] / found[1]:.2f})"
        assert cells[6].removesuffix(TIMES) in (f"{found[3] / found[4]:.0f}", f"{found[3] / found[4]:.1f}")


def test_times_with_options_are_those_of_the_results() -> None:
    newest, earlier = training_times("h200_bars.json"), training_times("h200.json")
    names = {"MLP": "mlp", "GPT": "gpt", "ResNet-18": "resnet"}
    rows = [cells for cells in tables("performance.md") if len(cells) == 4 and cells[3].endswith(TIMES)]
    assert rows
    for cells in rows:
        times = earlier if "2026-11-23" in cells[0] else newest
        workload, options = names[cells[0].split(",")[0]], "+compile+fuse" if "`compile`" in cells[0] else "+fuse"
        floor, callback = times[workload, f"floor{options}"], times[workload, f"typical_callback{options}"]
        assert cells[1:3] == [f"{floor:.0f}", f"{callback:.0f} ({callback / floor:.2f})"], cells
        speedup = times[workload, "typical"] / callback
        assert cells[3].removesuffix(TIMES) in (f"{speedup:.0f}", f"{speedup:.1f}"), cells


LATEST = (
    "zoo_branches_h200.json", "zoo_texts_h200.json", "zoo_recurrent_h200.json", "zoo_numbers_h200.json",
    "zoo_host_h200.json", "zoo_queues_h200.json",
)  # fmt: skip
"""The whole zoo, and entries that came later; where an entry is in several, the last one counts."""

FLOORS = (
    "zoo_h200.json", "zoo_fits_h200.json", "zoo_floors_h200.json", "zoo_floors_language_h200.json",
    "zoo_floors_mixed_h200.json", "zoo_floors_short_h200.json",
)  # fmt: skip
"""Fits and steps by hand; where an entry is in several, the last one counts."""


def floors() -> dict[str, tuple[float, float, float]]:
    """The time of a step without and with the callback, and by hand, of each entry with a floor."""
    found = {}
    for row in (row for name in FLOORS for row in results(name)):
        fit, floor = row.get("fit", row), row.get("floor", {}).get("us", row.get("floor_us"))
        if floor is not None and "us" in fit:
            found[row["name"]] = (fit["eager_us"], fit["us"], floor)
    return found


def page() -> str:
    return " ".join((ROOT / "docs/performance.md").read_text(encoding="utf-8").split())


def test_times_of_real_models_are_those_of_the_results() -> None:
    by_hand = floors()
    latest = {row["name"]: row["fit"] for name in LATEST for row in results(name)}
    entries = [cells for cells in tables("performance.md") if "/" in cells[0]]
    assert {len(cells) for cells in entries} == {5, 6}
    for name, before, after, speedup, _ in (cells for cells in entries if len(cells) == 5):
        expected = latest[name]["eager_us"], latest[name]["us"]
        assert [before, after] == [f"{us:.0f}" for us in expected], name
        assert speedup == f"{expected[0] / expected[1]:.2f}", name
    for name, before, after, speedup, floor, multiple in (cells for cells in entries if len(cells) == 6):
        times = by_hand[name]
        assert [before, after, floor] == [f"{us:.0f}" for us in times], name
        assert speedup == f"{times[0] / times[1]:.2f}", name
        assert multiple == f"{times[1] / times[2]:.3f}", name
    multiples = re.findall(r"`(\w+/\w+)` (\d\.\d{3})\b", page())
    assert len(multiples) == 16
    for name, multiple in multiples:
        assert multiple == f"{by_hand[name][1] / by_hand[name][2]:.3f}", name


def test_entries_that_are_not_faster_are_those_of_the_results() -> None:
    once = {row["name"]: row["fit"] for part in ("", "_rest") for row in results(f"zoo_once{part}_h200.json")}
    whole = {row["name"]: row["fit"] for name in LATEST[:3] for row in results(name)}
    runs = [
        (whole, "an adaptive solver", "Of the 37 core"),
        ({row["name"]: row["fit"] for row in results("zoo_core_h200.json")}, "Of the 37 core", "In the last row"),
        ({row["name"]: row["fit"] for row in results("zoo_bits_h200.json")}, "Of the 30", "Steps that draw"),
        (once, "The others get new shapes", "**Equal bits.**"),
    ]
    for fits, start, end in runs:
        text = page().partition(start)[2].partition(end)[0]
        shown = dict(re.findall(r"`(\w+/\w+)` (\d\.\d\d)\b", text))
        assert shown == {name: f"{fits[name]['eager_us'] / fits[name]['us']:.2f}" for name in shown}
        assert {name for name, fit in fits.items() if fit["us"] > fit["eager_us"] and name not in shown} == set()


def test_starts_are_those_of_the_results() -> None:
    last = {row["entry"].partition("/")[2]: row["start"] for row in results("zoo_start_models_h200.json")}
    rows = [cells for cells in tables("performance.md") if len(cells) == 2 and cells[0][0].isdigit()]
    shown = [(cells[0].split(" to "), name) for cells in rows for name in re.findall(r"`(\w+)`", cells[1])]
    assert len(shown) > 30
    for bounds, name in shown:
        assert int(bounds[0]) <= round(last[name]) <= int(bounds[-1]), name
    assert f"{sum(round(start) <= 20 for start in last.values())} of the {len(last)} entries" in page()
    shapes = {row["name"]: row for row in results("zoo_fits_h100.json")}
    several = re.findall(r"(\d+)(?: eager steps)? \(`(graphs/\w+)`, \w+ shapes\)", page())
    assert len(several) == 2
    for start, name in several:
        phases = [shapes[name]["phases_ms"][phase] for phase in ("trace", "capture", "verify")]
        assert start == f"{1e3 * sum(phases) / shapes[name]['eager_us']:.0f}", name


def test_fits_on_a_cpu_are_those_of_the_results() -> None:
    rows = [cells for cells in tables("performance.md") if len(cells) == 6 and cells[5].startswith("`zoo_")]
    rows = [cells for cells in rows if cells[5].endswith("_cpu.json`")]
    assert len(rows) == 4
    for _, count, median, least, largest, file in rows:
        fits = [row.get("fit", row) for row in results(file.strip("`"))]
        ratios = [fit["us_mean"] / fit["eager_us_mean"] for fit in fits if "us_mean" in fit and "eager_us_mean" in fit]
        assert re.split(r"\D", count)[0] == str(len(ratios)), file
        assert [median, largest] == [f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}"], file
        assert least == str(sum(ratio <= 1.1 for ratio in ratios)), file


def test_every_result_is_cited() -> None:
    citing = [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "recipes").rglob("*.py")]
    words = {word for path in citing for word in re.findall(r"\w+\.(?:json|md)", path.read_text(encoding="utf-8"))}
    assert {path.name for path in (ROOT / "recipes/results").iterdir()} - words == set()
