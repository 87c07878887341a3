"""One test for each row of the matrix: the fit with the callback is the fit without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning.matrix import RARE, ROWS
from tests.lightning.rows import check

LEFT = {f"{group}: {name}" for group, names in RARE.items() for name in names}
assert ROWS.keys() >= LEFT, LEFT - ROWS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in LEFT else name for name in ROWS]
)
def test_row(name: str, tmp_path: Path) -> None:
    """Bit by bit, and as many batches as the row says were replayed."""
    for package in ROWS[name].needs:
        pytest.importorskip(package)
    check(ROWS[name], tmp_path)
