"""The list of runs: what it shows, how it follows, and what it does not open."""

from __future__ import annotations

import json
import os
import re
import shutil

from holdfast._store.folder import journal
from tests.support import wait_until
from tests.ui.made_runs import beat, leave, make_live, make_run


def embedded_rows(page: str) -> list[dict[str, object]]:
    found = re.search(r'id="holdfast-rows">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return list(json.loads(found[1]))


def test_the_page_has_the_first_rows_in_it_and_only_its_own_scripts(ui):
    ui.rows()
    page = ui.see().text
    assert {row["name"] for row in embedded_rows(page)} == {"a", "group/b"}
    assert not re.search(r"""(src|href)=["'](?!data:image/svg|#)""", page)
    assert " style=" not in page
    assert " onclick" not in page


def test_a_row_tells_state_progress_and_what_is_safe(ui):
    row = ui.rows()["a"]
    assert row["state"] == "stopped"
    assert (row["step"], row["total"], row["attempt"]) == (90, 100, 1)
    assert row["live"] is row["troubled"] is False
    assert row["host"] == "gpu-07"


# Over 5 s: the page asks once a second.
def test_only_what_has_changed_since_is_told(tmp_path, serve):
    first, second = (make_run(tmp_path / name) for name in "ab")
    ui = serve(tmp_path)
    ui.rows()
    revision = ui.see("runs?since=0").json()["revision"]
    assert ui.see(f"runs?since={revision}").json()["rows"] == []
    journal.append(second.journal, "loop", total=777)

    def changed():
        return ui.see(f"runs?since={revision}").json()["rows"]

    (row,) = wait_until(changed, what="the change")
    assert (row["name"], row["total"]) == ("b", 777)
    shutil.rmtree(first.folder)
    gone = wait_until(lambda: [r for r in changed() if r.get("gone")], what="the removal")
    assert len(gone) == 1
    make_run(tmp_path / "deep" / "er" / "c")
    wait_until(lambda: "deep/er/c" in ui.rows(), what="the new run")


def test_a_run_of_another_machine_is_live_while_its_heart_beats(tmp_path, serve):
    layout = make_live(tmp_path / "far")
    ui = serve(tmp_path)
    assert ui.rows()["far"]["state"] == "watching"

    def look(step=[10]):  # noqa: B006 - counts on from call to call
        step[0] += 1
        beat(layout, step[0])
        row = ui.rows()["far"]
        return row["live"] and row

    row = wait_until(look, what="a live row")
    assert row["state"] == "training"
    leave(layout, 99)
    wait_until(lambda: not ui.rows()["far"]["live"], what="its end")


def test_links_out_of_the_folder_are_not_followed_and_that_is_told(tmp_path, serve):
    outside = make_run(tmp_path / "outside" / "x").folder
    runs = tmp_path / "runs"
    make_run(runs / "a")
    (runs / "linked").symlink_to(outside)
    (runs / "group").mkdir()
    (runs / "group" / "up").symlink_to(tmp_path)
    (runs / "again").symlink_to(runs / "a")
    ui = serve(runs)
    assert set(ui.rows()) == {"a"}
    assert ui.see("runs").json()["notes"] == [
        "2 links lead out of this folder and are not followed."
    ]


ODD = ("journal.jsonl", "attempts/0001/heartbeat.json", "attempts/0001/x.txt", "requests/x.json")


def test_what_is_no_plain_file_is_neither_opened_nor_shown(tmp_path, serve):
    secret = tmp_path / "secret"
    secret.write_text('{"event": "loop", "total": 31337, "step": 31337}\n')
    runs = tmp_path / "runs"
    made = {
        f"{kind}-{number}": name for kind in ("fifo", "link") for number, name in enumerate(ODD)
    }
    for run, name in made.items():
        path = make_run(runs / run).folder / name
        path.unlink(missing_ok=True)
        os.mkfifo(path) if run.startswith("fifo") else path.symlink_to(secret)
    make_run(runs / "plain")
    ui = serve(runs)
    rows = ui.rows()
    assert rows["plain"]["state"] == "stopped"
    for run in made:
        assert ui.see(f"run/{rows[run]['key']}/view").status == 200
        assert "31337" not in ui.see(f"run/{rows[run]['key']}/view").text
    assert "31337" not in ui.see("runs").text


def test_a_run_with_a_linked_folder_is_neither_read_nor_written_to(tmp_path, serve):
    outside = tmp_path / "outside"
    runs = tmp_path / "runs"
    make_run(runs / "plain")
    for name in ("requests", "attempts"):
        folder = make_run(runs / name).folder / name
        folder.rename(outside.with_name(f"outside-{name}"))
        folder.symlink_to(outside.with_name(f"outside-{name}"))
    ui = serve(runs)
    rows = ui.rows()
    posting = {"X-Holdfast-Token": ui.posting(f"run/{rows['plain']['key']}")}
    for name in ("requests", "attempts"):
        assert rows[name]["state"] == "unreadable"
        assert f"{name}: is a symbolic link" in rows[name]["warnings"][0]
        assert ui.see(f"run/{rows[name]['key']}/view").status == 409
        assert ui.post(f"run/{rows[name]['key']}/stop", **posting).status == 409


def test_a_fifo_in_place_of_a_run_or_a_giant_file_holds_nothing_up(tmp_path, serve):
    make_run(tmp_path / "plain")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "run.json")
    giant = make_run(tmp_path / "giant")
    with giant.heartbeat(1).open("r+b") as file:
        file.truncate(3 << 30)
    line = make_run(tmp_path / "line")
    with line.journal.open("r+b") as file:
        file.truncate(200 << 20)  # one line without an end
    ui = serve(tmp_path)
    rows = ui.rows()
    assert set(rows) == {"plain", "giant", "line"}
    assert rows["line"]["total"] == 100


def test_names_that_are_code_stay_text(tmp_path, serve):
    names = ["<img src=x onerror=alert(1)>", "</script><script>alert(2)", '"onload="x', "{{rows}}"]
    for name in names:
        # No slash can be in a name, so a folder has one.
        make_run(tmp_path / name)
    ui = serve(tmp_path)
    assert set(ui.rows()) == set(names)
    page = ui.see().text
    assert "<img" not in page
    assert "<script>alert" not in page
    assert {row["name"] for row in embedded_rows(page)} == set(names)
    for row in ui.rows().values():
        text = ui.see(f"run/{row['key']}").text
        assert "<img src=x" not in text
        assert "<script>alert" not in text


def test_an_empty_folder_says_so_and_fills_up(tmp_path, serve):
    ui = serve(tmp_path)
    assert ui.rows() == {}
    make_run(tmp_path / "a")
    wait_until(lambda: "a" in ui.rows(), what="the first run")


def test_a_folder_that_is_gone_is_said_to_be_so(tmp_path, serve):
    folder = tmp_path / "runs"
    make_run(folder / "a")
    ui = serve(folder)
    ui.rows()
    folder.rename(tmp_path / "elsewhere")
    said = ["This folder is gone."]
    wait_until(lambda: ui.see("runs?since=0").json()["notes"] == said, what="the word for it")


def test_a_run_folder_itself_is_a_list_of_one(tmp_path, serve):
    make_run(tmp_path / "only")
    assert set(serve(tmp_path / "only").rows()) == {"only"}


def test_the_view_of_a_run_is_sent_again_only_when_it_is_another(ui):
    key = ui.key("a")
    first = ui.see(f"run/{key}/view")
    assert first.json()["run"]["name"] == "a"
    again = ui.see(f"run/{key}/view", **{"If-None-Match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


def test_metrics_are_for_whoever_has_the_token(ui):
    ui.rows()
    assert ui.get("/metrics").status == 401
    assert ui.get("/metrics", Cookie=ui.cookie).status == 401
    by_query = ui.get(f"/metrics?token={ui.token}")
    by_header = ui.get("/metrics", Authorization=f"Bearer {ui.token}")
    assert by_query.status == by_header.status == 200
    assert by_header.headers["content-type"].startswith("application/openmetrics-text")
    assert by_header.text.endswith("# EOF\n")
