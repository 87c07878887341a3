"""Images: a ResNet of timm learns the handwritten digits in a Lightning Trainer, with one callback more.

python recipes/examples/vision.py      (needs lightning, timm, scikit-learn)
"""

import timm
import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from graphplan import GraphPlanCallback


class Classifier(LightningModule):
    """The smallest ResNet, for ten classes of images with one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.network = timm.create_model("resnet10t", num_classes=10, in_chans=1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels, label_smoothing=0.1)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """The share of images that are recognised."""
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(-1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    """Train, validate, report."""
    torch.manual_seed(0)
    digits = load_digits()
    # A ResNet halves the 8 x 8 pixels five times.
    images = F.interpolate(torch.tensor(digits.images[:, None] / 16.0).float(), scale_factor=2.0)
    data = TensorDataset(images, torch.tensor(digits.target))
    training, validation = random_split(data, [1536, len(data) - 1536])
    callback = GraphPlanCallback()
    trainer = Trainer(
        max_epochs=2, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(training, 64, shuffle=True), DataLoader(validation, 64))
    print(f"accuracy: {trainer.callback_metrics['accuracy']:.3f}")
    print(callback.report())


if __name__ == "__main__":
    main()
