"""``train.py`` and ``conf/``: the documented command lines, and what a misspelt key, role or value is told."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig

import train
from graphplan import GraphPlanCallback, Policy, PolicyError
from recipes.configuration import ConfigError, check_config

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
CHOICES = sorted((path.parent.name, path.stem) for path in CONF.glob("*/*.yaml"))
# What train.py itself adds when it builds a model, data or a trainer: no knobs.
ADDED = {"update", "schedule"}


FORKS = multiprocessing.get_context("forkserver")
"""Its server imports PyTorch and Lightning once, for all runs of the script but the first."""
FORKS.set_forkserver_preload(["train"])


def places(folder: Path) -> list[str]:
    """Overrides for a short run on the CPU, all of whose files go below ``folder``."""
    return [
        "trainer=smoke",
        f"hydra.run.dir={folder}/run",
        f"hydra.sweep.dir={folder}/sweep",
        "trainer.accelerator=cpu",
    ]


def _main(folder: Path, arguments: Sequence[str]) -> None:
    """``python train.py`` in a process that was forked for it."""
    os.chdir(folder)
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [str(ROOT / "train.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run train.py with ``arguments`` on the CPU; whatever it writes goes below ``folder``."""
    process = FORKS.Process(target=_main, args=(folder, [*arguments, *places(folder)]))
    process.start()
    process.join(300)
    assert process.exitcode is not None, "train.py does not end"
    output = [(folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(arguments, process.exitcode, *output)


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """What a run that has to succeed printed."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def composed(*overrides: str) -> DictConfig:
    """The configuration that train.py would get for ``overrides``."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What ``python train.py`` printed, as a user starts it, and its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, str(ROOT / "train.py"), *places(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=300)
    return printed(done), folder / "run" / "checkpoints" / "last.ckpt"


def test_training_replays_and_writes_a_checkpoint(trained: tuple[str, Path]) -> None:
    output, checkpoint = trained
    # Ten batches: three warm-up steps, two traces, one capture.
    assert "5 of 10 steps replayed" in output
    assert re.search(r"^val/accuracy: 0\.\d+$", output, re.MULTILINE)
    assert f"checkpoint: {checkpoint}" in output
    assert checkpoint.is_file()
    assert (checkpoint.parents[1] / "metrics" / "metrics.csv").is_file()
    assert f"report: {checkpoint.parents[1] / 'report.html'}" in output
    assert (checkpoint.parents[1] / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_report_without_what_draws_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fit that is over does not fail for it."""
    place = SimpleNamespace(runtime=SimpleNamespace(output_dir=tmp_path))
    monkeypatch.setattr(train.HydraConfig, "get", lambda: place)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    train.tell(GraphPlanCallback())
    out = capsys.readouterr().out
    assert "graphplan: 0 plans" in out
    assert "no page: a report with format='html' is drawn by jinja2 and matplotlib, and jinja2 is not installed" in out


def test_an_eager_backend_gives_the_same_numbers(trained: tuple[str, Path], tmp_path: Path) -> None:
    output = printed(run_script(tmp_path, "backend=eager"))
    assert re.search(r"graphplan: 0 plans; 0 of \d+ steps replayed", output)
    metric = re.compile(r"^(?:train|val)/\w+: .*$", re.MULTILINE)
    assert metric.findall(output) == metric.findall(trained[0])
    assert len(metric.findall(output)) == 4


def test_options_of_the_callback_reach_the_run(trained: tuple[str, Path], tmp_path: Path) -> None:
    """The same numbers, two traces, and no replay that was checked."""
    output = printed(run_script(tmp_path, "callbacks.graphplan.verify=off", "callbacks.graphplan.debug=true"))
    assert "4 of 10 steps replayed" in output
    assert ("checked against eager" in output, "checked against eager" in trained[0]) == (False, True)
    metric = re.compile(r"^(?:train|val)/\w+: .*$", re.MULTILINE)
    assert metric.findall(output) == metric.findall(trained[0])


def test_capture_sizes_by_dimension_reach_the_fit(tmp_path: Path) -> None:
    """Rows that are padding would be part of batch norm's statistics."""
    done = run_script(tmp_path, "callbacks.graphplan.shapes=bucket", "callbacks.graphplan.buckets={0: [80]}")
    assert done.returncode == 1
    assert re.search(
        r"PaddingError: padding from 64 to 80 changes the outcome of the step: model\..*running_mean", done.stderr
    )


def test_an_option_that_makes_no_sense_is_told(tmp_path: Path) -> None:
    done = run_script(tmp_path, "callbacks.graphplan.max_recaptures=-1")
    assert done.returncode == 1
    assert "OptionError('max_recaptures is -1; expected an int >= 0')" in done.stderr


def test_the_configuration_has_every_option_of_the_callback() -> None:
    node = composed("callbacks=graphplan").callbacks.graphplan
    parameters = inspect.signature(GraphPlanCallback).parameters
    assert set(map(str, node)) - {"_target_"} == set(parameters)
    defaults = instantiate(node, _convert_="all")
    assert defaults.options == replace(GraphPlanCallback().options, policy=Policy.train())


def test_inference_predicts_with_the_inference_policy(trained: tuple[str, Path], tmp_path: Path) -> None:
    limit = "trainer.limit_predict_batches=6"
    arguments = ["mode=inference", f"ckpt_path={trained[1]}"]
    replayed = printed(run_script(tmp_path, *arguments, limit))
    eager = printed(run_script(tmp_path, *arguments, limit, "backend=eager"))
    # Five full batches, of which the first is the warm-up, two are traced and one is captured; the sixth is smaller, so
    # that it is padded.
    assert "3 of 6 steps replayed" in replayed
    assert "2 shapes on 1 capture sizes" in replayed
    result = re.compile(r"^(?:predictions|accuracy): .*$", re.MULTILINE)
    assert result.findall(replayed) == result.findall(eager)
    assert result.findall(replayed)[0] == "predictions: 359 in 6 batches"


def test_a_policy_that_leaves_out_a_role_is_refused(trained: tuple[str, Path], tmp_path: Path) -> None:
    done = run_script(
        tmp_path, "mode=inference", f"ckpt_path={trained[1]}", "mode.policies.inference.static_roles=[input]",
        "trainer.limit_predict_batches=6",
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"UncoveredRoleError: .*param", done.stderr)


def test_a_sweep_trains_every_width(tmp_path: Path) -> None:
    output = printed(run_script(tmp_path, "-m", "model.width=16,32"))
    assert output.count("5 of 10 steps replayed") == 2
    for job, width in enumerate((16, 32)):
        assert f"model.width={width}" in (tmp_path / "sweep" / str(job) / ".hydra" / "overrides.yaml").read_text()
        assert (tmp_path / "sweep" / str(job) / "checkpoints" / "last.ckpt").is_file()


def test_the_character_gpt_trains(tmp_path: Path) -> None:
    output = printed(
        run_script(tmp_path, "experiment=chargpt", "model.layers=1", "model.width=16", "data.batch_size=8")
    )
    assert "5 of 10 steps replayed" in output


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch's gloo")
@pytest.mark.soak
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """As on several machines: started by torchrun, once for each device; one of them reports."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command = [*launcher, "--rdzv-endpoint", "localhost:0", str(ROOT / "train.py"), "trainer=ddp"]
    quiet = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false", f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run(
        [*command, "trainer.max_epochs=1", *quiet], capture_output=True, text=True, check=False, timeout=300
    )
    output = printed(done)
    (replayed,) = re.findall(r"^graphplan: .* (\d+) of 12 steps replayed", output, re.MULTILINE)
    assert int(replayed) >= 4, output
    assert output.count("val/accuracy") == 1


@pytest.mark.parametrize("arguments", [("model.widht=64",), ("-m", "model.widht=64,128")], ids=["one run", "sweep"])
def test_a_misspelt_key_on_the_command_line_names_the_choices(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run_script(tmp_path, *arguments)
    assert done.returncode == 1
    message = "model has no key 'widht': did you mean 'width'? Choose from: depth, dropout, width"
    assert message in done.stderr.splitlines()


@pytest.mark.parametrize(
    ("argument", "pattern"),
    [
        (
            "modle=digits",
            r"the configuration has no key 'modle': did you mean 'mode'\? Choose from: backend, callbacks,",
        ),
        (
            "callbacks.graphplan.policies.train={}",
            r"callbacks\.graphplan\.policies has no key 'train', nor any other: override it whole, or what it is taken",
        ),
        (
            "mode.policies.train.static_roles=[inptu]",
            r"PolicyError: no role is called 'inptu'; choose from: input, param",
        ),
        (
            "+model.widht=64",
            r"ConfigError: model \(recipes\.models\.DigitsClassifier\) has no key 'widht': did you mean",
        ),
    ],
)
def test_other_mistakes_on_the_command_line_name_the_choices(argument: str, pattern: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, argument)
    assert done.returncode == 1
    assert re.search(pattern, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("group", "choice"), CHOICES)
@pytest.mark.crossed(2)
def test_every_choice_of_every_group_is_valid(group: str, choice: str) -> None:
    cfg = composed(f"{group}={choice}", "ckpt_path=last.ckpt")
    check_config(cfg)
    assert group == "experiment" or isinstance(cfg[group], DictConfig)


@pytest.mark.parametrize(
    ("overrides", "error", "pattern"),
    [
        (["+seeed=1"], ConfigError, "the configuration has no key 'seeed': did you mean 'seed'"),
        (["+mode.nmae=train"], ConfigError, "mode has no key 'nmae': did you mean 'name'"),
        (["+mode.policies.train.roles=[]"], ConfigError, "has no key 'roles': .*Choose from: copy_roles, static_roles"),
        (["mode.name=tarin"], ConfigError, "mode.name is 'tarin'; choose from: train, inference"),
        (["+mode.policies.eval={static_roles: [], copy_roles: []}"], PolicyError, "no mode is called 'eval'; choose"),
        (["mode.policies.train.static_roles=[param]"], PolicyError, "copy_roles has input, which static_roles lacks"),
        (["backend.name=egaer"], ConfigError, "backend.name is 'egaer'; choose from: auto, cudagraph, tape, eager"),
        (["+optimizer.update.rate=1"], ConfigError, r"optimizer\.update \(torch\.optim\.AdamW\) has no key 'rate'"),
        (["+optimizer.shedule=1"], ConfigError, "optimizer has no key 'shedule': did you mean 'schedule'"),
        (["+trainer.max_epoch=1"], ConfigError, "trainer .* has no key 'max_epoch': did you mean 'max_epochs'"),
        (["+callbacks.graphplan.warmup=1"], ConfigError, "has no key 'warmup': did you mean 'warmup_steps'"),
        (["+model.widht=64"], ConfigError, r"model \(recipes\.models\.DigitsClassifier\) has no key 'widht'"),
        (["model.width=wide"], ConfigError, r"model\.width is 'wide': expected int"),
        (["model.width=true"], ConfigError, r"model\.width is True: expected int"),
        (["shapes.shapes=all"], ConfigError, "shapes.shapes is 'all'; choose from: exact, bucket"),
        (["+shapes.bucket=[1]"], ConfigError, "shapes has no key 'bucket': did you mean 'buckets'"),
        (["seed=later"], ConfigError, "Value 'later' of type 'str' could not be converted to Integer"),
        (["mode=inference"], ConfigError, "mode=inference predicts with trained weights: add ckpt_path="),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)  # fmt: skip
@pytest.mark.crossed(2)
def test_a_configuration_that_makes_no_sense_is_refused(
    overrides: list[str], error: type[Exception], pattern: str
) -> None:
    with pytest.raises(error, match=pattern):
        check_config(composed(*overrides))


def test_a_misspelt_choice_of_a_group_names_the_choices() -> None:
    with pytest.raises(MissingConfigException, match=r"(?s)Could not find 'model/digit'.*options.*chargpt\s+digits"):
        composed("model=digit")


def test_a_whole_number_is_a_good_float() -> None:
    check_config(composed("model.dropout=0"))


def uncommented(path: Path) -> list[str]:
    """The lines of a YAML file that set something and have no comment, neither behind them nor right above."""
    lines = path.read_text(encoding="utf-8").splitlines()
    # A section's name and `- item`s of a list set nothing by themselves; `_target_` and its like are Hydra's.
    knob = re.compile(r"\s*[a-z]\w*:\s+\S")
    pairs = zip(["", *lines], lines, strict=False)
    return [
        line for above, line in pairs if knob.match(line) and "#" not in line and not above.lstrip().startswith("#")
    ]


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_knob_is_commented(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("#")
    assert uncommented(path) == []


def test_a_knob_without_a_comment_is_found(tmp_path: Path) -> None:
    path = tmp_path / "group.yaml"
    path.write_text(
        "# A group.\n_target_: x.Y\nwidth: 1\n\n# Commented.\ndepth: 2\nsection:\n  inner: 3\n  other: 4 # yes\n"
    )
    assert uncommented(path) == ["width: 1", "  inner: 3"]


@pytest.mark.parametrize(
    "node",
    ["model=digits", "model=chargpt", "data=digits", "data=stdlib", "callbacks=graphplan"],
)
def test_every_argument_is_a_knob(node: str) -> None:
    group, _, _ = node.partition("=")
    config: Any = composed(f"experiment={'chargpt' if 'stdlib' in node else 'digits'}", node)[group]
    config = config.graphplan if group == "callbacks" else config
    arguments = set(inspect.signature(get_object(config["_target_"])).parameters) - ADDED
    assert {str(key) for key in config if not str(key).startswith("_")} == arguments
