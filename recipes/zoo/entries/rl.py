"""Reinforcement learning, from stored transitions and from environments of gymnasium."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.benchmarks.steps import SoftActorCritic, perceptron, soft_actor_critic, transitions
from recipes.zoo.batches import many
from recipes.zoo.registry import Case, Scale, entry


def _rollout(name: str, steps: int) -> dict[str, Tensor]:
    """Transitions of a random policy in an environment."""
    import gymnasium

    environment = gymnasium.make(name)
    environment.action_space.seed(0)
    rows: dict[str, list[Any]] = {key: [] for key in ("observation", "action", "reward", "next", "done")}
    observation, _ = environment.reset(seed=0)
    for _ in range(steps):
        action = environment.action_space.sample()
        following, reward, ended, cut, _ = environment.step(action)
        for key, value in zip(rows, (observation, action, reward, following, ended or cut), strict=True):
            rows[key].append(torch.as_tensor(value, dtype=torch.int64 if key == "action" else torch.float32))
        observation = environment.reset()[0] if ended or cut else following
    return {key: torch.stack(values) for key, values in rows.items()}


class _DQN(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.online = perceptron(4, width, 2, 2, nn.ReLU)
        self.target = deepcopy(self.online).requires_grad_(False)


@entry("rl/dqn", "gymnasium")
def dqn(scale: Scale) -> Case:
    """Q-learning on CartPole's transitions, with a slow target."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            worth = batch["reward"] + 0.99 * (1 - batch["done"]) * model.target(batch["next"]).amax(-1)
            for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
                slow.lerp_(fast, 0.005)
        said = model.online(batch["observation"]).gather(1, batch["action"][:, None]).squeeze(1)
        return F.smooth_l1_loss(said, worth)

    table = _rollout("CartPole-v1", 512)
    size = scale.pick(32, 256)

    def batch() -> dict[str, Tensor]:
        rows = torch.randint(512, (size,))
        return {key: value[rows] for key, value in table.items()}

    return Case(_DQN(scale.pick(32, 256)), many(batch), loss, parts=lambda model: [model.online])


@entry("rl/ppo")
def ppo(scale: Scale) -> Case:
    """A clipped policy update with torch.distributions, which validate their arguments."""
    from torch.distributions import Categorical

    model = nn.ModuleDict({"policy": perceptron(4, 64, 2, 2, nn.Tanh), "value": perceptron(4, 64, 1, 2, nn.Tanh)})

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        policy = Categorical(logits=model["policy"](batch["observation"]))
        ratio = (policy.log_prob(batch["action"]) - batch["log_prob"]).exp()
        gain = torch.minimum(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"]).mean()
        value = F.mse_loss(model["value"](batch["observation"]).squeeze(-1), batch["return"])
        return 0.5 * value - gain - 0.01 * policy.entropy().mean()

    size = scale.pick(64, 2048)

    def batch() -> dict[str, Tensor]:
        given = {key: torch.randn(size) for key in ("advantage", "return")}
        action = torch.randint(2, (size,))
        return {**given, "observation": torch.randn(size, 4), "action": action, "log_prob": torch.full((size,), -0.7)}

    return Case(model, many(batch), loss)


@entry("rl/sac_manual")
def sac(scale: Scale) -> Case:
    """A soft actor-critic with manual optimization and three optimizers."""
    generator = torch.Generator().manual_seed(0)
    batches = many(lambda: transitions(generator, size=scale.pick(32, 256), observed=8, acted=2))

    def update(
        model: Any, optimizers: list[Any], batch: tuple[Tensor, Tensor], backward: Callable[[Tensor], Any]
    ) -> Tensor:
        return soft_actor_critic(model.agent, optimizers, *batch, backward)

    class Agent(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.agent = SoftActorCritic(8, 2, width)
            self.temperature = nn.ParameterList([self.agent.log_temperature])

    parts = lambda model: [model.agent.critics, model.agent.actor, model.temperature]  # noqa: E731
    return Case(Agent(scale.pick(32, 256)), batches, update=update, parts=parts)
