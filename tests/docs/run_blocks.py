"""Runs the blocks of pages, each as its reader would; started by the tests, one process for many.

In: a file with a list of stories, each a list of blocks that share a folder and their names.
Out: a file with a line for each block, JSON: its name, and what went wrong, if anything did.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import holdfast
from tests.docs import stand_ins
from tests.docs.pages import Block

_MOST_EPOCHS, _MOST_STEPS = 2, 5


def main(orders: Path, results: Path) -> None:
    _shorten_loops()
    with results.open("w", encoding="utf-8") as out:
        for story in json.loads(orders.read_text()):
            for name, wrong in _tell([Block(**block) for block in story]):
                out.write(json.dumps({"name": name, "wrong": wrong}) + "\n")
                out.flush()


def _shorten_loops() -> None:
    """The loops of a page are as long as a training; here the beginning is enough."""
    steps, epochs = holdfast.Run.steps, holdfast.Run.epochs
    holdfast.Run.steps = lambda run, total: steps(run, min(total, _MOST_STEPS))
    holdfast.Run.epochs = lambda run, total, **bound: epochs(run, min(total, _MOST_EPOCHS), **bound)


def _tell(story: list[Block]) -> list[tuple[str, str]]:
    """Run the blocks of one story in a folder of their own."""
    found = []
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        names: dict[str, Any] = {"holdfast": holdfast, "__name__": "__main__"}
        for block in story:
            try:
                _run(block, names)
                found.append((block.name, ""))
            except BaseException:  # noqa: BLE001  what it raises is the result, also SystemExit
                found.append((block.name, traceback.format_exc(limit=-4)))
        _leave_group()
        os.chdir(before)
    return found


def _run(block: Block, names: dict[str, Any]) -> None:
    if block.needs:
        have = stand_ins.OF[block.framework]()
        names.update({name: have[name] for name in block.needs})
    elif block.framework in stand_ins.OF and block.marks.get("needs"):
        stand_ins.OF[block.framework]()
    if "ckpts" in block.marks:
        _leave_checkpoints(names)
    if block.language == "python":
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(block.text, block.name, "exec"), names)
        return
    for command in block.commands:
        _invoke(command)


def _invoke(command: str) -> None:
    """One command of holdfast, in this process: another one would have to import a framework."""
    from click.testing import CliRunner

    from holdfast._tools.cli.group import cli
    from tests.docs.pages import words_of

    result = CliRunner().invoke(cli, words_of(command)[1:])
    if result.exit_code != 0:
        raise AssertionError(f"{command}: status {result.exit_code}\n{result.output}") from (
            result.exception
        )


def _leave_checkpoints(names: dict[str, Any]) -> None:
    """As a script with tf.train.CheckpointManager leaves them."""
    import tensorflow as tf

    have = stand_ins.of_tensorflow()
    checkpoint = tf.train.Checkpoint(model=have["model"], optimizer=have["optimizer"])
    tf.train.CheckpointManager(checkpoint, "ckpts", max_to_keep=3).save()
    names["tf"] = tf


def _leave_group() -> None:
    """The ranks of one page are none of the next."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
