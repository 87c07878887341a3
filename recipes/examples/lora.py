"""Fine-tuning: adapters of peft on a small GPT-2, in the Trainer of transformers with its class replaced.

python recipes/examples/lora.py      (needs transformers, accelerate, peft)
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from graphplan import GraphPlanTrainer

LENGTH = 32


def rows(module: ModuleType) -> list[dict[str, torch.Tensor]]:
    """A module's source, byte by byte, in rows."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8").encode("ascii", "ignore")
    return [{"input_ids": row, "labels": row} for row in torch.tensor(list(source)).split(LENGTH)[:-1]]


def train(model: torch.nn.Module, module: ModuleType, steps: int, lr: float) -> GraphPlanTrainer:
    """Train ``model`` on a module's source and report."""
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, learning_rate=lr, per_device_train_batch_size=16, save_strategy="no",
            logging_strategy="no", report_to=[], disable_tqdm=True, logging_nan_inf_filter=False,
        )  # fmt: skip
        trainer = GraphPlanTrainer(model=model, args=arguments, train_dataset=rows(module))
        loss = trainer.train().training_loss
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f"{trained} parameters trained on {module.__name__}: mean loss {loss:.2f}")
    assert trainer.graphed is not None
    print(trainer.graphed.report())
    return trainer


def main() -> None:
    """Train all parameters on one text, then adapters on another one."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    train(model, argparse, 100, 3e-3)
    lora = LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    train(get_peft_model(model, lora), json.decoder, 60, 1e-2)


if __name__ == "__main__":
    main()
