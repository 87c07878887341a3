"""Text: a small GPT-2 of transformers learns Python's own sources, byte by byte, in a Lightning Trainer.

python recipes/examples/text.py      (needs lightning, transformers)
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from graphplan import GraphPlanCallback

LENGTH, BATCH, STEPS = 32, 16, 100


class Writer(LightningModule):
    """GPT-2 with two layers, made from a configuration: nothing is downloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.network = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=128, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
            )
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        loss: torch.Tensor = self.network(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW with a schedule for each step, which replays follow."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = get_cosine_schedule_with_warmup(optimizer, 10, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train and report."""
    torch.manual_seed(0)
    source = Path(argparse.__file__).read_text(encoding="utf-8").encode("ascii", "ignore")
    rows = torch.tensor(list(source)).unfold(0, LENGTH, LENGTH // 2)
    callback = GraphPlanCallback()
    trainer = Trainer(
        max_steps=STEPS, gradient_clip_val=1.0, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Writer(), DataLoader(rows, BATCH, shuffle=True, drop_last=True))
    print(f"loss: {trainer.callback_metrics['loss']:.2f} nats per byte")
    print(callback.report())


if __name__ == "__main__":
    main()
