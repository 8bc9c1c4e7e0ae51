"""Runs side by side over the server: what is compared, and what is written of a run."""

from __future__ import annotations

import json

import pytest

from tests.many_runs import make_one, make_sweep
from tests.support import wait_until


@pytest.fixture
def sweep(tmp_path):
    return make_sweep(tmp_path / "runs", 4)


def compared(ui, names, **more):
    rows = ui.rows()
    wanted = "&".join([*(f"run={rows[name]['key']}" for name in names), *more.get("also", ())])
    return ui.see(f"compared?{wanted}")


def test_the_chosen_runs_are_compared_in_the_order_of_the_choice(sweep, serve):
    ui = serve(sweep)
    found = compared(ui, ["sweep-0002", "sweep-0000"]).json()
    assert [run["name"] for run in found["runs"]] == ["sweep-0002", "sweep-0000"]
    assert found["differing"] == ["lr", "seed", "model.width"]
    assert list(found["curves"]) == [found["metric"]] == ["loss"]
    assert all(curve["step"][-1] == 200 for curve in found["curves"]["loss"])
    other = compared(ui, ["sweep-0002"], also=("metric=accuracy",)).json()
    assert list(other["curves"]) == ["accuracy"]


def test_the_page_has_only_its_own_scripts(sweep, serve):
    ui = serve(sweep)
    key = ui.key("sweep-0001")
    page = ui.see(f"compare?run={key}")
    assert page.status == 200
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert " onclick" not in page.text


def test_a_comparison_that_has_not_changed_is_not_sent_again(sweep, serve):
    ui = serve(sweep)
    first = compared(ui, ["sweep-0001"])
    tag = first.headers["etag"]
    key = ui.key("sweep-0001")
    assert ui.see(f"compared?run={key}", **{"If-None-Match": tag}).status == 304
    make_one(sweep / "other", 9)
    ui.post(f"run/{key}/labels", json.dumps({"tags": ["x"]}).encode())
    again = ui.see(f"compared?run={key}", **{"If-None-Match": tag})
    assert again.status == 200
    assert again.json()["runs"][0]["tags"] == ["x"]


def test_what_is_no_run_is_left_out(sweep, serve):
    ui = serve(sweep)
    odd = ["run=x", "run=..%2f..", "run=%00", "run=" + "a" * 3000, "metric=%3Cscript%3E"]
    found = compared(ui, ["sweep-0001"], also=odd).json()
    assert [run["name"] for run in found["runs"]] == ["sweep-0001"]
    assert ui.see("compared").json()["runs"] == []
    (sweep / "sweep-0002" / "set-aside").symlink_to(sweep)  # a run with a linked folder
    found = compared(ui, ["sweep-0001", "sweep-0002"]).json()
    assert [run["name"] for run in found["runs"]] == ["sweep-0001"]


def test_no_more_than_a_hundred_are_compared(tmp_path, serve):
    make_sweep(tmp_path, 103, rows=2)
    ui = serve(tmp_path)
    assert len(compared(ui, sorted(ui.rows())).json()["runs"]) == 100


def test_labels_are_written_into_the_folder_and_told_in_the_list(sweep, serve):
    ui = serve(sweep)
    key = ui.key("sweep-0001")
    before = ui.rows()["sweep-0001"]["at"]
    change = {"tags": ["good", "paper"], "note": "see page 3", "is_archived": True}
    said = ui.post(f"run/{key}/labels", json.dumps(change).encode())
    assert (said.status, said.json()["labels"]) == (200, change)
    assert json.loads((sweep / "sweep-0001" / "labels.json").read_text()) == change
    row = wait_until(lambda: (r := ui.rows()["sweep-0001"]).get("archived") and r, what="it")
    assert (row["tags"], row["note"]) == (["good", "paper"], "see page 3")
    assert row["at"] == before, "a tag is no sign of life"
    run = ui.see(f"run/{key}/view").json()["run"]
    assert (run["tags"], run["note"], run["is_archived"]) == tuple(change.values())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"name": 1}', b'{"tags": [], "x": 1}'])
def test_labels_that_are_none_are_refused(sweep, serve, body):
    ui = serve(sweep)
    said = ui.post(f"run/{ui.key('sweep-0001')}/labels", body)
    assert (said.status, said.json()["ok"]) == (409, False)
    assert not (sweep / "sweep-0001" / "labels.json").exists()


def test_labels_need_the_token_of_the_page_and_its_origin(sweep, serve):
    ui = serve(sweep)
    where, body = f"run/{ui.key('sweep-0001')}/labels", b'{"note": "x"}'
    assert ui.post(where, body, **{"X-Holdfast-Token": "guess"}).status == 403
    assert ui.post(where, body, Origin="http://evil.example").status == 403
    assert ui.post(where, body, Cookie="").status == 401
    assert ui.post(where, b'{"note": "' + b"x" * 5000 + b'"}').status == 413
    assert ui.see(where).status == 405
    assert not (sweep / "sweep-0001" / "labels.json").exists()


def test_the_list_has_hyperparameters_and_the_newest_loss(sweep, serve):
    row = serve(sweep).rows()["sweep-0001"]
    assert "seed=1" in row["config"]
    assert row["metric"][0] == "loss"
    assert "left" not in row, "it has ended"


def test_the_end_of_the_output_is_shown(sweep, serve):
    ui = serve(sweep)
    path = sweep / "sweep-0001" / "attempts" / "0001" / "output.log"
    path.write_text("first\n" * 50_000 + "\x1b[31mlast\x1b[0m\n")
    found = ui.see(f"run/{ui.key('sweep-0001')}/output").json()
    assert found["attempt"] == 1
    assert found["text"].endswith("first\nlast")
    assert len(found["text"]) <= 20_000
    none = ui.see(f"run/{ui.key('sweep-0002')}/output").json()
    assert none == {"attempt": None, "where": "", "text": ""}
