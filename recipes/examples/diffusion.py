"""Diffusion: a small denoiser learns the handwritten digits. A replay draws noise and averages the weights, too.

python recipes/examples/diffusion.py      (needs scikit-learn)
"""

from copy import deepcopy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from graphplan import graph_step

LEVELS, STEPS, BATCH = 100, 400, 128


class Denoiser(nn.Module):
    """Says which noise is in an image, given how strong it is."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, 128)
        self.first, self.second, self.last = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """The noise ``[images, 64]`` in ``x`` of the same shape; ``level`` is ``[images]``."""
        hidden = torch.relu(self.first(x) + self.level(level))
        return self.last(torch.relu(self.second(hidden)) + hidden)


def main() -> None:
    """Train and report."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.tensor(load_digits().data / 8.0 - 1.0).float().to(device)
    kept = torch.linspace(0.9999, 0.95, LEVELS, device=device).cumprod(0)
    model = Denoiser().to(device)
    average = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train_step(x: Tensor) -> Tensor:
        level, noise = torch.randint(LEVELS, (len(x),), device=device), torch.randn_like(x)
        share = kept[level, None]
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        loss = (model(noisy, level) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(list(average.parameters()), [p.detach() for p in model.parameters()], 0.01)
        return (average(noisy, level) - noise).square().mean()

    step = graph_step(train_step, owners={"model": model, "average": average, "optimizer": optimizer})
    errors = [step(images[torch.randint(len(images), (BATCH,), device=device)]) for _ in range(STEPS)]
    print(f"error of the averaged denoiser: {errors[0]:.2f}, at the end {torch.stack(errors[-20:]).mean():.2f}")
    print(step.report())


if __name__ == "__main__":
    main()
