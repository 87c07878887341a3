"""Rows that are still open: expected failures, each of which must leave this list once it passes."""

from __future__ import annotations

import pytest

OPEN = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the open ones; ``strict``, so that one that passes is noticed."""
    for item in items:
        name = f"{item.path.name}::{item.name}"
        if item.path.parent.name == "failure_modes" and name in OPEN:
            item.add_marker(pytest.mark.xfail(strict=True, reason="open, see docs/failure-modes.md"))
