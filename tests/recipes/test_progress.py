"""Bars: drawn by rich on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from graphplan.check.run import check_step
from graphplan.report.progress import bar, draws_bars
from tests.check.subjects import batches


class Terminal(io.StringIO):
    """Something that looks like a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with bar("work", 2) as begin:
        begin("first")
        begin("second")
    text = terminal.getvalue()
    assert text.index("work: first") < text.index("work: second")
    assert "0/2" in text
    assert "1/2" in text


@pytest.mark.parametrize("is_there", [True, False], ids=["no terminal", "no rich"])
def test_no_bar_elsewhere(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", written := io.StringIO() if is_there else Terminal())
    if not is_there:
        monkeypatch.setattr("graphplan.report.progress.find_spec", lambda name: None)
    assert not draws_bars()
    with bar("work", 1) as begin:
        begin("first")
    assert written.getvalue() == ""


def test_a_check_with_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two parts, with the result that it has without."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    found = check_step(lambda x: x.sum(), batches, progress=True)
    assert found.text() == check_step(lambda x: x.sum(), batches).text()
    assert terminal.getvalue().index("check: collecting blockers") < terminal.getvalue().index("check: replaying")
