"""Bars: drawn by rich on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from recipes.progress import bar, draws_bars


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
        monkeypatch.setattr("recipes.progress.find_spec", lambda name: None)
    assert not draws_bars()
    with bar("work", 1) as begin:
        begin("first")
    assert written.getvalue() == ""
