"""Compares a replayed run with an eager one: every loss, parameter, buffer and optimizer state, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def training_state(model: nn.Module, optimizer: Optimizer, losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """Every number that a run leaves behind, by name."""
    state = {f"loss[{step}]": loss for step, loss in enumerate(losses)}
    state |= {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                state[f"optimizer.state[{name}].{key}"] = value
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def require_equal(eager: Mapping[str, Tensor], replayed: Mapping[str, Tensor]) -> str:
    """One line that says how equal the two are.

    On a CPU the kernels are deterministic, and nothing less than bitwise equality will do. On a GPU they need not be,
    and two eager runs differ too: the largest difference is stated for the reader to judge.

    Raises:
        SystemExit: if the two are not the same on a CPU, naming the first tensor that differs.
    """
    if eager.keys() != replayed.keys():
        raise SystemExit(f"not equal to eager: only one run has {', '.join(sorted(eager.keys() ^ replayed.keys()))}")
    different = [name for name, tensor in eager.items() if not torch.equal(tensor, replayed[name])]
    if not different:
        return f"equal to eager: bitwise, all {len(eager)} tensors (losses, parameters, buffers, optimizer state)"
    first = different[0]
    if eager[first].device.type == "cpu":
        raise SystemExit(f"not equal to eager: {len(different)} of {len(eager)} tensors differ, the first is {first}")
    largest = max(float((eager[name].double() - replayed[name].double()).abs().max()) for name in different)
    return f"equal to eager: not bitwise; {len(different)} of {len(eager)} tensors differ, by at most {largest:.2e}"


def now(device: torch.device) -> float:
    """The clock, once ``device`` has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def describe_times(eager: Sequence[float], replayed: Sequence[float]) -> str:
    """One line with the median step of both runs, over each one's second half: by then every step is a usual one."""
    before, after = (median(seconds[len(seconds) // 2 :]) * 1e6 for seconds in (eager, replayed))
    return f"step time: {before:.0f} µs eager, {after:.0f} µs replayed ({before / after:.2f}x)"


def describe_launches(launches: int, replayed: int) -> str:
    """One line with what the host no longer launches."""
    return (
        f"launches saved: {replayed * (launches - 1)} ({replayed} replays of a step that launches {launches} operators)"
    )
