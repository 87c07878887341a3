"""What a host may do to optimizers, gradients, random generators and batches between two calls of a step."""

from __future__ import annotations

import copy
import gc

import torch
from torch.nn import functional as F

from tests.random_runs.bench import Bench, event


@event
def learning_rate(bench: Bench, number: int) -> None:
    bench.group(number)["lr"] = (0.05, 0.002, 0.01, 0.0)[number % 4]


@event
def scaled_rates(bench: Bench, number: int) -> None:
    for group in bench.groups():
        group["lr"] *= 0.5


@event
def tensor_rate(bench: Bench, number: int) -> None:
    group = bench.group(number)
    if "fused" in group:
        group["lr"] = torch.tensor(0.01 * (1 + number % 3))


@event
def weight_decay(bench: Bench, number: int) -> None:
    bench.group(number)["weight_decay"] = (0.0, 0.1, 0.3)[number % 3]


@event
def momentum(bench: Bench, number: int) -> None:
    group = bench.group(number)
    if "momentum" in group:
        group["momentum"] = (0.5, 0.8, 0.95)[number % 3]
    if "betas" in group:
        group["betas"] = ((0.5, 0.9), (0.8, 0.99), (0.95, 0.999))[number % 3]


@event
def scheduler(bench: Bench, number: int) -> None:
    for each in bench.schedulers:
        each.step()


@event
def no_gradient(bench: Bench, number: int) -> None:
    bench.parameter(number).grad = None


@event
def zero_gradients(bench: Bench, number: int) -> None:
    bench.model.zero_grad(set_to_none=bool(number % 2))


@event
def own_gradient(bench: Bench, number: int) -> None:
    parameter = bench.parameter(number)
    parameter.grad = torch.full_like(parameter, 0.5)


@event
def scaled_gradient(bench: Bench, number: int) -> None:
    parameter = bench.parameter(number)
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


@event
def extra_backward(bench: Bench, number: int) -> None:
    x, y = bench.batch(number)
    F.cross_entropy(bench.model(x.detach()), y).backward()


@event
def same_moments(bench: Bench, number: int) -> None:
    for optimizer in bench.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@event
def saved_moments(bench: Bench, number: int) -> None:
    for optimizer, state in zip(bench.optimizers, bench.moments, strict=True):
        sizes = [
            [len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)
        ]
        # Groups may have come, and parameters may have left theirs.
        if sizes[0] == sizes[1]:
            optimizer.load_state_dict(copy.deepcopy(state))


@event
def checkpoint(bench: Bench, number: int) -> None:
    bench.save()


@event
def cleared_moments(bench: Bench, number: int) -> None:
    bench.optimizers[0].state.clear()


@event
def one_cleared_moment(bench: Bench, number: int) -> None:
    bench.optimizers[0].state.pop(bench.parameter(number), None)


@event
def scaled_moments(bench: Bench, number: int) -> None:
    for values in bench.optimizers[0].state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.5)


@event
def new_group(bench: Bench, number: int) -> None:
    known = {id(parameter) for group in bench.groups() for parameter in group["params"]}
    # Schedulers keep lists as long as the groups were.
    if id(bench.model.bonus) not in known and not bench.schedulers:
        bench.optimizers[0].add_param_group({"params": [bench.model.bonus], "lr": 0.02})


@event
def parameter_leaves(bench: Bench, number: int) -> None:
    parameters = bench.group(number)["params"]
    if len(parameters) > 1:
        bench_state = bench.optimizers[0].state
        bench_state.pop(parameters.pop(), None)


@event
def scale(bench: Bench, number: int) -> None:
    if bench.scaler is not None:
        bench.scaler.update(new_scale=(8.0, 1024.0, 3.0)[number % 3])


@event
def seed(bench: Bench, number: int) -> None:
    torch.manual_seed(number)


@event
def draw(bench: Bench, number: int) -> None:
    torch.rand(1 + number)


@event
def mutated_batch(bench: Bench, number: int) -> None:
    x, y = bench.batch(number)
    y.copy_(y.flip(0))
    if x.is_floating_point() and not x.requires_grad and 0 not in x.stride():
        x.mul_(1.5)


@event
def collect(bench: Bench, number: int) -> None:
    gc.collect()


@event
def invalidate(bench: Bench, number: int) -> None:
    if bench.graphed is not None:
        bench.graphed.invalidate("a random event")
