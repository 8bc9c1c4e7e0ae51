"""Transformers: a small GPT-2 in a `Trainer`, with evaluations, as a run that cannot be lost.

    python examples/transformers_trainer.py
    torchrun --standalone --nproc-per-node=2 examples/transformers_trainer.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: it goes on with the next step of the same epoch, with its optimizer,
its schedule and its log. However often you interrupt it, it ends with the same hash of the weights.
The model is made from its configuration; nothing is downloaded.
"""

import argparse
import hashlib
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import holdfast.transformers


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Texts that count upwards from somewhere, with a step of their own; some words are lost."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        begin = torch.randint(0, 32, (size, 1), generator=generator)
        pace = torch.randint(1, 5, (size, 1), generator=generator)
        self.texts = (begin + pace * torch.arange(16)) % 32

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = self.texts[index]
        lost = torch.rand(len(text)) < 0.05
        return {"input_ids": text.masked_fill(lost, 32), "labels": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/trainer", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--size", type=int, default=2000, help="texts in an epoch")
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    set_seed(0)
    width: dict[str, Any] = {"n_embd": options.width, "n_layer": 2, "n_head": 4}
    config = GPT2Config(vocab_size=33, n_positions=16, bos_token_id=0, eos_token_id=0, **width)
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            f"{options.folder}/output",
            num_train_epochs=options.epochs,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            eval_strategy="epoch",
            logging_steps=20,
            save_strategy="no",  # the run is saved; with "steps" the Trainer writes its own, too
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Counting(options.size, seed=1),
        eval_dataset=Counting(64, seed=2),
        callbacks=[holdfast.transformers.Callback(options.folder)],
    )
    trained = trainer.train()

    if trainer.is_world_process_zero():
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        tensors = trainer.model.state_dict().values()
        data = b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)
        digest = hashlib.sha256(data).hexdigest()[:16]
        print(f"{trained.global_step} steps, eval_loss {losses[-1]:.4f}, weights {digest}")


if __name__ == "__main__":
    main()
