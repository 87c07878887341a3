"""Strategies of Hypothesis for random runs."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.random_runs import model_events, training_events
from tests.random_runs.bench import EVENTS
from tests.random_runs.leaving import ACTS, PLACES
from tests.random_runs.models import LAYERS
from tests.random_runs.run import Run
from tests.random_runs.step import FUSABLE, OF_LOSS, OF_MOMENTUM, OTHERS, SCHEDULES

assert {model_events, training_events}, "importing them fills EVENTS"

EFFECTS = ("counter", "average", "average in place", "history", "last", "dict")
EXTRAS = (
    "noise", "checkpoint", "two optimizers", "input grad", "mutates input", "constant batch", "channels last", "scaler",
)  # fmt: skip
RARE = ("seeking checkpoint", "inference", *sorted(OF_LOSS), "inference mode")
OF_FAMILY = {
    "dense": ("autocast", "autocast calls"),
    "conv": ("autocast", "autocast calls"),
    "recurrent": (),
    "tokens": ("tied head", "renormalized"),
}
FORMS = ("strided", "sliced", "misaligned", "expanded", "channels last")


def runs(family: str, *, short: bool = False) -> st.SearchStrategy[Run]:
    """Random runs of one family of models; ``short`` ones have three quarters of the calls and of the layers."""
    some = lambda *values: st.sampled_from(values)  # noqa: E731
    extras = st.sampled_from([*EXTRAS * 2, *RARE, *OF_FAMILY[family]])
    left = st.tuples(some(*PLACES), some(*sorted(ACTS)))
    places = (*range(16), *range(4, 12)) if short else (*range(22), *range(4, 16))
    event = st.tuples(some(*places), st.sampled_from(sorted(EVENTS)), st.integers(0, 11))
    return st.builds(
        Run,
        family=st.just(family),
        layers=st.lists(st.sampled_from(LAYERS[family]), max_size=3 if short else 4).map(tuple),
        optimizer=st.sampled_from([*[*FUSABLE] * 5, *OTHERS]),
        fused=some(True, None),
        groups=some(1, 1, 2, 3),
        schedule=some(*["none"] * 12, *[*SCHEDULES] * 2, *OF_MOMENTUM),
        every=some(1, 1, 5, 9),
        clip=some("none", "norm", "value"),
        zero=some(*["start"] * 6, *["end"] * 2, "start with zeros", "start of 2", "start of 3", "end of 2"),
        effects=st.frozensets(some(*EFFECTS), max_size=2),
        leaves=st.one_of(st.just(()), st.just(()), st.lists(left, max_size=2).map(tuple)),
        extras=st.frozensets(extras, max_size=2),
        sizes=some((4,), (4,), (4,), (4, 4, 4, 3), (3, 5)),
        forms=some(*[("plain",)] * 4, *((form,) for form in FORMS), ("plain", "strided")),
        calls=some(14, 18, 22) if short else some(18, 24, 30),
        owners=some("all", "all", "model", "none"),
        on_failure=some("raise", "raise", "eager"),
        verify=some("geometric", "off", "off", 3),
        warmup_steps=some(1, 1, 1, 2),
        prepare_optimizers=some(*[True] * 7, False),
        eager_if=some(*[None] * 7, 5),
        max_graphs=some(*[16] * 7, 1),
        events=st.lists(event, max_size=6).map(tuple),
    )
