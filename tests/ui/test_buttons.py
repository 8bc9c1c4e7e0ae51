"""Stop, save and stacks on a training that really runs."""

from __future__ import annotations

from tests.cli.command import FEW, TRAIN_NUMPY, status_of
from tests.support import checkpoint_steps, journal_events, wait_until


def training(start, folder):
    trainer = start(folder, "--sleep", 0.02, "--settings", FEW, script=TRAIN_NUMPY)
    trainer.ready()
    return trainer


def live_row(ui, name):
    def look():
        row = ui.rows().get(name)
        return row if row and row["live"] and row.get("step") else None

    return wait_until(look, what="a live row")


# Over 5 s: a real training behind the page.
def test_a_training_is_saved_looked_at_and_stopped_through_the_page(tmp_path, start, serve):
    trainer = training(start, tmp_path / "a")
    ui = serve(tmp_path)
    row = live_row(ui, "a")
    assert (row["state"], row["total"]) == ("training", 100_000)
    here = f"run/{row['key']}"

    saved = ui.post(f"{here}/save")
    assert (saved.status, saved.json()["ok"]) == (200, True)
    assert f"pid {trainer.pid} on " in saved.json()["sentence"]
    wait_until(lambda: journal_events(tmp_path / "a", "checkpoint"), what="the checkpoint")
    wait_until(lambda: ui.rows()["a"].get("disk_step"), what="the checkpoint in the list")

    stacks = ui.post(f"{here}/stacks").json()
    assert stacks["ok"], stacks
    assert "train_numpy.py" in stacks["stacks"]

    stopped = ui.post(f"{here}/stop")
    assert stopped.json()["ok"], stopped.text
    assert trainer.wait() == 130
    wait_until(lambda: ui.rows()["a"]["state"] == "stopped", what="its state")
    found = status_of(tmp_path / "a")
    assert found["disk_step"] == found["step"] == checkpoint_steps(tmp_path / "a")[-1]
    assert "holdfast ui (by " in found["last_exit"]["how"]
    assert ui.see(f"{here}/view").json()["run"]["is_live"] is False

    again = ui.post(f"{here}/stop")
    assert (again.status, again.json()["ok"]) == (409, False)
    assert again.json()["sentence"] == "no process trains here now."


def test_a_killed_training_is_seen_to_be_dead(tmp_path, start, serve):
    trainer = training(start, tmp_path / "a")
    ui = serve(tmp_path)
    live_row(ui, "a")
    trainer.kill()
    wait_until(lambda: not ui.rows()["a"]["live"], what="its death")
    assert ui.rows()["a"]["troubled"] is True


def test_read_only_has_no_buttons(tmp_path, start, serve):
    trainer = training(start, tmp_path / "a")
    ui = serve(tmp_path, "--read-only")
    here = f"run/{live_row(ui, 'a')['key']}"
    page = ui.see(here).text
    for kind in ("stop", "save", "stacks", "labels"):
        assert f'data-{kind}="' not in page
        assert ui.post(f"{here}/{kind}").status in (403, 404, 405)
    assert 'data-token="' not in page
    assert not list((tmp_path / "a" / "requests").iterdir())
    assert trainer.process.poll() is None
