"""A GAN of the handwritten digits: two optimizers, manual optimization, and one replay for both of their steps.

python recipes/examples/gan.py      (needs lightning, scikit-learn)
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from graphplan import GraphPlanCallback


class GAN(LightningModule):
    """A generator of 8 x 8 images and what tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))

    def training_step(self, images: Tensor, batch_idx: int) -> None:
        """A step of the generator, then one of the critic."""
        for_generator, for_critic = self.optimizers()
        noise = torch.randn(len(images), 16, device=images.device)
        made = self.generator(noise)
        fooled = F.softplus(-self.critic(made)).mean()
        for_generator.zero_grad()
        self.manual_backward(fooled)
        for_generator.step()
        told = F.softplus(-self.critic(images)).mean() + F.softplus(self.critic(made.detach())).mean()
        for_critic.zero_grad()
        self.manual_backward(told)
        for_critic.step()
        self.log_dict({"generator": fooled, "critic": told})

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One for each network."""
        return [torch.optim.Adam(net.parameters(), 1e-3, (0.5, 0.99)) for net in (self.generator, self.critic)]


def main() -> None:
    """Train and report."""
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data / 16.0).float()
    callback = GraphPlanCallback()
    trainer = Trainer(
        max_epochs=5, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(GAN(), DataLoader(images, 64, shuffle=True, drop_last=True))
    print(", ".join(f"{name}: {value:.2f}" for name, value in trainer.callback_metrics.items()))
    print(callback.report())


if __name__ == "__main__":
    main()
