"""Trainings of Transformers that are stopped and go on: lives forked from one process.

    transformers_lives.py FOLDER CASE…

Prints a line for each case: its name, and what differs from a training that nobody has stopped.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

import holdfast
import holdfast.rules
import holdfast.transformers
from holdfast.transformers.training import without_times

SAMPLES, BATCH, LENGTH, WORDS = 22, 4, 6, 16  # 6 batches in an epoch, the last of 2
#: By case: in the middle of an epoch, behind its last batch, where an evaluation is to come.
STOPS = {
    "plain": (4, 6),
    "accumulated": (1, 2),
    "evaluated": (4,),
    "of-unknown-length": (4, 8),
    "max-steps": (3,),
    "epoch-stopped": (3, 4),
    "theirs": (5, 7),
}


class Texts(torch.utils.data.Dataset[Any]):
    """Small texts with a word that is drawn anew each time, as an augmentation does."""

    def __init__(self, *, draws: bool = False, labels: bool = False, size: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
        self.draws, self.labels = draws, labels

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.words[index].clone()
        if self.draws:
            words[torch.randint(0, LENGTH, ())] = int(torch.randint(0, WORDS, ()))
        if self.labels:
            return {"input_ids": words, "labels": int(words[0]) % 2}
        kept = words[: LENGTH - index % 2] if self.draws == "lengths" else words
        return {"input_ids": kept, "labels": kept}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from (texts[number] for number in range(SAMPLES)) if (texts := Texts()) else ()


class CountEpochs(TrainerCallback, ExportableState):
    """Carries something from epoch to epoch, and stops one in its middle if told to."""

    def __init__(self, stops_at: int | None = None) -> None:
        self.begun = self.ended = 0
        self.stops_at = stops_at

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ended += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == self.stops_at

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"begun": self.begun, "ended": self.ended}}


class StopAt(TrainerCallback):
    def __init__(self, callback: holdfast.transformers.Callback, step: int | None) -> None:
        self.callback, self.step = callback, step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.callback.run.stop("the test")


def make_model(case: str) -> Any:
    transformers.set_seed(3)
    if case == "evaluated":
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                max_position_embeddings=8,
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0)
    )


def arguments_of(case: str, folder: Path, part: str) -> TrainingArguments:
    more: dict[str, Any] = {
        "accumulated": {
            "gradient_accumulation_steps": 4,
            "dataloader_num_workers": 1,
            "logging_strategy": "epoch",
            "bf16": True,
        },
        "evaluated": {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0},
            "learning_rate": 0.05,
        },
        "of-unknown-length": {"max_steps": 10, "lr_scheduler_type": "cosine"},
        "max-steps": {
            "max_steps": 8 if part == "shorter" else 11,
            "lr_scheduler_type": "constant",
        },
        "epoch-stopped": {"eval_strategy": "epoch"},
        "theirs": {
            "save_strategy": "steps",
            "save_steps": 3,
            "max_steps": 3 if part == "before" else 8,
        },
    }.get(case, {"eval_strategy": "epoch"})
    return TrainingArguments(
        str(folder / "output"),
        per_device_train_batch_size=BATCH,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type=more.pop("lr_scheduler_type", "linear"),
        num_train_epochs=2,
        logging_steps=more.pop("logging_steps", 2),
        save_strategy=more.pop("save_strategy", "no"),
        include_num_input_tokens_seen="all",
        **more,
    )


def make_trainer(case: str, folder: Path, part: str, callbacks: list[Any]) -> Trainer:
    data: Any = Texts(draws=case == "accumulated", labels=case == "evaluated")
    if case == "of-unknown-length":
        data = Stream()
    return Trainer(
        make_model(case),
        arguments_of(case, folder, part),
        train_dataset=data,
        eval_dataset=Texts(labels=case == "evaluated", size=6),
        callbacks=callbacks,
    )


def train(case: str, folder: Path, part: str, stop: int | None) -> list[Any]:
    """One life, or what came of it."""
    begins = None
    if case == "theirs":
        begins = str(folder / "output" / "checkpoint-3")
        if not Path(begins).exists():
            make_trainer(case, folder, "before", [CountEpochs()]).train()
    counts = CountEpochs(4 if case == "epoch-stopped" else None)
    ours = holdfast.transformers.Callback(folder / "run", note=[case])
    others = [EarlyStoppingCallback(2)] if case == "evaluated" else []
    trainer = make_trainer(case, folder, part, [counts, ours, *others, StopAt(ours, stop)])
    done = trainer.train(resume_from_checkpoint=begins)
    state = trainer.state
    tensors = [*trainer.model.state_dict().values()]
    for entry in trainer.optimizer.state_dict()["state"].values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    logged = [
        without_times(e) for e in state.log_history if case != "max-steps" or "train_loss" not in e
    ]
    return [
        done.global_step,
        done.training_loss,
        logged,
        # One that had ended in the middle of an epoch has ended that epoch twice.
        [] if case == "max-steps" else [counts.begun, counts.ended],
        [*(each.early_stopping_patience_counter for each in others)],
        [state.epoch, state.total_flos, state.best_metric, state.best_global_step],
        state.num_input_tokens_seen,
        *(hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in tensors),
    ]


def live(folder: Path, name: str, cases: list[str], part: str, stop: int | None = None) -> Any:
    """One process, which trains the cases; one that stops can have only one."""
    left = folder / "left"
    child = os.fork()  # before anything was computed here, so there are no threads to lose
    if child == 0:
        results = {case: train(case, folder / case / name, part, stop) for case in cases}
        left.write_text(repr(results))
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    expected = 0 if stop is None else 130
    assert os.waitstatus_to_exitcode(status) == expected, (name, cases, stop, status)
    return {} if stop is not None else ast.literal_eval(left.read_text())


def differences(whole: list[Any], parts: list[Any]) -> str:
    found = [str(n) for n, (a, b) in enumerate(zip(whole, parts, strict=True)) if a != b]
    return ", ".join(found) or "nothing"


def main() -> None:
    warnings.simplefilter("ignore")  # of Transformers, about its own arguments
    transformers.logging.set_verbosity_error()
    assert holdfast.transformers.Callback  # imports it, before there are lives that would
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    for case in cases:
        for name in ("whole", "parts"):
            (folder / case / name).mkdir(parents=True)
    whole = live(folder, "whole", cases, "all")
    for case in cases:
        for stop in STOPS[case]:
            live(folder, "parts", [case], "all", stop)
        if case == "max-steps":
            live(folder, "parts", [case], "shorter")  # it ends, and then is to go on after all
    parts = live(folder, "parts", cases, "all")
    again = live(folder, "parts", cases, "all")  # is finished, and leaves at once
    for case in cases:
        print(f"{case}: {differences(whole[case], parts[case])}", flush=True)
        print(f"{case} again: {differences(whole[case], again[case])}", flush=True)


if __name__ == "__main__":
    main()
