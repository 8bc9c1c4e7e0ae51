"""The same against a store that speaks S3, over a network that fails."""

from __future__ import annotations

import shutil
import signal
import time

import numpy as np
import pytest

from tests.cli.command import holdfast, succeed
from tests.linked_files import make_checkpoint
from tests.mirror.conftest import PIECE_BYTES, SIZE, copied_steps, uploaders, wait_for_copy
from tests.support import journal_events, run_id, wait_for_keeper_gone, wait_until


def test_a_new_machine_goes_on_from_the_bucket_to_the_same_bits(
    folder, bucket, train, light_reference
):
    trainer = train(folder, bucket.address, "--total", 20, "--sleep", 0.05, mirror_wait=True)
    assert trainer.wait() == 0, trainer.output
    assert "waiting until s3://" in trainer.output
    known = run_id(folder)
    wait_for_keeper_gone(folder)
    wait_until(lambda: not uploaders(folder), what="the end of the uploader")
    shutil.rmtree(folder)
    again = train(folder, bucket.address, "--total", 40)
    assert again.state_hash() == light_reference(40, SIZE)
    assert "ready 20 20 2" in again.output
    assert run_id(folder) == known


def test_an_upload_that_was_cut_goes_on_with_what_is_missing(folder, bucket, wire, train):
    wire.budget = 1_300_000  # of 1.6 MB: more than the pieces that are under way at a time
    trainer = train(folder, bucket.address, "--total", 100, "--hold-at", 15, "--sleep", 0.02)
    trainer.wait_for("holding")
    trainer.wait_for("Training goes on")
    assert wire.cuts
    there = len(bucket.keys("run/pieces/"))
    assert 1 <= there < 7
    wire.budget, wire.carried = None, 0
    wait_for_copy(folder, 10)
    trainer.wait_for("copying works again")
    assert wire.carried < 1_800_000 - there * PIECE_BYTES
    sent = journal_events(folder, "mirrored")[0]
    assert sent["sent_bytes"] <= 1_620_000 - there * PIECE_BYTES
    trainer.kill()


def test_with_wrong_credentials_there_is_one_line_and_training_goes_on(
    folder, bucket, refusing, train
):
    make_checkpoint(folder, 1, [{"weights": np.zeros(SIZE)}])
    trainer = train(folder, bucket.address, "--total", 100, "--sleep", 0.05)
    trainer.wait_for("the credentials are refused")
    assert trainer.wait() == 0, trainer.output
    assert trainer.output.count("the credentials are refused") == 2  # and once at the end
    assert "Traceback" not in trainer.output
    assert copied_steps(folder) == []


@pytest.mark.parametrize("waits", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_store_that_hangs_never_holds_a_stop_beyond_its_grace(folder, bucket, wire, train, waits):
    trainer = train(
        folder, bucket.address, "--total", 5000, "--sleep", 0.02,
        mirror_wait=waits, grace_seconds=6.0,
    )  # fmt: skip
    wait_until(lambda: copied_steps(folder), 60, "a copy")
    wire.is_hanging = True
    began = time.monotonic()
    trainer.send(signal.SIGTERM)
    trainer.wait()
    took = time.monotonic() - began
    assert "is durable here and not" in trainer.output, trainer.output
    assert took < (8.0 if waits else 5.0)
    assert not waits or took > 2.0


@pytest.mark.nightly  # with a folder it is in test_copying.py
def test_an_object_that_the_store_has_changed_is_found_by_its_tag_and_sent_again(
    folder, bucket, tmp_path
):
    state = {"weights": np.random.default_rng(1).standard_normal(400_000)}
    make_checkpoint(folder, 10, [state])
    succeed("mirror", folder, "--push", "--at", bucket.address)
    newer = (make_checkpoint(folder, 20, [state]) / "rank-00000.safetensors").read_bytes()
    victim = next(key for key in bucket.keys("run/pieces/") if bucket.get(key) in newer)
    data = bucket.get(victim)
    bucket.put(victim, data[:-1] + bytes([data[-1] ^ 1]))
    succeed("mirror", folder, "--push")
    assert bucket.get(victim) == data
    succeed("mirror", tmp_path / "new", "--fetch", "--at", bucket.address)


def test_a_bucket_that_is_not_there_keeps_an_empty_folder_from_beginning_and_no_other(
    folder, bucket, train, tmp_path
):
    missing = "s3://no-such-bucket/run"
    trainer = train(tmp_path / "new", missing, "--total", 10)
    assert trainer.wait() != 0
    assert f"{missing}: there is no such bucket.\nNothing was begun" in trainer.output
    assert not (tmp_path / "new").exists()
    make_checkpoint(folder, 1, [{"weights": np.zeros(SIZE)}])
    begun = train(folder, missing, "--total", 100, "--sleep", 0.05)
    begun.wait_for("there is no such bucket. Training goes on")
    begun.kill()


@pytest.mark.nightly  # with a folder it is in test_restoring.py
def test_a_damaged_object_is_found_when_it_is_fetched_and_the_one_before_is_used(
    folder, bucket, tmp_path
):
    for step in (10, 20):
        weights = np.random.default_rng(step).standard_normal(400_000)
        made = make_checkpoint(folder, step, [{"weights": weights}])
        before = set(bucket.keys("run/pieces/"))
        succeed("mirror", folder, "--push", "--at", bucket.address)
    assert made.exists()
    victim = sorted(set(bucket.keys("run/pieces/")) - before)[0]
    data = bucket.get(victim)
    bucket.put(victim, bytes([data[0] ^ 1]) + data[1:])
    done = holdfast("mirror", tmp_path / "new", "--fetch", "--at", bucket.address)
    assert "is damaged. It is not used." in done.stderr
    assert "step 10 (attempt 1) is here" in done.stdout
