"""Lightning: trainer.fit with a callback, a shuffling loader, Adam, dropout and a validation."""

from __future__ import annotations

import logging
import warnings

import lightning
import task
import torch
from torch.nn import functional as F

import holdfast
import holdfast.lightning


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, task.HIDDEN),
            torch.nn.Tanh(),
            torch.nn.Dropout(task.DROPPED),
            torch.nn.Linear(task.HIDDEN, 1),
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val_loss", F.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> tuple[list[object], list[object]]:
        optimizer = torch.optim.Adam(self.parameters(), lr=task.RATE)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
torch.set_num_threads(1)
lightning.seed_everything(3, verbose=False)
data = torch.utils.data.TensorDataset(torch.from_numpy(task.INPUTS), torch.from_numpy(task.TARGETS))
trainer = lightning.Trainer(
    max_epochs=task.EPOCHS,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[holdfast.lightning.Callback(task.FOLDER, settings=task.SETTINGS)],
)
loader = torch.utils.data.DataLoader
trainer.fit(
    Net(), loader(data, batch_size=task.BATCH, shuffle=True), loader(data, batch_size=task.SAMPLES)
)
