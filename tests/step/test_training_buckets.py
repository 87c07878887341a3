"""Training steps at capture sizes: padded batches, compared with the batch as it came before they are trusted."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan import BusyError, HostEffectError, OptionError, PaddingError, SkipReason, graph_step
from graphplan.step import padded_batches
from graphplan.step.graphed_step import GraphedStep
from graphplan.step.options import Options
from graphplan.step.padded_batches import PaddingCheck, RehearsalMode
from tests.facts import assert_same, flatten
from tests.step.test_peers import Ranks
from tests.twins import keep

VOCABULARY, WIDTH, LONGEST = 24, 16, 48
SIZES = [8, 16, 32]
UNPADDED = 2
"""First calls, which are made as they came."""
Batch = dict[str, Any]


class Masked(nn.Module):
    """A small transformer that does not look at padding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        hidden = torch.zeros(mask.shape).masked_fill(mask == 0, -torch.inf)
        return self.head(self.encoder(x, src_key_padding_mask=hidden))


def loss_of(model: nn.Module, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    logits = model(batch["input_ids"], batch["attention_mask"])
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, **{"ignore_index": -100, **options}), logits


class Training:
    """A model, its optimizer, and their step."""

    def __init__(self, make: Callable[[], nn.Module] = Masked, optimizer: Any = AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2, fused=True)
        self.options = options

    def step(self, batch: Batch) -> Any:
        self.optimizer.zero_grad()
        loss, logits = loss_of(self.model, batch, **self.options)
        loss.backward()
        self.optimizer.step()
        return loss, logits

    @property
    def owners(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def state(self) -> dict[str, Any]:
        return flatten(**self.owners, generator=torch.get_rng_state())


def batches(count: int, longest: int = SIZES[-1], rows: int = 3) -> list[Batch]:
    """Sentences, each batch padded to its longest, with strings beside."""
    rng, generator = random.Random(7), torch.Generator().manual_seed(7)
    made = []
    for number in range(count):
        length = rng.randint(2, longest)
        ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
        lengths = torch.tensor([length, *(rng.randint(1, length) for _ in range(rows - 1))])
        mask = torch.arange(length) < lengths[:, None]
        labels = ids.roll(-1, 1).masked_fill(~mask, -100)
        texts = [f"{number}", "b", "c"]
        made.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels, "texts": texts})
    return made


def padded_to(batch: Batch, sizes: list[int] = SIZES) -> Batch:
    """What a batch is padded to."""
    length = batch["input_ids"].shape[1]
    size = next((size for size in sizes if size >= length), length)
    values = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        **batch, **{name: F.pad(batch[name], (0, size - length), value=value) for name, value in values.items()}
    }  # fmt: skip


def bucketed(training: Any, **options: Any) -> GraphedStep:
    options = {"buckets": {1: SIZES}, "dynamic": {"batch": 1}, "pad": {"labels": -100}, "backend": "tape", **options}
    step = graph_step(training.step, owners=training.owners, shapes="bucket", **options)
    assert isinstance(step, GraphedStep)
    return step


def assert_same_call(eager: Any, step: Callable[..., Any], batch: Batch, *, pads: bool = True) -> None:
    """Fail unless both come to the same bits; the eager twin on the padded batch, if it ``pads``."""
    loss, logits = eager.step(padded_to(batch) if pads else batch)
    own, cut = step(batch)
    assert torch.equal(own, loss) and torch.equal(cut, logits[:, : batch["input_ids"].shape[1]])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.crossed(2)
def test_equal_to_eager_steps_on_padded_batches(dropout: float) -> None:
    """Losses, gradients, parameters, optimizer state and the random generator, bit by bit; as many captures as sizes.

    Dropout's draws are those of the padded batch: it is left out of comparisons alone.
    """
    eager, found = (Training(partial(Masked, dropout)) for _ in range(2))
    step = bucketed(found)
    torch.manual_seed(1)
    results = [eager.step(padded_to(b) if number >= UNPADDED else b) for number, b in enumerate(batches(200))]
    expected = eager.state
    torch.manual_seed(1)
    for batch, (loss, logits) in zip(batches(200), results, strict=True):
        own, cut = step(batch)
        assert torch.equal(own, loss) and torch.equal(cut, logits[:, : batch["input_ids"].shape[1]])
    assert_same(expected, found.state)
    stats = step.stats
    assert (stats.captured, stats.recaptured) == (len(SIZES), 0) and stats.replayed > 150
    assert stats.verified > 6, "and checks of replays go on as they do without padding, in one schedule for all sizes"


def test_the_report() -> None:
    training = Training()
    step = bucketed(training)
    made = batches(60)
    for batch in made:
        step(batch)
    lengths = [batch["input_ids"].shape[1] for batch in made[UNPADDED:]]
    sizes = [next(size for size in SIZES if size >= length) for length in lengths]
    count = sum(size > length for size, length in zip(sizes, lengths, strict=True))
    shapes = step.shapes
    assert (shapes.padded_calls, len(shapes.shapes), len(shapes.capture_sizes)) == (count, len(set(lengths)), 3)
    assert shapes.padding == pytest.approx(sum(sizes) / sum(lengths))
    line = (
        f"padding: {len(set(lengths))} shapes on 3 capture sizes; {count} calls padded; {shapes.padding:.2f} elements "
        f"for each that was fed; {shapes.checked} calls compared with unpadded ones (dimension 1 at 8, 16, 32)"
    )
    assert line in step.report() and step.data()["shapes"]["padded_calls"] == count
    assert step.stats.calls == 60, "rehearsals are no calls"


def test_equal_to_eager_steps_on_batches_as_they_came_but_for_rounding() -> None:
    eager, found = (Training(optimizer=SGD) for _ in range(2))
    step = bucketed(found)
    for batch in batches(60):
        torch.testing.assert_close(step(batch)[0], eager.step(batch)[0].detach(), rtol=1e-4, atol=1e-5)
    for one, other in zip(found.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


class Normalised(Masked):
    """With statistics of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.norm(super().forward(ids, mask).transpose(1, 2)).transpose(1, 2)


class Short(Masked):
    """With no positions beyond those of the longest batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(SIZES[-1] - 1, WIDTH)


class Mean(Training):
    """Over all positions."""

    def step(self, batch: Batch) -> Any:
        return super().step({**batch, "labels": batch["labels"].clamp(0)})


class Flat(Training):
    """What it returns has a dimension of all positions of all rows."""

    def step(self, batch: Batch) -> Any:
        loss, logits = super().step(batch)
        return loss, logits.flatten(0, 1)


class Counting(Training):
    """Counts positions as a Python number."""

    seen = 0

    def step(self, batch: Batch) -> Any:
        self.seen += batch["input_ids"].shape[1]
        return super().step(batch)

    @property
    def owners(self) -> dict[str, Any]:
        return {**super().owners, "training": self}


class Noisy(Training):
    """Draws random numbers other than dropout's."""

    def step(self, batch: Batch) -> Any:
        loss, logits = super().step(batch)
        return loss + torch.rand(()), logits


BEYOND = r"rounding comes to \d\S*"
FIX = r"\(and \d+ more: .*Expected the outcome without padding, within rounding: mask the padding .*shapes='exact'"
REFUSED: dict[str, tuple[Callable[[], Training], dict[str, Any], str]] = {
    "batch norm": (
        partial(Training, Normalised),
        {},
        r"padding from \d+ to \d+ changes the outcome of the step: model\.norm\.running_mean: 24 of 24 elements "
        rf"differ, by \S+ \(Euclidean\); the padded step's update is \S+ long, the unpadded step's \S+; {BEYOND} {FIX}",
    ),
    "a mean over all positions": (
        Mean,
        {},
        rf"outcome of the step: result\[0\]: \d\.\d+ by the padded step, \d\.\d+ by the unpadded step; {BEYOND} {FIX}",
    ),
    "another pad value": (
        Training,
        {"pad": 0},
        rf"outcome of the step: result\[0\]: \d\.\d+ by the padded step, \d\.\d+ by the unpadded step; {BEYOND} {FIX}",
    ),
    "no position": (
        partial(Training, Short),
        {"buckets": {1: [SIZES[-1]]}},
        "changes the outcome of the step: the padded step raises IndexError: index out of range",
    ),
    "a flat result": (
        Flat,
        {},
        r"result\[1\] is torch\.float32\[\d+, 24\] without padding and torch\.float32\[\d+, 24\] with it, and "
        "dimension 0 follows no padded dimension of the inputs",
    ),
    "a count": (Counting, {}, r"training\.seen: \d+ after the padded step, \d+ after the unpadded step"),
    "other draws": (
        Noisy,
        {},
        r"the step draws random numbers: at test_training_buckets\.py:\d+ in step: `return loss \+ torch\.rand.*`\. "
        "For a padded batch it draws other and more numbers, .* can leave out dropout",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_padding_that_makes_a_difference_is_refused_by_name(name: str) -> None:
    """The call has not happened."""
    make, options, text = REFUSED[name]
    training = make()
    step = bucketed(training, **options)
    first, second, third, *_ = batches(8, longest=SIZES[-1] - 1)
    step(first)
    step(second)
    before = training.state
    for _ in range(2):
        with pytest.raises(PaddingError, match=text):
            step(third)
        assert_same(before, training.state)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.crossed(2)
def test_with_eager_all_batches_are_taken_as_they_came(name: str) -> None:
    """Each once: bit by bit the steps without graphplan, and replayed where a shape comes again."""
    make, options, text = REFUSED[name]
    eager, found = make(), make()
    step = bucketed(found, on_failure="eager", allow=("training.seen",) if name != "a count" else (), **options)
    made = batches(6, longest=SIZES[-1] - 1)
    calls = [*made, *made[2:4] * 8]
    torch.manual_seed(1)
    expected = [keep(eager.step(batch)) for batch in calls]
    expected_state = eager.state
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=f"graphplan no longer pads this step's batches: .*{text}") as said:
        results = [keep(step(batch)) for batch in calls]
    assert sum("no longer pads" in str(warning.message) for warning in said) == 1
    assert_same(flatten(results=expected), flatten(results=results))
    assert_same(expected_state, found.state)
    assert step.stats.captured == 2 and step.stats.replayed > 0 and step.shapes.padded_calls == 0
    assert "no longer padded: " in step.report()


def test_a_count_that_may_differ() -> None:
    training = Counting()
    step = bucketed(training, allow=("training.seen",))
    for batch in batches(30):
        step(batch)
    assert step.shapes.padded_calls > 10 and step.stats.replayed > 0


def test_a_batch_beyond_the_largest_size_has_its_own_shape() -> None:
    eager, found = Training(), Training()
    step = bucketed(found)
    long = next(batch for batch in batches(40, longest=LONGEST) if batch["input_ids"].shape[1] > SIZES[-1])
    length = long["input_ids"].shape[1]
    for number, batch in enumerate([*batches(10), *[long] * 8, *batches(10)]):
        assert_same_call(eager, step, batch, pads=number >= UNPADDED)
    assert_same(eager.state, found.state)
    event = (
        f"not padded: dimension 1 of args[0]['input_ids'] has {length} elements, which is beyond the largest capture"
    )
    assert f"  event 8x: {event} size 32\n" in step.report()
    assert any(str(length) in str(program.plan.feed) for program in step.programs), "and a program of its own"


def test_rows_under_a_mask_that_the_step_asks_for() -> None:
    """Also in the calls that are not padded: before it is known what the step changes, and without programs."""
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    seen: list[int] = []

    def train(x: Tensor, y: Tensor, real: Tensor, noted: bool = True) -> Tensor:
        optimizer.zero_grad()
        loss = (F.cross_entropy(model(x), y, reduction="none") * real).sum() / real.sum()
        loss.backward()
        optimizer.step()
        return loss

    options: dict[str, Any] = {"shapes": "bucket", "buckets": [4, 8], "mask": "real", "backend": "tape"}
    step = graph_step(train, owners=[model, optimizer], **options)
    rng = random.Random(0)
    for _ in range(40):
        size = rng.randint(1, 9)
        seen.append(size)
        x, y = torch.randn(size, 4), torch.randint(3, (size,))
        loss = step(x, y)
        other.zero_grad()
        expected = F.cross_entropy(twin(x), y)
        expected.backward()
        other.step()
        torch.testing.assert_close(loss, expected.detach())
    assert step.stats.captured == 2 + (seen.count(9) > 5) and step.shapes.padded_calls > 20
    torch.testing.assert_close(model.weight, twin.weight)
    down = graph_step(train, owners=[model, optimizer], min_speedup=1.0, **options)
    down(torch.randn(3, 4), torch.randint(3, (3,)))
    down(torch.randn(3, 4), torch.randint(3, (3,)))
    assert down.machine.timing.is_stock and down.stats.eager == 2, "eager steps are being timed"
    eager = graph_step(train, owners=[model, optimizer], **{**options, "backend": "eager"})
    eager(torch.randn(3, 4), torch.randint(3, (3,)))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'real'"):
        step(object(), object())


def test_arguments_by_name_and_gradients_that_add_up() -> None:
    """Two batches to a step of the optimizer: a program for each, at each size."""

    class Adding(Training):
        def step(self, batch: Batch, last: bool = False) -> Any:
            loss, logits = loss_of(self.model, batch)
            (loss / 2).backward()
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()
            return loss, logits

    eager, found = Adding(), Adding()
    step = bucketed(found)
    for number, batch in enumerate(batches(80)):
        last = number % 2 == 1
        loss, _ = eager.step(padded_to(batch) if number >= UNPADDED else batch, last)
        assert torch.equal(step(batch, last=last)[0], loss)
    assert_same(eager.state, found.state)
    assert step.stats.captured == 2 * len(SIZES) and step.stats.replayed > 20


def test_what_a_rehearsal_does_is_undone() -> None:
    """Also to what only a name leads to, and to a generator of the step's own."""
    counts, generator = torch.zeros(2), torch.Generator().manual_seed(3)
    calls: list[int] = []

    class Writing(Training):
        def step(self, batch: Batch) -> Any:
            counts.add_(1)
            batch["labels"].masked_fill_(batch["attention_mask"] == 0, -100)
            calls.append(1)
            return super().step(batch)

    training = Writing()
    step = bucketed(training, pad=0, allow=("calls",))
    made = batches(40)
    for number, batch in enumerate(made):
        batch["labels"][:, -1] = 5
        step(batch)
        assert counts.tolist() == [number + 1] * 2
        hidden = batch["attention_mask"] == 0
        assert bool((batch["labels"][hidden] == -100).all()), "what it does to its batch, it does to the caller's"
    assert generator.initial_seed() == 3 and step.shapes.checked > 5 and step.stats.replayed > 10


def test_a_draw_from_a_generator_of_the_steps_own_is_undone_and_refused() -> None:
    generator = torch.Generator().manual_seed(3)

    class Drawing(Training):
        def step(self, batch: Batch) -> Any:
            loss, logits = super().step(batch)
            return loss + torch.rand((), generator=generator), logits

    training = Drawing()
    step = bucketed(training)
    first, second, third, *_ = batches(3)
    step(first)
    step(second)
    state = generator.get_state()
    with pytest.raises(PaddingError, match=r"the step draws random numbers: at .*torch\.rand"):
        step(third)
    assert torch.equal(generator.get_state(), state)


def test_a_step_that_changes_the_container_of_its_batch_is_refused() -> None:
    class Taking(Training):
        def step(self, batch: Batch) -> Any:
            batch["seen"] = True
            return super().step(batch)

    step = bucketed(Taking(), warmup_steps=1)
    first, second, third, *_ = batches(3)
    step(first)
    step(second)
    with pytest.raises(
        HostEffectError, match=r"changes a container among its arguments: args\[0\]\['seen'\] was added"
    ):
        step(third)
    assert "seen" in first and "seen" not in third


def test_an_error_of_the_steps_own_is_what_it_is_without_graphplan() -> None:
    class Failing(Training):
        def step(self, batch: Batch) -> Any:
            if "bad" in batch["texts"]:
                raise ValueError("a bad batch")
            return super().step(batch)

    eager, found = Failing(), Failing()
    step = bucketed(found)
    made = batches(12)
    made[UNPADDED]["texts"] = ["bad", "b", "c"]
    for number, batch in enumerate(made):
        if number == UNPADDED:
            with pytest.raises(ValueError, match="a bad batch"):
                eager.step(batch)
            with pytest.raises(ValueError, match="a bad batch"):
                step(batch)
        else:
            assert_same_call(eager, step, batch, pads=number > UNPADDED)
    assert_same(eager.state, found.state)
    assert "event 1x: not padded: it could not be compared: ValueError: a bad batch" in step.report()


def test_a_step_that_overflows_is_not_compared() -> None:
    """Nothing times infinity is no number: where there is padding, too. The next batch is."""

    class Overflowing(Training):
        def step(self, batch: Batch) -> Any:
            self.optimizer.zero_grad()
            loss, logits = loss_of(self.model, batch)
            loss = loss * batch["scale"]
            loss.backward()
            nn.utils.get_total_norm([param.grad for param in self.model.parameters() if param.grad is not None])
            return loss, logits

    training = Overflowing()
    step = bucketed(training, buckets={1: [SIZES[-1]]})
    for number, batch in enumerate(batches(8)):
        step({**batch, "scale": torch.tensor(torch.inf if number == UNPADDED else 1.0)})
        assert (step.shapes.padded_calls > 0) == (number > UNPADDED)
    assert "could not be compared: model.positions.weight.grad has infinite or NaN elements" in step.report()


def test_without_room_for_a_comparison_nothing_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, found = Training(), Training()
    step = bucketed(found)
    monkeypatch.setattr(padded_batches, "find_room", lambda *_, copies: (None, "there is no room"))
    for batch in batches(8):
        assert_same_call(eager, step, batch, pads=False)
    assert step.shapes.padded_calls == 0 and "could not be compared: there is no room" in step.report()


@pytest.mark.parametrize(("verify", "checks"), [("geometric", [1, 2, 4, 8, 16]), (5, [1, 5, 10, 15, 20]), ("off", [1])])
def test_which_calls_are_compared(verify: Any, checks: list[int]) -> None:
    """The first of each size in any case."""
    step = bucketed(Training(), verify=verify, buckets={1: [SIZES[-1]]})
    made = [batch for batch in batches(40) if batch["input_ids"].shape[1] < SIZES[-1]]
    found = []
    for number, batch in enumerate(made[: UNPADDED + 20], 1 - UNPADDED):
        before = step.shapes.checked
        step(batch)
        found += [number] * (step.shapes.checked - before)
    assert found == checks


def test_comparisons_take_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there were 64 calls of a size."""
    step = bucketed(Training(), buckets={1: [SIZES[-1]]})
    made = [batch for batch in batches(80) if batch["input_ids"].shape[1] < SIZES[-1]][: UNPADDED + 64]
    for batch in made:
        step(batch)
    (kind, *_) = step._padded.padding._kinds.values()
    assert kind.size.calls == 64 and kind.size.next_check > 128, "a comparison is longer than a step"


def test_results_of_another_structure_cannot_be_cut() -> None:
    """The step is taken; what it returned is told from the error, or comes as it is."""

    class Changing(Training):
        returns_all = False

        def step(self, batch: Batch) -> Any:
            loss, logits = super().step(batch)
            return (loss, logits) if self.returns_all else loss

        @property
        def owners(self) -> dict[str, Any]:
            return {**super().owners, "training": self}

    made = [batch for batch in batches(20) if batch["input_ids"].shape[1] < SIZES[-1]]
    for on_failure in ("raise", "eager"):
        training, text = Changing(), "the step returns another structure than in the compared call"
        step = bucketed(training, buckets={1: [SIZES[-1]]}, on_failure=on_failure)
        for batch in made[: UNPADDED + 2]:
            step(batch)
        training.returns_all = True
        if on_failure == "raise":
            with pytest.raises(PaddingError, match=text) as caught:
                step(made[-1])
            _, logits = caught.value.result
        else:
            with pytest.warns(UserWarning, match=text):
                _, logits = step(made[-1])
            assert step(made[-2])[1].shape[1] == made[-2]["input_ids"].shape[1]
        assert logits.shape[1] == SIZES[-1]


def test_what_is_no_plain_tensor_is_not_padded() -> None:
    """Nor is a call within a mode, or one through which gradients would flow."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    eager, found = Training(), Training()
    step = bucketed(found)
    made = batches(8)
    for number, batch in enumerate(made[:4]):
        assert_same_call(eager, step, batch, pads=number >= UNPADDED)
    made[4]["input_ids"].note = "marked"
    assert_same_call(eager, step, made[4], pads=False)
    with Watching(), pytest.warns(UserWarning, match="runs calls eagerly while"):
        assert_same_call(eager, step, made[5], pads=False)
    assert step.stats.skipped[SkipReason.SURROUNDINGS] == 1
    count = step.shapes.padded_calls
    assert_same_call(eager, step, made[6])
    assert step.shapes.padded_calls == count + 1
    step.close()
    with pytest.raises(Exception, match="this step was closed"):
        step(made[7])


def test_calls_from_within_the_step() -> None:
    class Nested(Training):
        inner: Any = None

        def step(self, batch: Batch) -> Any:
            if self.inner is not None:
                self.inner(batch)
            return super().step(batch)

    training = Nested()
    step = bucketed(training)
    for batch in batches(3):
        step(batch)
    training.inner = step
    with pytest.raises(BusyError, match="from within its own call"):
        step(batches(1)[0])


def test_an_error_of_graphplans_own_in_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, found = Training(), Training()
    step = bucketed(found)
    monkeypatch.setattr(PaddingCheck, "run", lambda *args: [].pop())
    first, *others = batches(UNPADDED + 1)[::-1]
    for batch in others:
        assert_same_call(eager, step, batch, pads=False)
    with pytest.warns(
        UserWarning, match="does not pad a batch, because its comparison failed with IndexError: pop from"
    ):
        assert_same_call(eager, step, first, pads=False)
    assert_same(eager.state, found.state)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shapes": "eager"}, "shapes is 'eager'; expected one of: exact, bucket"),
        ({"shapes": "bucket"}, "shapes='bucket' needs capture sizes"),
        ({"buckets": [4]}, "buckets is given with shapes='exact'"),
        ({"mask": "real"}, "mask is given with shapes='exact'"),
        ({"shapes": "bucket", "buckets": [0]}, "buckets has the size 0"),
        ({"shapes": "bucket", "buckets": [4], "mode": "inference"}, "shapes='bucket' of graph_step is for training"),
        ({"shapes": "bucket", "buckets": [4], "mask": "real"}, "mask names 'real'; expected one of: batch"),
        ({"shapes": "bucket", "buckets": [4], "pad": "0"}, "pad is '0'; expected a number"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    training = Training()
    with pytest.raises(OptionError, match=text):
        graph_step(training.step, owners=training.owners, **options)


@pytest.mark.parametrize("calls", range(5))
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), r"missing 1 required positional argument: 'batch'"),
        (({}, {}), "takes 2 pos.* but 3 were"),
        ((3,), "subscr"),
    ],
)
def test_a_wrong_call_gets_its_own_error(args: tuple[Any, ...], said: str, calls: int) -> None:
    """At whichever call: none of its arguments has a dimension, which is no word about the options."""
    training = Training()
    step = bucketed(training)
    for batch in batches(calls):
        step(batch)
    with pytest.raises(TypeError, match=said):
        step(*args)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pad": {"label": -100}}, "pad names 'label'; expected one of: batch, input_ids, batch"),
        ({"dynamic": {"ids": 1}}, "dynamic names 'ids'; expected one of: batch, input_ids, batch"),
        ({"dynamic": None}, "buckets has sizes for dimension 1, but no argument"),
    ],
)
def test_names_that_nothing_in_the_batch_has(options: dict[str, Any], text: str) -> None:
    training = Training()
    step = bucketed(training, **options)
    first, second, third = batches(3)
    step(first)
    step(second)
    with pytest.raises(OptionError, match=text):
        step(third)


def test_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    options = Options(shapes="bucket", buckets=[4])
    with pytest.raises(OptionError, match="shapes='bucket' does not work with several ranks"):
        GraphedStep(training.step, training.owners, options, None, Ranks(monkeypatch).rank_0)


def test_dropout_in_attention_and_fused_is_left_out_of_rehearsals() -> None:
    """Whatever operator it is; its generator is where it was."""
    x = torch.randn(2, 4, 8, requires_grad=True)
    q = torch.randn(1, 2, 4, 8)
    state = torch.get_rng_state()
    with RehearsalMode(set()) as mode:
        assert torch.equal(torch.native_dropout(x, 0.5, True)[0], x)
        assert torch.equal(F.dropout(x, 0.5), x) and torch.equal(x.new_empty(3).bernoulli_(), torch.full((3,), 0.5))
        kept = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.9)[0]
        named = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, dropout_p=0.9)[0]
    assert torch.equal(kept, named) and mode.draws == [] and torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(kept, F.scaled_dot_product_attention(q, q, q))
    random.seed(0)
    with RehearsalMode(set()) as mode:
        random.random()
        torch.rand(3)
    assert mode.draws[0] == "Python's random generator" and "torch.rand(3)" in mode.draws[1]
    mode.record.undo_uncopied_writes()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.soak
def test_bert_with_dynamic_padding() -> None:
    """A library's own model, with dropout, on batches padded to their longest sentence."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64,
    )  # fmt: skip

    class Bert(Training):
        def step(self, batch: Batch) -> Any:
            self.optimizer.zero_grad()
            inputs = {name: value for name, value in batch.items() if name != "texts"}
            out = self.model(**inputs)
            out.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            return out.loss, out.logits

    eager, found = (Bert(lambda: transformers.BertForMaskedLM(config)) for _ in range(2))
    step = bucketed(found, buckets={1: [16, 32]})
    torch.manual_seed(1)
    losses = [
        eager.step(padded_to(batch, [16, 32]) if number >= UNPADDED else batch)[0].detach()
        for number, batch in enumerate(batches(40))
    ]
    expected = eager.state
    torch.manual_seed(1)
    for batch, loss in zip(batches(40), losses, strict=True):
        own, logits = step(batch)
        assert torch.equal(own, loss) and logits.shape[1] == batch["input_ids"].shape[1]
    assert_same(expected, found.state)
    assert step.stats.captured == 2 and step.stats.replayed > 20
