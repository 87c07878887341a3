"""A training step in two parts."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer


class Parts:
    """A model, its optimizer, and the two parts of a step; a part of eager's may look at values."""

    threshold = 0.2
    """Of the loss: what lies above it goes another way."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, sets_to_none: bool) -> None:
        self.model, self.optimizer = model, optimizer
        self.owners = {"model": model, "optimizer": optimizer}
        self.sets_to_none = sets_to_none

    def forward_backward(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss.detach()

    def branching(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss = loss * 2 if complex(loss.detach()).real > self.threshold else loss.sqrt()
        loss.backward()
        return loss.detach()

    def update(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.sets_to_none)
        return norm.detach()
