"""Training steps that are more than a classifier's: a soft actor-critic and a physics-informed network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DISCOUNT, SMOOTHING, VISCOSITY = 0.99, 0.005, 0.01 / math.pi


def perceptron(features: int, width: int, outputs: int, depth: int, activation: type[nn.Module]) -> nn.Sequential:
    """``depth`` hidden layers."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Linear(width if index else features, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class SoftActorCritic(nn.Module):
    """An actor with a squashed Gaussian policy, two critics, their slow copies, and the entropy's temperature."""

    def __init__(self, observed: int, acted: int, width: int) -> None:
        super().__init__()
        self.sizes = (observed, acted, observed)
        self.actor = perceptron(observed, width, 2 * acted, 2, nn.ReLU)
        self.critics = nn.ModuleList(perceptron(observed + acted, width, 1, 2, nn.ReLU) for _ in range(2))
        self.targets = deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.zeros(1))

    def act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Draw an action, differentiably, and its log-probability."""
        mean, log_std = self.actor(observation).chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        # The logarithm of tanh's derivative, in a form that does not overflow.
        squashed = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - squashed
        return raw.tanh(), density.sum(-1)

    @staticmethod
    def judge(critics: Any, observation: Tensor, action: Tensor) -> Tensor:
        """What each critic says, ``[batch, 2]``."""
        both = torch.cat([observation, action], -1)
        return torch.cat([critic(both) for critic in critics], -1)


def agents_parameters(agent: nn.Module) -> list[Iterable[nn.Parameter]]:
    """What each of the three optimizers trains: critics, actor, temperature."""
    assert isinstance(agent, SoftActorCritic)
    return [agent.critics.parameters(), agent.actor.parameters(), [agent.log_temperature]]


def soft_actor_critic(
    agent: nn.Module, optimizers: Sequence[Any], x: Tensor, y: Tensor, backward: Callable[[Tensor], Any]
) -> Tensor:
    """One update of all networks from transitions: ``x`` holds observation, action and what was observed next, ``y``
    the reward and whether the episode ended.
    """
    assert isinstance(agent, SoftActorCritic)
    observation, action, following = x.split(agent.sizes, -1)
    reward, ended = y.unbind(-1)
    temperature = agent.log_temperature.exp().detach()

    def learn(index: int, loss: Tensor) -> Tensor:
        optimizers[index].zero_grad()
        backward(loss)
        optimizers[index].step()
        return loss.detach()

    with torch.no_grad():
        next_action, next_density = agent.act(following)
        worth = agent.judge(agent.targets, following, next_action).amin(-1) - temperature * next_density
        aim = reward + DISCOUNT * (1 - ended) * worth
    said = agent.judge(agent.critics, observation, action)
    loss = learn(0, F.mse_loss(said, aim.unsqueeze(-1).expand_as(said)))

    chosen, density = agent.act(observation)
    loss = loss + learn(1, (temperature * density - agent.judge(agent.critics, observation, chosen).amin(-1)).mean())
    entropy = density.detach() - chosen.shape[-1]
    loss = loss + learn(2, -(agent.log_temperature * entropy).mean())
    with torch.no_grad():
        for slow, fast in zip(agent.targets.parameters(), agent.critics.parameters(), strict=True):
            slow.lerp_(fast, SMOOTHING)
    return loss


def burgers(model: nn.Module, points: Tensor, start: Tensor) -> Tensor:
    """How far the network is from solving Burgers' equation at ``points``, columns time and place, and from ``start``
    at time zero.
    """
    points = points.detach().requires_grad_()
    u = model(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 1].sum(), points, create_graph=True)
    residual = slope[:, :1] + u * slope[:, 1:] - VISCOSITY * bend[:, 1:]
    beginning = torch.cat([torch.zeros_like(start), points.detach()[:, 1:]], -1)
    return residual.square().mean() + (model(beginning) - start).square().mean()


def transitions(generator: torch.Generator, *, size: int, observed: int, acted: int) -> tuple[Tensor, Tensor]:
    """Draw a batch from a replay buffer."""
    x = torch.randn(size, 2 * observed + acted, generator=generator)
    x[:, observed : observed + acted].tanh_()
    reward = torch.randn(size, generator=generator)
    return x, torch.stack([reward, (reward > 2).float()], -1)


def collocation(generator: torch.Generator, *, size: int) -> tuple[Tensor, Tensor]:
    """Draw points of time and place, and what the solution starts from at each place."""
    points = torch.rand(size, 2, generator=generator) * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0])
    return points, -torch.sin(math.pi * points[:, 1:])
