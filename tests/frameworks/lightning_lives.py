"""Fits of Lightning that are stopped and go on: lives forked from a process that has imported it.

    python -m tests.frameworks.lightning_lives PACKAGE FOLDER CASE…

Prints a line for each case: its name, and what differs from a fit that nobody has stopped.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers do; here once, and not in each life
import torchmetrics
from torch.utils.data import DataLoader, Dataset, IterableDataset

import holdfast
import holdfast.lightning

PACKAGE = sys.argv[1] if __name__ == "__main__" else "lightning.pytorch"
pl = importlib.import_module(PACKAGE)
callbacks = importlib.import_module(f"{PACKAGE}.callbacks")

SAMPLES, BATCH = 26, 4  # 7 batches in an epoch, the last of 2
# In the middle of the first epoch, behind a batch that is validated after, behind the last one of
# an epoch, and in the middle of the last epoch.
STOPS = {
    "accumulate": (1, 2, 3, 5),
    "manual": (2, 3, 3, 4),  # the second at the turn, with gradients on their way
    "steps": (4, 10, 11),
    "swa": (3, 9, 16, 22),
    "killed": (5, 12),
    # What they add is data, averages and a scheduler; where a fit stops is the matter of "plain".
    "workers": (2, 10),
    "ema": (3, 12),
    "plateau": (3, 12),
    "early": (2, 3, 7, 9),
}


class Noisy(Dataset[Any]):
    """Samples that are others each time, by torch's generator and Python's."""

    def __init__(self, size: int = SAMPLES) -> None:
        draw = torch.Generator().manual_seed(3)
        self.points = torch.rand(size, 3, generator=draw)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        point = self.points[index]
        return point + 0.1 * torch.randn(3), (point.sum() > 1.5).float()


class Endless(IterableDataset[Any]):
    """Nobody knows how many there are."""

    def __iter__(self) -> Iterator[Any]:
        noisy = Noisy()
        for index in torch.randperm(SAMPLES).tolist():
            yield noisy[index]


class Data(pl.LightningDataModule):
    """Has a state of its own, by which the samples are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(), batch_size=BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(8), batch_size=BATCH)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.training:
            return batch
        self.given += 1
        return [batch[0] * (1 + 0.01 * self.given), batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Net(pl.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(4, 1),
        )
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.automatic_optimization = case != "manual"
        self.kept = 0.0  # in what the module adds to a checkpoint

    def loss_of(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            inputs = torch.cat([batch["a"][0], batch["b"][0]])
            batch = inputs, torch.cat([batch["a"][1], batch["b"][1]])
        made = self.layers(batch[0]).squeeze(1)
        self.accuracy(torch.sigmoid(made), batch[1].int())
        return torch.nn.functional.binary_cross_entropy_with_logits(made, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch) * (1 + 0.01 * self.kept)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch))
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.kept = (self.kept + float(loss.detach())) % 1
        if not self.automatic_optimization:
            self._step_by_hand(loss, batch_idx)
            return None
        return loss

    def _step_by_hand(self, loss: Any, batch_idx: int) -> None:
        often, seldom = self.optimizers()
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            for optimizer in (often, seldom):
                optimizer.step()
                optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(3)  # what an evaluation draws changes nothing
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self) -> Any:
        if self.case == "manual":
            first, *rest = self.parameters()
            return torch.optim.Adam(rest, 0.05), torch.optim.SGD([first], 0.1, momentum=0.9)
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        if self.case == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "loss_epoch"}
        interval = "epoch" if self.case == "swa" else "step"
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": interval},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = self.kept

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]


class Notes(callbacks.Callback):
    """Writes down what the trainer shows in each epoch, and keeps that."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.notes.append([trainer.current_epoch, trainer.global_step])

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        self.notes.append([given[-1], trainer.global_step, trainer.is_last_batch])

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.notes.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        shown = trainer.callback_metrics.items()
        self.notes.append(sorted((name, float(value)) for name, value in shown))

    def state_dict(self) -> dict[str, Any]:
        return {"notes": list(self.notes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.notes = list(state["notes"])


class StopAt(callbacks.Callback):
    def __init__(self, keeping: Any, step: int | None, *, kills: bool) -> None:
        self.keeping, self.step, self.kills = keeping, step, kills

    def on_train_batch_end(self, *_: Any) -> None:
        run = self.keeping.run
        if self.kills and run.step + 3 == self.step:
            run.save()
        if run.step + 1 == self.step:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            run.stop("the test")


def loaders_of(case: str) -> Any:
    if case == "unknown":
        return DataLoader(Endless(), batch_size=BATCH)
    if case == "combined":
        return {
            "a": DataLoader(Noisy(), batch_size=BATCH, shuffle=True),
            "b": DataLoader(Noisy(10), batch_size=BATCH, shuffle=True),
        }
    workers = 2 if case == "workers" else 0
    return DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=workers)


def options_of(case: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 3}
    more: list[Any] = [callbacks.EarlyStopping("val_loss", patience=9)]
    if case == "accumulate":
        found["accumulate_grad_batches"] = 3
    elif case == "steps":
        found = {"max_steps": 11, "val_check_interval": 2}
    elif case == "ema":
        more.append(callbacks.EMAWeightAveraging(decay=0.9))
    elif case == "swa":
        found["max_epochs"] = 4
        more.append(callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2))
    elif case == "checkpoints":
        more.append(callbacks.ModelCheckpoint(folder / "best", monitor="val_loss"))
    elif case == "early":
        found["max_epochs"] = 9
        more = [callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.5)]
    elif case == "scaled":
        precision = importlib.import_module(f"{PACKAGE}.plugins.precision")
        scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        found["plugins"] = [precision.MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    return {**found, "callbacks": more}


def train(case: str, folder: Path, stop: int | None) -> list[Any]:
    warnings.simplefilter("ignore")  # of Lightning, on few workers and small data
    pl.seed_everything(7, verbose=False)
    net, notes = Net(case), Notes()
    keeping = holdfast.lightning.Callback(folder / "run")
    options = options_of(case, folder)
    more = options.pop("callbacks")
    trainer = pl.Trainer(
        **options,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=case == "checkpoints",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StopAt(keeping, stop, kills=case == "killed"), *more, keeping, notes],
    )
    if case == "module":
        trainer.fit(net, datamodule=Data())
    else:
        trainer.fit(net, loaders_of(case), DataLoader(Noisy(8), batch_size=BATCH))
    tensors = [*net.state_dict().values()]
    for optimizer in trainer.optimizers:
        tensors += [each[key] for each in optimizer.state.values() for key in sorted(each)]
    counted = [c.state_dict() for c in more if isinstance(c, callbacks.EarlyStopping)]
    plain = [notes.notes, net.kept, trainer.global_step, trainer.current_epoch, repr(counted)]
    hashes = [hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for t in tensors]
    return [*plain, *hashes]


def live(folder: Path, part: str, cases: list[str], stop: int | None = None) -> dict[str, Any]:
    """One process, which trains the cases; one that stops can have only one."""
    left = folder / "left"
    child = os.fork()  # before anything was computed here, so there are no threads to lose
    if child == 0:
        results = {case: train(case, folder / case / part, stop) for case in cases}
        left.write_text(repr(results))
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    expected = 0 if stop is None else -9 if cases == ["killed"] else 130
    assert os.waitstatus_to_exitcode(status) == expected, (part, cases, stop, status)
    found: dict[str, Any] = {} if stop is not None else ast.literal_eval(left.read_text())
    return found


def differences(whole: list[Any], parts: list[Any]) -> str:
    found = [str(n) for n, (a, b) in enumerate(zip(whole, parts, strict=True)) if a != b]
    return ", ".join(found) or "nothing"


def main() -> None:
    logging.getLogger(PACKAGE).setLevel(logging.WARNING)
    folder, cases = Path(sys.argv[2]), sys.argv[3:]
    for case in cases:
        for name in ("whole", "parts"):
            (folder / case / name).mkdir(parents=True)
    whole = live(folder, "whole", cases)
    for case in cases:
        for stop in STOPS.get(case, (2, 3, 7, 12)):
            live(folder, "parts", [case], stop)
    parts = live(folder, "parts", cases)
    again = live(folder, "parts", cases[:1])  # is finished, and leaves at once
    for case in cases:
        print(f"{case}: {differences(whole[case], parts[case])}", flush=True)
    last = [each[5:] for each in (whole[cases[0]], again[cases[0]])]
    print(f"again: {differences(*last)}", flush=True)


if __name__ == "__main__":
    main()
