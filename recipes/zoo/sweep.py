"""Train every architecture of transformers, tiny, in a Trainer: is it replayed and equal to eager, or why not?

    python -m recipes.zoo.sweep [--only 'causal/*'] [--part 0/14] [--json PATH]

Architectures are not tuned: except for sizes, each uses its configuration's defaults. One that cannot be built so, or
whose eager step fails, is skipped with the error. Nothing is timed; ``python -m recipes.zoo`` does that. The oracle is
an eager run with prepared optimizers: the run must be bitwise equal, else within the spread of eager runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphplan import GraphPlanCallback
from graphplan.backends.backend import first_line
from recipes.progress import bar
from recipes.zoo.clock import Turns
from recipes.zoo.measuring import compare, oracles_of
from recipes.zoo.registry import Case, Entry, Scale
from recipes.zoo.training import Run, fit

STEPS, ROWS, LENGTH, CLASSES = 30, 4, 16, 3
LONGEST = 90
"""Maximum seconds for one architecture: some defaults make a model that is too large."""
LARGEST = 30_000_000
"""Maximum number of parameters."""
TASKS = {
    "causal": "CAUSAL_LM", "masked": "MASKED_LM", "s2s": "SEQ_TO_SEQ_CAUSAL_LM", "sequence": "SEQUENCE_CLASSIFICATION",
    "token": "TOKEN_CLASSIFICATION", "qa": "QUESTION_ANSWERING", "image": "IMAGE_CLASSIFICATION",
    "audio": "AUDIO_CLASSIFICATION",
}  # fmt: skip
_WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "image_size")
_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "router_top_k")
SIZES: dict[str, Any] = {
    **dict.fromkeys(_WIDTH, 32), **dict.fromkeys(_DEPTH, 2), **dict.fromkeys(_HEADS, 4), **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(_EXPERTS, 4), **dict.fromkeys(_CHOSEN, 2),
    "num_key_value_heads": 2, "d_kv": 8, "head_dim": 8, "rotary_dim": 4, "vocab_size": 99,
    "max_position_embeddings": 64, "n_positions": 64, "patch_size": 8, "projection_dim": 16, "type_vocab_size": 2,
    "moe_intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LEFT_OUT = ((), ("layer_types",), ("rotary_dim", "head_dim"), ("head_dim", "layer_types"), ("num_key_value_heads",))
"""Sizes that some configurations do not accept together with others."""


def names() -> list[str]:
    """Return ``task/architecture`` for all architectures of the installed transformers."""
    from transformers.models.auto import modeling_auto

    mappings = {task: getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for task, name in TASKS.items()}
    return [f"{task}/{kind}" for task, mapping in mappings.items() for kind in sorted(mapping)]


def configuration(kind: str) -> Any:
    """Return the architecture's configuration with small sizes."""
    import transformers

    make = transformers.CONFIG_MAPPING[kind]
    stock = make()
    known = [name for name in SIZES if not isinstance(getattr(make, name, None), property)]
    sizes = {name: SIZES[name] for name in known if isinstance(getattr(stock, name, ""), int | float | None)}
    sizes |= {"layer_types": None} if getattr(stock, "layer_types", None) is not None else {}
    for left_out in _LEFT_OUT:
        with suppress(Exception):
            return make(**{name: size for name, size in sizes.items() if name not in left_out})
    return make(**sizes)


def model_of(task: str, kind: str) -> tuple[Any, Any]:
    """Return a model in training mode, and its configuration."""
    import transformers
    from transformers.models.auto import modeling_auto

    config = configuration(kind)
    with suppress(Exception):
        config.num_labels = CLASSES
    found = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES")[kind]
    make = getattr(transformers, found if isinstance(found, str) else found[0])
    count = 0
    # Count on the meta device first: some models are too large for the host.
    with torch.device("meta"), suppress(Exception):
        count = sum(param.numel() for param in make(config).parameters())
    if count > LARGEST:
        raise ValueError("the defaults make a large model")
    return make(config).train(), config


def batches(task: str, config: Any) -> list[dict[str, Tensor]]:
    """Return random batches. In batches of text, the padding has a random length in each row."""
    draw = torch.Generator().manual_seed(3)
    integers = lambda low, high, *shape: torch.randint(low, high, shape, generator=draw)  # noqa: E731
    found = []
    for _ in range(STEPS):
        if task == "image":
            pixels = torch.randn(ROWS, getattr(config, "num_channels", 3) or 3, 32, 32, generator=draw)
            found.append({"pixel_values": pixels, "labels": integers(0, CLASSES, ROWS)})
        elif task == "audio":
            values = torch.randn(ROWS, 4000, generator=draw)
            found.append({"input_values": values, "labels": integers(0, CLASSES, ROWS)})
        else:
            mask = (torch.arange(LENGTH) < integers(LENGTH // 2, LENGTH + 1, ROWS)[:, None]).long()
            ids = integers(5, 95, ROWS, LENGTH) * mask
            targets = {
                "token": {"labels": integers(0, CLASSES, ROWS, LENGTH)},
                "qa": {"start_positions": integers(0, 8, ROWS), "end_positions": integers(0, 8, ROWS)},
                "sequence": {"labels": integers(0, CLASSES, ROWS)},
            }
            labels = targets.get(task, {"labels": ids.masked_fill(mask == 0, -100)})
            found.append({"input_ids": ids, "attention_mask": mask, **labels})
    return found


def run_of(name: str) -> Run:
    """Return the run for ``name``, which is trained like an entry of the zoo, in single precision."""
    task, kind = name.split("/")
    on_gpu = torch.cuda.is_available()
    options = (("precision", "32-true"), ("deterministic", "warn" if on_gpu else None))

    def make(scale: Scale) -> Case:
        model, config = model_of(task, kind)
        return Case(model, batches(task, config), lambda model, batch: model(**batch).loss, options=options)

    return Run(Entry(name, make), on_gpu, STEPS - 1, 0, Turns(None))


def outcome(name: str) -> dict[str, Any]:
    """Train ``name`` and return its row: skipped, failed, refused, or replayed with the result of the comparison."""
    run = run_of(name)
    try:
        _, eager = fit(run)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001
        return {"name": name, "is": "skipped", "why": _line(error)}
    callback = GraphPlanCallback(on_failure="eager", min_speedup=0.0)
    try:
        _, found = fit(run, callback)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001
        return {"name": name, "is": "failed", "why": _line(error)}
    stats = callback.stats
    if not stats.replayed:
        return {"name": name, "is": "refused", "why": max(stats.reasons, key=stats.reasons.__getitem__, default="")}
    train = lambda untimed, prepared: fit(untimed, prepared)[1]  # noqa: E731
    row = compare(found, oracles_of(run, eager, train))
    return {"name": name, "is": row["equal"], "replayed": stats.replayed, "calls": stats.calls}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:200]


def _end(*_: Any) -> None:
    raise TimeoutError(f"not done in {LONGEST} s")


def _has_lost_device() -> bool:
    """Return True if a device-side assertion has made the device unusable for this process."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main(argv: Sequence[str] | None = None) -> None:
    """Train the chosen architectures; print all that are not bitwise equal, and the count of each outcome."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m recipes.zoo.sweep", description=__doc__, formatter_class=form)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="such as 'causal/*'")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="each Nth, from the Ith on: for several processes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows, after those that it has")
    args = parser.parse_args(argv)
    # cuBLAS reads it when its first handle is created.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    warnings.filterwarnings("ignore")
    first, every = map(int, args.part.split("/"))
    chosen = [name for name in names() if any(fnmatch(name, pattern) for pattern in args.only)][first::every]
    rows = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    chosen = [name for name in chosen if name not in {row["name"] for row in rows}]
    signal.signal(signal.SIGALRM, _end)
    with bar("architectures", len(chosen)) as step:
        for name in chosen:
            step(name)
            signal.alarm(LONGEST)
            try:
                rows.append(outcome(name))
            except TimeoutError as error:
                rows.append({"name": name, "is": "skipped", "why": str(error)})
            finally:
                signal.alarm(0)
            if args.json:
                args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
                if _has_lost_device():
                    os.execv(sys.executable, [sys.executable, "-m", "recipes.zoo.sweep", *(argv or sys.argv[1:])])
    for row in rows:
        if row["is"] not in ("bitwise", "skipped"):
            print(f"{row['name']:36} {row['is']}: {row.get('why', row)}")
    print(", ".join(f"{count} {kind}" for kind, count in Counter(row["is"] for row in rows).most_common()))


if __name__ == "__main__":
    main()
