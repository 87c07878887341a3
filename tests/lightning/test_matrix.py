"""One test for each row of the matrix: the fit with the callback is the fit without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning.matrix import ROWS
from tests.lightning.rows import check


@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, tmp_path: Path) -> None:
    """Bit by bit, and as many batches as the row says were replayed."""
    for package in ROWS[name].needs:
        pytest.importorskip(package)
    check(ROWS[name], tmp_path)
