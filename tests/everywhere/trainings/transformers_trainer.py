"""Transformers: a Trainer with a callback, shuffled samples, AdamW, dropout and an evaluation."""

from __future__ import annotations

from typing import Any

import task
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

import holdfast.transformers


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, task.HIDDEN),
            torch.nn.Tanh(),
            torch.nn.Dropout(task.DROPPED),
            torch.nn.Linear(task.HIDDEN, 1),
        )

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layers(inputs)
        return {"loss": F.mse_loss(found, labels), "found": found}


class LogValidation(TrainerCallback):
    """Under the name that it has in all these trainings."""

    def on_evaluate(self, *_: Any, metrics: Any, **__: Any) -> None:
        assert ours.run is not None
        ours.run.log(val_loss=metrics["eval_loss"])


torch.set_num_threads(1)
torch.manual_seed(3)
samples = [
    {"inputs": torch.from_numpy(inputs), "labels": torch.from_numpy(targets)}
    for inputs, targets in zip(task.INPUTS, task.TARGETS, strict=True)
]
ours = holdfast.transformers.Callback(task.FOLDER, settings=task.SETTINGS)
trainer = Trainer(
    Net(),
    TrainingArguments(
        "output",
        num_train_epochs=task.EPOCHS,
        per_device_train_batch_size=task.BATCH,
        per_device_eval_batch_size=task.SAMPLES,
        learning_rate=task.RATE,
        eval_strategy="epoch",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=samples,
    eval_dataset=samples,
    callbacks=[ours, LogValidation()],
)
trainer.train()
