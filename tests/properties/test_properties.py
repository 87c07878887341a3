"""Random runs through graphplan equal eager bit by bit, or are refused before the first replay, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import gettempdir

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.random_runs.comparison import compare
from tests.random_runs.models import LAYERS
from tests.random_runs.run import Run
from tests.random_runs.strategies import runs

EXAMPLES = int(os.environ.get("RANDOM_RUNS", "0"))
"""Set it to search further, with longer runs and other ones each time, and to shrink what fails, which takes minutes;
without it the runs are always the same 160.
"""
LAST_RUNS = Path(os.environ.get("LAST_RUNS", gettempdir()))
"""Where each family's latest run is written to before it begins, if ``RANDOM_RUNS`` is set."""
OF_FAMILY = 40

FOUND = {
    "weight decay loaded": Run("dense", calls=32, events=((4, "weight_decay", 1), (15, "saved_moments", 0))),
    "moments loaded after the warm-up": Run("dense", schedule="cosine", events=((0, "same_moments", 0),)),
    "moments loaded before the capture": Run("dense", events=((2, "same_moments", 0), (9, "learning_rate", 0))),
    "moments cleared before the capture": Run("dense", events=((2, "cleared_moments", 0),)),
    "momentum cleared before the capture": Run("dense", optimizer="momentum", events=((2, "cleared_moments", 0),)),
    "first moments loaded": Run(
        "dense", optimizer="adagrad", events=((4, "same_moments", 0), (19, "saved_moments", 6))
    ),
    "unused moment popped": Run("dense", optimizer="adagrad", events=((17, "one_cleared_moment", 3),)),
    "setting of an object in the closure": Run("dense", events=((15, "setting_of_an_object", 1),)),
    "every second row": Run("dense", forms=("sliced",), calls=40),
    "one row expanded": Run("recurrent", ("lstm",), "amsgrad", forms=("expanded",), calls=40),
    "refused with an expanded input": Run("dense", optimizer="nadam", forms=("expanded",)),
    "refused after replays": Run("dense", zero="end of 2", events=((13, "decay", 9), (18, "one_vector", 9))),
    "refused between two replays": Run("conv", warmup_steps=2, sizes=(4, 4, 4, 3), events=((10, "saved_moments", 0),)),
    "linear layer of every second row in inference mode": Run(
        "recurrent", ("gru",), forms=("sliced",), extras=frozenset({"inference mode"})
    ),
    "refused with a gradient of the input": Run("dense", optimizer="nadam", extras=frozenset({"input grad"})),
}
"""Runs in which random search found a fault, shrunk."""


@pytest.mark.parametrize("run", FOUND.values(), ids=FOUND)
def test_runs_that_once_failed(run: Run) -> None:
    """They equal eager or are refused, as all others."""
    compare(run)


@pytest.mark.parametrize("family", LAYERS)
def test_random_runs_equal_eager_or_are_refused(family: str) -> None:
    """At least 40 runs of each family of models, of which most are really replayed."""
    replayed: list[int] = []

    @settings(
        max_examples=EXAMPLES or OF_FAMILY,
        derandomize=not EXAMPLES,
        phases=list(Phase) if EXAMPLES else [Phase.generate],
        print_blob=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(runs(family, short=not EXAMPLES))
    def check(run: Run) -> None:
        if EXAMPLES:
            # A run that ends the process leaves no other trace.
            (LAST_RUNS / f"last_{family}_run").write_text(repr(run))
        replayed.append(compare(run))

    check()
    assert len(replayed) >= OF_FAMILY
    # Short runs have fewer replays, and more of them are refused before their first one.
    least, bar = (5, 0.6) if EXAMPLES else (3, 0.5)
    share = sum(count >= least for count in replayed) / len(replayed)
    assert share > bar, f"only {share:.0%} of the runs had {least} replays"
