"""Rows that are still open: expected failures, each of which must leave this list once it passes."""

from __future__ import annotations

import pytest

OPEN = {
    "test_rows_01_04.py::test_row_01_load_state_dict_with_two_programs",
    "test_rows_02_14_trainer.py::test_row_05_a_number_of_the_trainer[by_progress]",
    "test_rows_02_14_trainer.py::test_row_05_a_number_of_the_trainer[by_scheduler]",
    "test_rows_02_14_trainer.py::test_row_05_another_criterion_in_a_trainer",
    "test_rows_09_14.py::test_row_13_python_value_that_never_repeats",
    "test_rows_15_18.py::test_row_15_a_replacement_that_the_user_keeps",
    "test_rows_15_18.py::test_row_15_tensor_replaced[cast]",
    "test_rows_15_18.py::test_row_15_tensor_replaced[tied]",
    "test_rows_19_22.py::test_row_21_a_random_branch",
    "test_rows_19_22.py::test_row_22_inputs_that_share_memory",
    "test_rows_23_29.py::test_row_29_a_gradient_that_the_caller_keeps",
    "test_rows_30_37.py::test_row_30_hook_registered_after_the_capture[accumulated]",
    "test_rows_30_37.py::test_row_30_hook_registered_after_the_capture[tensor]",
    "test_rows_30_37.py::test_row_37_capture_never_engaged",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the open ones; ``strict``, so that one that passes is noticed."""
    for item in items:
        name = f"{item.path.name}::{item.name}"
        if item.path.parent.name == "failure_modes" and name in OPEN:
            item.add_marker(pytest.mark.xfail(strict=True, reason="open, see docs/failure-modes.md"))
