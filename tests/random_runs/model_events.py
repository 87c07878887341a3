"""What a host may do to a model, and to the Python values that its step reads, between two calls of a step."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.random_runs import step
from tests.random_runs.bench import Bench, event


@event
def freeze(bench: Bench, number: int) -> None:
    parameter = bench.parameter(number)
    # The last bias stays, so that there is always something to train.
    if parameter is not bench.model.head.bias:
        parameter.requires_grad_(not parameter.requires_grad)


@event
def freeze_body(bench: Bench, number: int) -> None:
    bench.model.body.requires_grad_(bool(number % 2))


@event
def flip_module(bench: Bench, number: int) -> None:
    module = bench.module(number)
    module.train(not module.training)


@event
def flip_all(bench: Bench, number: int) -> None:
    bench.model.train(not bench.model.training)


@event
def evaluation(bench: Bench, number: int) -> None:
    modes = [(module, module.training) for module in bench.model.modules()]
    bench.model.eval()
    with torch.no_grad():
        bench.model(bench.batch(number)[0])
    for module, training in modes:
        module.training = training


@event
def swapped_data(bench: Bench, number: int) -> None:
    parameter = bench.parameter(number)
    parameter.data = parameter.data * 0.75


@event
def scaled_in_place(bench: Bench, number: int) -> None:
    with torch.no_grad():
        bench.parameter(number).mul_(0.75)


@event
def one_vector(bench: Bench, number: int) -> None:
    # Parameters become views of one tensor, each at another alignment.
    parameters = list(bench.model.parameters())
    if all(parameter.is_contiguous() for parameter in parameters):
        vector_to_parameters(parameters_to_vector(parameters).detach() * 0.9, parameters)


@event
def memory_format(bench: Bench, number: int) -> None:
    if bench.model.family == "conv":
        bench.model.to(memory_format=(torch.contiguous_format, torch.channels_last)[number % 2])


@event
def new_buffers(bench: Bench, number: int) -> None:
    for module in bench.model.modules():
        for name, value in module.named_buffers(recurse=False):
            setattr(module, name, value.clone() + number % 2)


@event
def saved_weights(bench: Bench, number: int) -> None:
    # Not strict, since a layer may have been replaced by one without weights.
    weights = {name: value.clone() for name, value in bench.weights.items()}
    bench.model.load_state_dict(weights, strict=False)


@event
def assigned_weights(bench: Bench, number: int) -> None:
    # Parameters become other objects, which the optimizer does not know.
    state = {name: value.clone() for name, value in bench.model.state_dict().items()}
    bench.model.load_state_dict(state, assign=True)


@event
def replaced_layer(bench: Bench, number: int) -> None:
    if len(bench.model.body):
        bench.model.body[number % len(bench.model.body)] = nn.Tanh()


@event
def swapped_layers(bench: Bench, number: int) -> None:
    body = bench.model.body
    if len(body) > 1:
        body[0], body[1] = body[1], body[0]


@event
def forward_hook(bench: Bench, number: int) -> None:
    bench.model.head.register_forward_hook(lambda module, args, out: out * (0.5 + number))


@event
def temperature(bench: Bench, number: int) -> None:
    bench.model.temperature = (1.0, 0.5, 2.0)[number % 3]


@event
def smoothing(bench: Bench, number: int) -> None:
    bench.model.options["smoothing"] = (0.1, 0.0, 0.3)[number % 3]


@event
def branch(bench: Bench, number: int) -> None:
    bench.model.sharp = not bench.model.sharp


@event
def decay(bench: Bench, number: int) -> None:
    bench.model.decay = (0.9, 0.5)[number % 2]


@event
def setting_of_an_object(bench: Bench, number: int) -> None:
    bench.settings.penalty = (0.0, 0.1)[number % 2]


@event
def global_value(bench: Bench, number: int) -> None:
    step.GAIN = (1.0, 0.5, 2.0)[number % 3]


@event
def closure_value(bench: Bench, number: int) -> None:
    forward = inspect.getclosurevars(bench.step).nonlocals["forward"]
    place = forward.__code__.co_freevars.index("offset")
    forward.__closure__[place].cell_contents = (0.0, 0.25)[number % 2]


@event
def value_of_layers(bench: Bench, number: int) -> None:
    for module in bench.model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = (0.1, 0.6)[number % 2]
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = (0.1, 0.4)[number % 2]


@event
def new_average(bench: Bench, number: int) -> None:
    bench.model.average = torch.zeros_like(bench.model.average) if number % 2 else bench.model.average.clone()


@event
def cleared_history(bench: Bench, number: int) -> None:
    bench.model.history.clear()


@event
def new_history(bench: Bench, number: int) -> None:
    bench.model.history = []


@event
def counter(bench: Bench, number: int) -> None:
    bench.model.seen = number
