"""The ``Trainer`` of transformers, with and without replays: whatever it leaves is the same, bit by bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from graphplan import GraphPlanTrainer, HostSyncError
from tests.facts import assert_same, flatten

pytestmark = [
    # The library's own: of options that it renames, and of schedulers that count an optimizer's calls.
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
ROWS, LENGTH, BATCH = 48, 8, 4
STEPS = ROWS // BATCH
BEFORE_REPLAY = 6


class Graphed(GraphPlanTrainer):
    graph_options = {"on_failure": "raise"}  # noqa: RUF012


def tokens() -> list[dict[str, Tensor]]:
    rows = torch.randint(0, 32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


class Watch(TrainerCallback):
    """Keeps the gradients that an update leaves."""

    def __init__(self) -> None:
        self.gradients: list[list[Tensor]] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])


def train(
    kind: Callable[..., Trainer], folder: Path, callbacks: Any = (), resume: str | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Train a small GPT-2; the trainer, and all that it left."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    defaults: dict[str, Any] = {"num_train_epochs": 2, "logging_steps": 1, "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, report_to=[], disable_tqdm=True, use_cpu=True,
        learning_rate=1e-2, **{**defaults, **options},
    )  # fmt: skip
    watch = Watch()
    data = tokens()
    trainer = kind(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, eval_dataset=data[:BATCH],
        callbacks=[watch, *callbacks],
    )  # fmt: skip
    result = trainer.train(resume_from_checkpoint=resume)
    history = [
        {name: value for name, value in row.items() if "runtime" not in name and "per_second" not in name}
        for row in trainer.state.log_history
    ]
    left = flatten(
        model=dict(trainer.model.state_dict()), optimizer=trainer.optimizer.state_dict(), history=history,
        schedule=trainer.lr_scheduler.state_dict(), gradients=watch.gradients, loss=result.training_loss,
        generator=torch.get_rng_state(),
    )  # fmt: skip
    return trainer, left


def same(folder: Path, kind: type[Trainer] = Graphed, **options: Any) -> Any:
    """Train with and without replays, compare, and return the trainer with replays."""
    base = next(c for c in kind.__mro__ if c.__module__.startswith("transformers."))
    _, expected = train(base, folder / "eager", **options)
    trainer, found = train(kind, folder / "graphed", **options)
    assert_same(expected, found)
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optim": "sgd", "max_grad_norm": 0.0},
        {"label_smoothing_factor": 0.1},
        {"bf16": True},
        {"activation_checkpointing": True},
        {"neftune_noise_alpha": 5.0, "weight_decay": 0.1},
        {"logging_nan_inf_filter": False, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    ],
    ids=lambda options: "+".join(options) or "defaults",
)
@pytest.mark.crossed(2)
@pytest.mark.twice
def test_the_whole_step_is_replayed(options: dict[str, Any], tmp_path: Path) -> None:
    stats = same(tmp_path, **options).graphed.stats
    assert (stats.captured, stats.replayed) == (1, 2 * STEPS - BEFORE_REPLAY), stats.events


def test_accumulated_gradients(tmp_path: Path) -> None:
    """Batches with and without an update have a program each, for which one trace is enough."""
    stats = same(tmp_path, gradient_accumulation_steps=2, num_train_epochs=3).graphed.stats
    assert (stats.traced, stats.captured, stats.replayed) == (2, 2, 3 * STEPS - 2 * BEFORE_REPLAY + 2)


def test_evaluations_and_checkpoints_in_between(tmp_path: Path) -> None:
    """Only the first checkpoint changes what the step reads, the model's configuration: an eager step follows, then a
    capture. A training goes on from another's checkpoint, with and without replays.
    """
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 16}
    stats = same(tmp_path, num_train_epochs=4, **options).graphed.stats
    assert (len(stats.events), stats.recaptured) == (2, 1), stats.events
    assert all("model.config.dtype was None and is 'float32'" in event for event in stats.events)
    assert stats.replayed >= 4 * STEPS - 2 * BEFORE_REPLAY
    options["num_train_epochs"] = 4
    _, expected = train(Trainer, tmp_path / "again", resume=str(tmp_path / "graphed" / "checkpoint-16"), **options)
    trainer, found = train(Graphed, tmp_path / "other", resume=str(tmp_path / "eager" / "checkpoint-16"), **options)
    assert_same(expected, found)
    assert trainer.graphed.stats.replayed >= 4 * STEPS - 16 - 2 * BEFORE_REPLAY


@pytest.mark.twice
def test_a_second_training(tmp_path: Path) -> None:
    """``train()`` again has a step of its own, and optimizers are stock after each."""
    results = []
    for kind in (Trainer, Graphed):
        trainer, _ = train(kind, tmp_path / kind.__name__, num_train_epochs=1)
        trainer.train()
        results.append(flatten(model=dict(trainer.model.state_dict()), groups=trainer.optimizer.param_groups))
    assert_same(*results)
    assert trainer.graphed.stats.replayed == STEPS - BEFORE_REPLAY


class Clips(TrainerCallback):
    """Changes gradients before the optimizer's step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)


class ForwardBackward(Graphed):
    graph_optimizer = False


@pytest.mark.parametrize(("kind", "callbacks"), [(Graphed, [Clips()]), (ForwardBackward, [])], ids=["hook", "option"])
@pytest.mark.twice
def test_forward_and_backward_alone(kind: type[Trainer], callbacks: list[Any], tmp_path: Path) -> None:
    trainer = same(tmp_path, kind, callbacks=callbacks)
    assert trainer.graphed.stats.replayed == 2 * STEPS - BEFORE_REPLAY
    assert "forward and backward alone are replayed: graph_optimizer=False, a gradient" in trainer.graphed.report()
    assert not any(".exp_avg" in external.name for external in trainer.graphed.plan.externals)


class Decays(TrainerCallback):
    """Changes a number that the optimizer's kernel takes from Python."""

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * max(0, state.global_step - STEPS)


@pytest.mark.parametrize(
    ("kind", "options", "calls"),
    [
        (ForwardBackward, {"optim": "adafactor"}, 2 * STEPS),
        # The first calls, up to the refusal, are those of the step with the optimizer.
        (Graphed, {"optim": "adafactor"}, 2 * STEPS - 3),
        (Graphed, {"optim": "rmsprop", "gradient_accumulation_steps": 2}, 2 * STEPS - 6),
        (Graphed, {"callbacks": [Decays()]}, STEPS - 3),
    ],
    ids=["option", "adafactor", "rmsprop", "decay"],
)
def test_an_optimizer_that_cannot_be_captured_is_left_to_the_loop(
    kind: type[Trainer], options: dict[str, Any], calls: int, tmp_path: Path
) -> None:
    trainer = same(tmp_path, kind, **options)
    stats = trainer.graphed.stats
    assert stats.eager + stats.traced + stats.captured + stats.replayed == calls
    assert stats.replayed >= calls - 2 * BEFORE_REPLAY, stats.reasons
    why = "graph_optimizer=False" if kind is ForwardBackward else r"\w+ optimizer\.param_groups\[0\]\.\w+: .* then"
    assert re.search(f"forward and backward alone are replayed: {why}", trainer.graphed.report())


class Scaled(Trainer):
    """Trains a parameter of its loss, which ``model.zero_grad()`` does not reach, as a callback's does."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        self.scale = nn.Parameter(torch.ones(()))
        optimizer.add_param_group({"params": [self.scale]})
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * self.scale.exp() - self.scale


class Zeroes(TrainerCallback):
    def __init__(self) -> None:
        self.scales: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        scale = optimizer.param_groups[-1]["params"][0]
        self.scales += [scale.detach().clone(), scale.grad.clone()]
        optimizer.zero_grad()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_callback_zeroes_gradients(accumulated: int, tmp_path: Path) -> None:
    """After the loop's ``optimizer.step()``, which does nothing, the optimizer is as usual."""
    scales = []
    for kind in (Scaled, type("GraphedScaled", (Graphed, Scaled), {})):
        zeroes = Zeroes()
        trainer, _ = train(kind, tmp_path / kind.__name__, [zeroes], gradient_accumulation_steps=accumulated)
        scales.append(zeroes.scales)
        assert not any(type(each).__module__.startswith("graphplan") for each in trainer.callback_handler.callbacks)
    assert_same(flatten(scales=scales[0]), flatten(scales=scales[1]))
    assert trainer.graphed.stats.replayed > 2


class Curriculum(Trainer):
    """Reads what the loop counts, in its loss."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * 2 if self.state.epoch is not None and self.state.epoch >= 1 else loss


class Temperature(Trainer):
    """Has a setting of its own in its loss, and counts there."""

    temperature, calls = 1.0, 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().compute_loss(model, inputs, *args, **kwargs) / self.temperature


class Cools(TrainerCallback):
    trainer: Any = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.temperature = 1.0 + state.epoch


def other(base: type[Trainer]) -> type[Trainer]:
    return type(f"Graphed{base.__name__}", (Graphed, base), {})


@pytest.mark.twice
def test_adapters_of_peft(tmp_path: Path) -> None:
    """The adapters alone are trained."""
    peft = pytest.importorskip("peft")

    def adapt(kind: type[Trainer]) -> Callable[..., Trainer]:
        lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
        return lambda model, **rest: kind(model=peft.get_peft_model(model, lora), **rest)

    _, expected = train(adapt(Trainer), tmp_path / "eager")
    trainer, found = train(adapt(Graphed), tmp_path / "graphed")
    assert_same(expected, found)
    assert (trainer.graphed.stats.captured, trainer.graphed.stats.replayed) == (1, 2 * STEPS - BEFORE_REPLAY)
    names = [external.name for external in trainer.graphed.plan.externals if external.mutated]
    assert names
    assert all("lora_" in name for name in names if name.startswith("model."))


def test_a_step_that_reads_the_trainers_state_is_eager(tmp_path: Path) -> None:
    _, expected = train(Curriculum, tmp_path / "eager")
    with pytest.warns(UserWarning, match=r"graphplan runs this training eagerly: the step reads trainer\.state, which"):
        trainer, found = train(other(Curriculum), tmp_path / "graphed")
    assert_same(expected, found)
    assert trainer.graphed.stats.replayed == 0


class Likelihood(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(3, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        likelihood = torch.distributions.Normal(self.mean(x), 1.0, validate_args=True)
        return {"loss": -likelihood.log_prob(labels).mean()}


def test_validated_arguments(tmp_path: Path) -> None:
    """The trainer computes losses within a context manager of its own."""
    rows = [{"x": torch.randn(3), "labels": torch.randn(3)} for _ in range(ROWS)]
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Graphed(model=Likelihood(), args=arguments, train_dataset=rows)
    trainer.train()
    assert trainer.graphed is not None
    assert trainer.graphed.stats.replayed > 0
    assert "asserts a tensor's value" in trainer.graphed.report()


def test_settings_of_another_trainer_are_guarded(tmp_path: Path) -> None:
    """Its settings may change between steps, its counters count on."""
    results = []
    for kind in (Temperature, other(Temperature)):
        cools = Cools()
        torch.manual_seed(0)
        trainer = None

        def make(*args: Any, kind: Any = kind, cools: Any = cools, **kwargs: Any) -> Any:
            cools.trainer = kind(*args, **kwargs)
            return cools.trainer

        trainer, left = train(make, tmp_path / kind.__name__, callbacks=[cools])
        results.append({**left, "calls": trainer.calls})
    assert_same(*results)
    assert trainer.calls == 2 * STEPS
    assert trainer.graphed.stats.recaptured == 1
    assert trainer.graphed.stats.replayed >= STEPS - BEFORE_REPLAY


class Prints(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss if complex(loss.detach()).real > 0 else loss * 2


def test_what_cannot_be_replayed_is_eager_with_a_warning(tmp_path: Path) -> None:
    _, expected = train(Prints, tmp_path / "eager")
    kind = type("Graceful", (GraphPlanTrainer, Prints), {})
    with pytest.warns(UserWarning, match=r"graphplan runs this step eagerly: .* reads a tensor's value on the host"):
        trainer, found = train(kind, tmp_path / "graphed")
    assert_same(expected, found)
    assert trainer.graphed.stats.replayed == 0
    with pytest.raises(HostSyncError, match="reads a tensor's value on the host"):
        train(other(Prints), tmp_path / "raises")


def test_several_devices_are_left_to_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = train(Trainer, tmp_path / "eager", num_train_epochs=1)
    real: Callable[..., None] = GraphPlanTrainer._begin

    def begin(trainer: Any, model: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.accelerator), "distributed_type", "MULTI_GPU")
            real(trainer, model)

    monkeypatch.setattr(GraphPlanTrainer, "_begin", begin)
    with pytest.warns(UserWarning, match=r"the Trainer uses several devices; expected one process with one device"):
        trainer, found = train(Graphed, tmp_path / "graphed", num_train_epochs=1)
    assert_same(expected, found)
    assert trainer.graphed is None
