"""Digests of Lightning's code: which releases are known, what depends on them, and what does not."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import lightning
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from graphplan.callback import lightning_code
from graphplan.callback.hooks import switches_of
from graphplan.callback.lightning_code import KNOWN, PARTS, digest_of, is_known
from tests.lightning.parts import LitDigits, assert_same_fits, fit, tape
from tests.lightning.test_loop import reasons


@pytest.mark.parametrize("part", PARTS)
def test_what_is_installed_is_known(part: str) -> None:
    """If this fails with a new release of Lightning: see the module's docstring."""
    found = digest_of(part)
    assert found in KNOWN[part], f"Lightning {lightning.__version__} has the digest {found!r} for {part!r}"


@pytest.fixture
def _unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release of Lightning, of which no code is known."""
    monkeypatch.setattr(lightning_code, "KNOWN", {part: {} for part in PARTS})


@pytest.mark.usefixtures("_unknown")
def test_a_release_that_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own loop runs, and logs and shows; steps are replayed all the same."""
    run = partial(fit, LitDigits, max_epochs=2, enable_progress_bar=True, log_every_n_steps=2)
    expected, found = run(tmp_path / "eager"), run(tmp_path / "graphed", tape())
    assert_same_fits(expected, found)
    assert found.callback.stats.replayed >= 8
    (reason,) = reasons(found.callback)
    assert f"the code of Lightning {lightning.__version__}'s loop is none of those that are known here" in reason
    assert switches_of(ModelCheckpoint()) == ()


def test_a_method_that_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that another package puts into Lightning's class is unknown as well."""
    plain = _TrainingEpochLoop.on_advance_end

    def on_advance_end(self: Any, data_fetcher: Any) -> None:
        plain(self, data_fetcher)

    assert is_known("loop")
    monkeypatch.setattr(_TrainingEpochLoop, "on_advance_end", on_advance_end)
    assert not is_known("loop")
    found = fit(LitDigits, tmp_path, tape(), max_epochs=1)
    assert len(reasons(found.callback)) == 1
    assert found.callback.stats.replayed >= 2


def test_a_method_without_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_TrainingEpochLoop, "on_advance_end", len)
    assert digest_of("loop") == ""
    assert not is_known("loop")


SOURCE = '''
def method(self, x: "int", *rest: str) -> dict[str, int]:
    """What it does."""
    total = f"{x!r:>{len(rest)}} and {x + 1}" "more"
    with open(total) as file, file:
        return {**{"a": [y for y in rest if y], 'b': x[1:, ...]}, "\\u2028": 1e300 * 1e300}
'''
SAME = """
def method(self, x, *rest):
    # Another comment, and no docstring.
    total = (
        f"{x!r:>{len(rest)}} and {x + 1}more"
    )
    with open(total) as file, file:
        return {**{'a': [y for y in rest if y], "b": x[1:, ...]}, "\\u2028": 1e300 * 1e300}
"""
FORM_OF = (
    "import ast, sys; from hashlib import sha256; print(sha256(form(ast.parse(sys.stdin.read())).encode()).hexdigest())"
)


def _form_in(python: str, source: str) -> str:
    """A digest by another Python, which needs neither torch nor Lightning for it."""
    text = Path(lightning_code.__file__).read_text()
    start = text.index("_LEFT_OUT =")
    code = "import ast\nfrom typing import Any\n" + text[start : text.index("@cache")]
    command = f"from __future__ import annotations\n{code}\nform = _form\n{FORM_OF}"
    return subprocess.run([python, "-c", command], input=source, capture_output=True, text=True, check=True).stdout


def test_digests_do_not_depend_on_the_python() -> None:
    """Nor on comments, docstrings, annotations and the layout."""
    names = [sys.executable, *filter(None, (which(f"python3.{minor}") for minor in range(10, 15)))]
    pythons = [name for name in names if subprocess.run([name, "-c", ""], capture_output=True).returncode == 0]
    assert len({_form_in(python, source) for python in pythons for source in (SOURCE, SAME)}) == 1
    assert _form_in(sys.executable, SOURCE.replace("x + 1", "x + 2")) != _form_in(sys.executable, SOURCE)
