"""The recipe that times launches."""

from __future__ import annotations

from recipes.benchmarks.launching import measure_launches
from recipes.benchmarks.workloads import workloads
from tests.devices import DEVICE, needs_cuda


@needs_cuda
def test_what_launches_cost() -> None:
    """All figures are there; a graph captured anew is one that the old one can be updated to."""
    row = measure_launches(workloads(cpu=False)["mlp"], DEVICE)
    assert row["first_plain"] > 0 and row["instantiate_us"] > 0
    if "update_us" in row:
        assert row["update_result"].startswith("cudaSuccess"), row
