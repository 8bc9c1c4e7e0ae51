"""A FIFO, a device or a link in place of a file of a run holds no command, and no start."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat

import pytest

from holdfast._store.folder.layout import MANIFEST, RunLayout
from tests.cli.command import TRAIN_NUMPY, holdfast
from tests.often import few
from tests.support import keepers, wait_until

COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("ls",),
    ("verify",),
    ("metrics",),
    ("why",),
    ("clean", "--yes"),
    ("report", "-o", "page.html"),
    ("export", "out.safetensors"),
    ("stop",),
)
SETTINGS = json.dumps({"checkpoint_every": 2, "keep_last": 2})


def put_fifo(path):
    os.mkfifo(path)


def put_link_to_device(path):
    path.symlink_to("/dev/zero")


def put_giant(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.fixture
def run(folder, start):
    """A finished run with two checkpoints."""
    arguments = ("--total", 4, "--patience", 2, "--settings", SETTINGS)
    assert start(folder, *arguments, script=TRAIN_NUMPY).wait() == 0
    return folder


def possible_files(run):
    """Each file that a run of one attempt can have, whether this one has it or not."""
    layout = RunLayout(run)
    names = (
        *("lease", "heartbeat", "origin", "series", "exit", "requeue", "stacks", "keeper_log"),
        *("trouble", "error", "death", "hang", "hang_text", "void", "look", "led", "output"),
    )
    newest = layout.checkpoint_folders()[-1][2]
    return [
        *(getattr(layout, name)(1) for name in names),
        *(layout.journal, layout.mirror, layout.identity),
        *(layout.rank(1, 1), layout.request("stop", 1)),
        *(newest / MANIFEST, newest / "rank-00000.safetensors"),
    ]


@contextlib.contextmanager
def within(seconds, folder):
    """Fail in place of a hang: the readers of a FIFO go on when somebody opens it to write."""

    def give_up(*_):
        for path in folder.rglob("*"):
            if stat.S_ISFIFO(path.lstat().st_mode):
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# It calls 300 commands in this process, which takes about 10 s.
@pytest.mark.parametrize("put", few([put_fifo, put_link_to_device, put_giant], [put_fifo]))
def test_no_command_hangs_or_fails_without_a_sentence(run, tmp_path, put):
    whole = tmp_path / "whole"
    run.rename(whole)
    for path in possible_files(whole):
        place = run / path.relative_to(whole)
        shutil.copytree(whole, run)
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        put(place)
        for name, *more in COMMANDS:
            with within(30, run):
                done = holdfast(name, run, *more, cwd=tmp_path)
            said = f"{name} with {place.relative_to(run)}: {done.stdout}{done.stderr}"
            assert "Traceback" not in said
            assert done.stdout or done.stderr, said
        shutil.rmtree(run)
        for made in ("page.html", "out.safetensors"):
            (tmp_path / made).unlink(missing_ok=True)


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors"])
@pytest.mark.parametrize("put", [put_fifo, put_link_to_device])
def test_a_start_sets_such_a_checkpoint_aside_and_takes_the_one_before(run, start, put, name):
    newest = RunLayout(run).checkpoint_folders()[-1][2]
    (newest / name).unlink()
    put(newest / name)
    trainer = start(run, "--total", 4, script=TRAIN_NUMPY)
    assert trainer.wait() == 0
    assert "and not a file" in trainer.output
    assert (RunLayout(run).set_aside / newest.name).is_dir()


def test_a_keeper_ends_after_its_trainer_though_the_journal_is_a_fifo(folder, start):
    trainer = start(folder, "--sleep", 0.01, "--settings", SETTINGS, script=TRAIN_NUMPY)
    trainer.ready()
    layout = RunLayout(folder)
    wait_until(layout.checkpoint_folders)
    layout.journal.unlink()
    os.mkfifo(layout.journal)
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not keepers(folder), what="the end of the keeper")
