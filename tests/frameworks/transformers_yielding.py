"""What a Trainer with the callback refuses, switches off and leaves: one line of JSON.

python -m tests.frameworks.transformers_yielding FOLDER
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from transformers import Trainer, TrainingArguments

import holdfast
import holdfast.rules
import holdfast.transformers
from holdfast.transformers import callback as callback_module
from tests.frameworks.transformers_lives import Texts, make_model


def make(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder / "output"),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=1,
        save_steps=2,
        save_strategy=options.pop("save_strategy", "no"),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    model = make_model("plain")
    return Trainer(model, arguments, train_dataset=Texts(), callbacks=list(callbacks))


def refused(act: Callable[[], Any]) -> list[str]:
    try:
        act()
    except holdfast.HoldfastError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def add_late(folder: Path) -> None:
    trainer = make(folder)
    trainer.add_callback(holdfast.transformers.Callback(folder / "late"))
    trainer.train()


def begin_from_theirs(folder: Path) -> list[list[Any]]:
    """What is said, and the steps: of a start from the Trainer's own checkpoint, and of another."""
    theirs = str(folder / "output" / "checkpoint-2")
    make(folder, save_strategy="steps", max_steps=2).train()
    found = []
    for most in (4, 5):
        ours, said = holdfast.transformers.Callback(folder / "theirs"), io.StringIO()
        trainer = make(folder, ours, max_steps=most, ignore_data_skip=most == 5)
        with contextlib.redirect_stderr(said):
            trainer.train(resume_from_checkpoint=theirs)
        steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
        found.append([said.getvalue(), steps])
    return found


def go_on_from_theirs(folder: Path) -> dict[str, bool]:
    """Whether a run that begins in the Trainer's own checkpoint trains what the Trainer would.

    By the checkpoint's place: in the middle of an epoch, and at its end.
    """
    whole = make(folder, save_strategy="steps", max_steps=8, lr_scheduler_type="constant")
    whole.train()
    found = {}
    for step in (4, 6):
        ours = holdfast.transformers.Callback(folder / f"from-{step}")
        trainer = make(folder, ours, max_steps=8, lr_scheduler_type="constant")
        trainer.train(resume_from_checkpoint=str(folder / "output" / f"checkpoint-{step}"))
        pairs = zip(trainer.model.parameters(), whole.model.parameters(), strict=True)
        found[str(step)] = all(torch.equal(one, other) for one, other in pairs)
    return found


def fail_amid(folder: Path) -> list[Any]:
    """What is left in a Trainer after a callback has failed, and the steps of another try."""

    class Failing(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise ZeroDivisionError

    trainer = make(folder, holdfast.transformers.Callback(folder / "failed"), Failing())
    with contextlib.suppress(ZeroDivisionError):
        trainer.train()
    left = [name for name in vars(trainer) if name in callback_module.USED_METHODS]
    left += [name for name in vars(trainer.callback_handler) if name == "on_epoch_end"]
    trainer.pop_callback(Failing)
    return [left, trainer.train().global_step]


def main() -> None:
    warnings.simplefilter("ignore")  # of Transformers, about its own arguments
    transformers.logging.set_verbosity_error()
    folder, callback = Path(sys.argv[1]), holdfast.transformers.Callback
    found: dict[str, Any] = {
        "two": refused(
            lambda: make(folder, callback(folder / "a"), callback(folder / "b")).train()
        ),
        "late": refused(lambda: add_late(folder)),
        "taken": refused(lambda: callback(folder / "a", model=1)),
        "search": refused(lambda: make(folder, callback(folder / "a")).train(trial={"a": 1})),
    }
    taken, callback_module.USED_METHODS = (
        callback_module.USED_METHODS,
        ("_run_epoch_of_another_time",),
    )
    found["older"] = refused(lambda: make(folder, callback(folder / "a")))
    callback_module.USED_METHODS = taken
    trainer = make(folder)
    trainer.is_deepspeed_enabled = True
    found["deepspeed"] = refused(lambda: callback_module.refuse_other_trainers(trainer))

    skip = transformers.trainer.skip_first_batches
    ours = callback(folder / "jit")
    trainer = make(folder, ours, enable_jit_checkpoint=True)
    found["handler_after"] = str(signal.getsignal(signal.SIGTERM))
    found["callbacks"] = [type(each).__name__ for each in trainer.callback_handler.callbacks]
    trainer.train()
    found["left"] = [name for name in vars(trainer) if name in callback_module.USED_METHODS]
    found["is_skip_put_back"] = transformers.trainer.skip_first_batches is skip
    found["run_afterwards"] = ours.run

    found["failed"] = fail_amid(folder)
    found["is_skip_put_back"] &= transformers.trainer.skip_first_batches is skip
    counted, callback_module.USED_COUNTS = callback_module.USED_COUNTS, ("_loss_of_another_time",)
    found["counts"] = refused(lambda: make(folder, callback(folder / "counts")).train())
    callback_module.USED_COUNTS = counted

    found["resumed"] = begin_from_theirs(folder)
    found["from_theirs"] = go_on_from_theirs(folder)

    steps = []
    for _ in range(2):
        rule = holdfast.rules.Budget(steps=5)
        trainer = make(folder, callback(folder / "rule", stop_when=rule))
        steps.append(trainer.train().global_step)
    ended = [e for e in (folder / "rule" / "journal.jsonl").read_text().splitlines() if "rule" in e]
    found["rule"] = [steps[0], sum('"event": "rule"' in e for e in ended), steps[1]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
