"""Lightning: `trainer.fit` with dropout, workers, a schedule and a validation, as a run.

    python examples/lightning_fit.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: it goes on with the next batch of the same epoch, with its optimizer,
the schedule, the means of the epoch and what early stopping has counted. However often you
interrupt it, it ends with the same hash of the weights. Two processes: `--devices 2`.
"""

import argparse
import hashlib
import logging
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping

import holdfast
import holdfast.lightning


class Spirals(torch.utils.data.Dataset):
    """Points on three spirals, each moved a little whenever it is asked for."""

    def __init__(self, size: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.which = torch.arange(size) % 3
        radius = torch.rand(size, generator=draw)
        angle = 4 * radius + 2 * torch.pi / 3 * self.which
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index] + 0.02 * torch.randn(2), self.which[index]


class Net(lightning.LightningModule):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, hidden),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(hidden, 3),
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        settle = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": settle, "monitor": "val_loss"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/lightning_fit")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--size", type=int, default=6000)
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    lightning.seed_everything(0, verbose=False)
    net = Net(hidden=64)
    keeping = holdfast.lightning.Callback(arguments.folder)
    trainer = lightning.Trainer(
        max_epochs=arguments.epochs,
        val_check_interval=0.5,
        devices=arguments.devices,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keeping, EarlyStopping("val_loss", patience=12)],
    )
    loader = torch.utils.data.DataLoader
    data = loader(Spirals(arguments.size, seed=1), batch_size=32, shuffle=True, num_workers=1)
    trainer.fit(net, data, loader(Spirals(600, seed=2), batch_size=200))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    print(f"{trainer.current_epoch} epochs, weights {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
