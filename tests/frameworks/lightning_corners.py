"""Corners of holdfast.lightning.Callback, each in a process that has imported Lightning.

    python -m tests.frameworks.lightning_corners FOLDER

Prints a line for each: its name, and "as it should be", or else what was.
"""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo  # optimizers do; here once, and not in each of the forked
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader

import holdfast
import holdfast.lightning
from holdfast._run.driver import session_of
from tests.frameworks.lightning_lives import Net, Noisy


def fit(folder: Path, *more: Any, ckpt_path: Any = None, net: Any = None, **options: Any) -> Any:
    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        **{"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options},
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[holdfast.lightning.Callback(folder), *more],
    )
    data = DataLoader(Noisy(), batch_size=4, shuffle=True)
    trainer.fit(net or Net("plain"), data, DataLoader(Noisy(8), batch_size=4), ckpt_path=ckpt_path)
    return trainer


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]


class Look(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.logged: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen = [getattr(each, "__module__", "") for each in handlers()]
        run = next(each.run for each in trainer.callbacks if hasattr(each, "run"))
        self.logged = session_of(run).log.metrics.values()


def handlers_are_ours_while_it_fits(folder: Path) -> Any:
    before, look = handlers(), Look()
    trainer = fit(folder, look)
    assert all(each.startswith("holdfast.") for each in look.seen), look.seen
    assert handlers() == before
    assert "_run_stage" not in vars(trainer)
    assert not trainer.received_sigterm


def what_the_module_logs_is_logged(folder: Path) -> Any:
    look = Look()
    fit(folder, look, val_check_interval=3)
    assert {"loss_step", "loss", "val_loss"} <= set(look.logged), look.logged


def slurm_requeue_is_switched_off_and_said(folder: Path) -> Any:
    os.environ.update(SLURM_NTASKS="1", SLURM_JOB_NAME="a", SLURM_LOCALID="0", SLURM_PROCID="0")
    look = Look()
    said = hear(lambda: fit(folder, look, plugins=[SLURMEnvironment(auto_requeue=True)]))
    assert "Lightning's own requeue and its handlers are switched off" in said, said
    assert all(each.startswith("holdfast.") for each in look.seen), look.seen


def a_checkpoint_of_lightning_begins_a_run_and_then_yields(folder: Path) -> Any:
    fit(folder / "first").save_checkpoint(folder / "a.ckpt")
    second = folder / "second"
    said = hear(lambda: fit(second, ckpt_path=folder / "a.ckpt", max_epochs=2))
    assert f"begins with what Lightning has loaded from {folder / 'a.ckpt'}" in said, said
    assert "trained to step 7;" in said, said  # one epoch of its own
    said = hear(lambda: fit(second, ckpt_path=folder / "a.ckpt", max_epochs=3))
    assert "the run folder has something newer, and that counts" in said, said
    assert "trained to step 14;" in said, said


def a_finished_fit_goes_on_with_more_epochs(folder: Path) -> Any:
    fit(folder / "a")
    trainer = fit(folder / "a", max_epochs=2)
    whole = fit(folder / "b", max_epochs=2)
    pairs = zip(trainer.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert (trainer.current_epoch, trainer.global_step) == (2, 14)


def a_fit_that_now_ends_before_its_run_says_so_and_loses_nothing(folder: Path) -> Any:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 9:
                next(each.run for each in trainer.callbacks if hasattr(each, "run")).stop("it")

    with pytest.raises(holdfast.Stopped):
        fit(folder / "a", Stop(), max_epochs=3)
    shorter: list[Any] = []
    said = hear(lambda: shorter.append(fit(folder / "a", max_epochs=1)))
    assert "this fit ends before step 9, where the run is; nothing is trained" in said, said
    assert shorter[0].global_step == 9
    said = hear(lambda: shorter.append(fit(folder / "a", max_epochs=2)))
    assert "resumed at step 9" in said, said
    assert "trained to step 14;" in said, said


def a_lightning_that_lacks_something_is_refused_and_left_alone(folder: Path) -> Any:
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    del trainer.fit_loop._last_train_dl_reload_epoch
    before = dict(vars(trainer))
    work = holdfast.lightning.Callback(folder).setup
    refused(lambda: work(trainer, None, "fit"), "fit_loop._last_train_dl_reload_epoch is missing")
    assert vars(trainer) == before


def a_callback_that_raises_leaves_no_trace_on_the_trainer(folder: Path) -> Any:
    class Broken(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ZeroDivisionError

        def on_exception(self, *_: Any) -> None:
            raise LookupError  # so that no callback behind it is told

    trainer = pl.Trainer(
        **{"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
        callbacks=[Broken(), holdfast.lightning.Callback(folder)],
    )
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop)
    places = (trainer._signal_connector, *loops)
    before = [set(vars(each)) for each in places]
    with pytest.raises(LookupError):
        trainer.fit(Net("plain"), DataLoader(Noisy(), batch_size=4))
    assert [set(vars(each)) for each in places] == before
    assert "_run_stage" not in vars(trainer)


def a_try_keeps_nothing(folder: Path) -> Any:
    said = hear(lambda: fit(folder, fast_dev_run=True))
    assert "this fit is a try and no run" in said, said
    assert not list(folder.iterdir())


def two_of_them_are_refused(folder: Path) -> Any:
    refused(lambda: fit(folder, holdfast.lightning.Callback(folder)), "each would count the steps")


def names_that_are_taken_are_refused(folder: Path) -> Any:
    refused(lambda: holdfast.lightning.Callback(folder, module=1), "this is kept by itself")


def a_step_that_takes_its_own_batches_is_refused(folder: Path) -> Any:
    class Greedy(Net):
        def training_step(self, dataloader_iter: Any) -> Any:
            raise AssertionError("it came to that")

    refused(lambda: fit(folder, net=Greedy("plain")), "takes its batches itself")


def processes_by_multiprocessing_are_refused(folder: Path) -> Any:
    def launched() -> None:
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False)
        holdfast.lightning.Callback(folder).setup(trainer, None, "fit")

    refused(launched, "their exit statuses would be lost")


def a_net_of_another_shape_is_refused(folder: Path) -> Any:
    fit(folder)
    other = Net("plain")
    other.layers[0] = torch.nn.Linear(3, 5)
    refused(lambda: fit(folder, net=other), "the checkpoint does not fit")


def an_error_in_the_data_names_its_place(folder: Path) -> Any:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 11:
                raise KeyError("label")
            return super().__getitem__(index)

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[holdfast.lightning.Callback(folder)],
    )
    with pytest.raises(KeyError) as caught:
        trainer.fit(Net("plain"), DataLoader(Broken(), batch_size=4))
    notes = "".join(caught.value.__notes__)
    assert "epoch 0, batch 2, sample 11" in notes, notes


def hear(work: Callable[[], Any]) -> str:
    heard = io.StringIO()
    with redirect_stderr(heard):
        work()
    return heard.getvalue()


def refused(work: Callable[[], Any], why: str) -> None:
    with pytest.raises(holdfast.HoldfastError, match=re.escape(why)):
        hear(work)


CORNERS = (
    handlers_are_ours_while_it_fits,
    what_the_module_logs_is_logged,
    slurm_requeue_is_switched_off_and_said,
    a_checkpoint_of_lightning_begins_a_run_and_then_yields,
    a_finished_fit_goes_on_with_more_epochs,
    a_fit_that_now_ends_before_its_run_says_so_and_loses_nothing,
    a_lightning_that_lacks_something_is_refused_and_left_alone,
    a_callback_that_raises_leaves_no_trace_on_the_trainer,
    a_try_keeps_nothing,
    two_of_them_are_refused,
    names_that_are_taken_are_refused,
    a_step_that_takes_its_own_batches_is_refused,
    processes_by_multiprocessing_are_refused,
    a_net_of_another_shape_is_refused,
    an_error_in_the_data_names_its_place,
)


def main() -> None:
    warnings.simplefilter("ignore")  # of Lightning, on few workers and small data
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for corner in CORNERS:
        folder = Path(sys.argv[1]) / corner.__name__
        folder.mkdir()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            found = "as it should be"
            try:
                corner(folder)
            except BaseException:  # noqa: BLE001  whatever it was, it is shown
                found = traceback.format_exc()
            print(f"{corner.__name__}: {found}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
