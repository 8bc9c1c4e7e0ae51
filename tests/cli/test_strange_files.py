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
from tests.fuzz_files import not_starting, workshop
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
    ("save",),
    ("stacks",),
    ("resume",),
    ("compare",),
    ("compare", "-o", "page.html"),
    ("mirror",),
    ("mirror", "--push", "--at", "copy"),
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
        *("start", "mirror_log"),
    )
    newest = layout.checkpoint_folders()[-1][2]
    return [
        *(getattr(layout, name)(1) for name in names),
        *(layout.journal, layout.mirror, layout.identity, layout.labels, layout.key),
        *(layout.mirror_lock, layout.resume_log, layout.rank(1, 1), layout.request("stop", 1)),
        *(layout.logger("tensorboard", ending) for ending in ("json", "log", "lock")),
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


# It calls 600 commands in this process, which takes about 15 s.
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
            with within(30, run), not_starting():
                done = holdfast(name, run, *more, cwd=tmp_path)
            said = f"{name} with {place.relative_to(run)}: {done.stdout}{done.stderr}"
            assert "Traceback" not in said
            assert done.stdout or done.stderr, said
        shutil.rmtree(run)
        for made in ("page.html", "out.safetensors"):
            (tmp_path / made).unlink(missing_ok=True)


def each_with_a_fifo(run):
    """Each file of the run is a FIFO in turn."""
    for place in possible_files(run):
        kept = place.read_bytes() if place.exists() else None
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        put_fifo(place)
        yield place
        place.unlink()
        if kept is not None:
            place.write_bytes(kept)


@pytest.mark.nightly
def test_doctor_hangs_at_no_file_of_a_run(run):
    for _ in each_with_a_fifo(run):
        with within(30, run):
            done = holdfast("doctor", run, "--quick")
        assert "Nothing will fail" in done.stdout, done


def test_resume_waits_for_no_fifo_that_the_record_names():
    with workshop() as shop:
        fifo, layout = shop.place / "job.fifo", shop.begin()
        put_fifo(fifo)
        batch = {**shop.batch, "path": str(fifo), "script": None}
        layout.start(1).write_text(json.dumps({**shop.start, "batch": batch}))
        with within(30, shop.place), not_starting():
            done = holdfast("resume", shop.run, cwd=shop.place)
        assert f"Submit it again: sbatch {fifo}" in done.stderr
        layout.start(1).write_text(json.dumps(shop.start))
        for _ in each_with_a_fifo(shop.run):  # and for none in the folder of an unfinished run
            with within(30, shop.run), not_starting():
                done = holdfast("resume", shop.run, cwd=shop.place)
            assert str(shop.run) in done.stderr


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


OF_A_RUN = ("journal.jsonl", "run.json", "labels.json", "mirror.json")
OF_AN_ATTEMPT = ("heartbeat", "lease", "exit", "start", "origin", "error")
OF_A_START = (*OF_A_RUN, *(f"attempts/0001/{name}.json" for name in OF_AN_ATTEMPT))


@pytest.mark.parametrize(
    "names", few([OF_A_START, *((each,) for each in OF_A_START)], [OF_A_START])
)
def test_a_start_goes_on_whatever_else_is_a_fifo(run, start, names):
    for name in names:
        (run / name).unlink(missing_ok=True)
        put_fifo(run / name)
    trainer = start(run, "--total", 6, script=TRAIN_NUMPY)
    assert trainer.wait() == 0, trainer.output
    assert "resumed at step 4" in trainer.output


def test_a_keeper_ends_after_its_trainer_though_the_journal_is_a_fifo(folder, start):
    trainer = start(folder, "--sleep", 0.01, "--settings", SETTINGS, script=TRAIN_NUMPY)
    trainer.ready()
    layout = RunLayout(folder)
    wait_until(layout.checkpoint_folders)
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    fifo.replace(layout.journal)  # at once: the keeper makes a journal that is missing
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not keepers(folder), what="the end of the keeper")
