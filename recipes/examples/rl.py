"""Reinforcement learning: PPO balances a pole. Games are played eagerly, each update of the policy is a replay.

python recipes/examples/rl.py      (needs gymnasium)
"""

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from graphplan import graph_step

GAMES, STEPS, UPDATES, EPOCHS, BATCH = 8, 64, 12, 6, 128
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def update(seen: Tensor, action: Tensor, old: Tensor, gain: Tensor, reached: Tensor) -> Tensor:
    """One step on a batch of moves: PPO's clipped objective, the error of the value, and entropy."""
    scores = model(seen)
    chances, value = Categorical(logits=scores[:, :2]), scores[:, 2]
    ratio = (chances.log_prob(action) - old).exp()
    clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    loss = (value - reached).square().mean() - clipped - 0.01 * chances.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def main() -> None:
    """Play, update, report."""
    step = graph_step(update, owners={"model": model, "optimizer": optimizer})
    games = gymnasium.make_vec("CartPole-v1", GAMES)
    seen = torch.tensor(games.reset(seed=0)[0], device=device)
    for number in range(UPDATES):
        rows, reached = [], []
        for _ in range(STEPS):
            scores = model(seen).detach()
            chances = Categorical(logits=scores[:, :2])
            action = chances.sample()
            after, _, fell, cut, _ = games.step(action.cpu().numpy())
            rows.append((seen, action, chances.log_prob(action), scores[:, 2], torch.tensor(~(fell | cut)).to(device)))
            seen = torch.tensor(after, device=device)
        total = model(seen)[:, 2].detach()
        for *_, stands in reversed(rows):
            total = 0.01 + 0.98 * stands * total
            reached.insert(0, total)
        returns, old = torch.cat(reached), [torch.cat(part) for part in zip(*rows, strict=True)]
        gain = (returns - old[3]) / returns.std()
        for chosen in torch.cat([torch.randperm(len(gain), device=device) for _ in range(EPOCHS)]).split(BATCH):
            step(old[0][chosen], old[1][chosen], old[2][chosen], gain[chosen], returns[chosen])
        print(f"update {number}: a game has {len(gain) / max(1, len(gain) - old[4].sum()):.0f} steps")
    print(step.report())


if __name__ == "__main__":
    main()
