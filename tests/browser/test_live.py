"""`holdfast ui` over trainings that run: what is seen moves, and what is clicked is done."""

from __future__ import annotations

import json

import pytest

from tests.browser.serving import serving_page
from tests.support import (
    SCRIPTS,
    checkpoint_steps,
    journal_events,
    wait_for_keeper_gone,
    wait_until,
)

_TOTAL = 3000
_LIGHT = SCRIPTS / "light.py"
_STEP = "return Number(document.querySelector('#facts dd').innerText.replace(/\\D/g, ''))"
_ANSWER = "return document.querySelector('#answer').innerText"
_FEW = json.dumps({"checkpoint_every": 1_000_000})


@pytest.fixture
def training(tmp_path, start):
    """A training that lasts, in a folder of runs."""
    folder = tmp_path / "runs" / "lively"
    folder.parent.mkdir()
    words = ("--total", _TOTAL, "--sleep", 0.05, "--settings", _FEW)
    trainer = start(folder, *words, script=_LIGHT)
    trainer.ready()
    trainer.folder = folder
    return trainer


def test_a_click_on_stop_ends_a_training_with_its_state_saved(
    browser, training, serve, start, tmp_path
):
    browser.open(serve(training.folder.parent).address)
    browser.follow("lively")
    browser.click("Stop…")
    browser.click("Stop it")
    assert training.wait() == 130, training.output
    wait_for_keeper_gone(training.folder)
    ended = journal_events(training.folder, "exit")[-1]
    assert ended["status"] == 130
    assert ended["durable_step"] == ended["step"] == checkpoint_steps(training.folder)[-1]
    browser.wait_for(
        "return !/training/i.test(document.querySelector('#state').innerText)",
        "a page that says that it does not train",
    )
    again = start(training.folder, "--total", _TOTAL, script=_LIGHT)
    assert again.ready() == ended["step"]
    undisturbed = start(tmp_path / "undisturbed", "--total", _TOTAL, script=_LIGHT)
    assert again.state_hash() == undisturbed.state_hash()


def test_a_stop_that_is_thought_better_of_stops_nothing(browser, training, serve):
    browser.open(serve(training.folder.parent).address)
    browser.follow("lively")
    browser.click("Stop…")
    browser.click("Keep training")
    before = browser.run(_STEP)
    browser.wait_for(f"{_STEP} > {before}", "steps that are made, seen on the page")
    assert not journal_events(training.folder, "request")


def test_a_click_on_save_now_makes_a_step_durable(browser, training, serve):
    browser.open(serve(training.folder.parent).address)
    browser.follow("lively")
    assert checkpoint_steps(training.folder) == []
    browser.click("Save now")
    step = wait_until(lambda: checkpoint_steps(training.folder), 30, "a checkpoint")[0]
    browser.wait_for(_ANSWER, "an answer")
    browser.wait_for(
        f"return document.querySelector('#facts').innerText.replace(/\\D/g, ' ').includes('{step}')"
        f" || document.body.innerText.includes('{step}')",
        f"step {step} on the page",
    )
    assert training.process.poll() is None


def test_a_click_on_stacks_shows_where_it_is(browser, training, serve):
    browser.open(serve(training.folder.parent).address)
    browser.follow("lively")
    browser.click("Stacks")
    browser.wait_for(
        "const e = document.querySelector('#stacks-panel');"
        "return e.checkVisibility() && e.innerText.includes('light.py')",
        "stacks with the script's name",
        60,
    )
    assert training.process.poll() is None


def test_a_page_of_another_origin_stops_nothing(browser, training, serve):
    ui = serve(training.folder.parent)
    browser.open(ui.address)
    browser.follow("lively")
    where, target = (
        browser.driver.current_url,
        browser.run("return document.documentElement.dataset.stop"),
    )
    address = browser.run("return new URL(arguments[0], location.href).href", target)
    attack = f"""<!doctype html><title>attack</title><iframe name=frame></iframe>
<form id=form method=post target=frame enctype=text/plain action="{address}">
<input name='{{"a":"' value='"}}'></form><iframe src="{where}"></iframe><script>
const all = [];
for (const mode of ["cors", "no-cors"])
  for (const type of ["application/json", "text/plain"])
    for (const token of [null, "guess"])
      all.push(fetch("{address}", {{method: "POST", mode, body: "{{}}", credentials: "include",
        headers: {{"Content-Type": type, ...(token ? {{"X-Holdfast-Token": token}} : {{}})}} }})
        .then(r => r.type === "opaque" ? "opaque" : r.status, () => "refused"));
navigator.sendBeacon("{address}", "{{}}");
document.getElementById("form").submit();
Promise.all(all).then(found => setTimeout(() => {{ window.tried = found; }}, 1000));
</script>"""
    before = len(training.lines), journal_events(training.folder)[-1]
    with serving_page(attack) as elsewhere:
        browser.open(elsewhere, has_mark=False)
        tried = browser.wait_for("return window.tried", "the end of the attack")
        said = "".join(browser.complaints())
    assert set(tried) <= {"refused", "opaque"}, tried
    assert "frame-ancestors" in said
    assert "status of 403" in said  # of the form, which needs no leave to be sent
    assert journal_events(training.folder, "request") == []
    assert not list((training.folder / "requests").iterdir())
    # It goes on, and whoever may stop it still can.
    browser.open(where)
    step = browser.run(_STEP)
    browser.wait_for(f"{_STEP} > {step}", "steps after the attack")
    assert (training.process.poll(), before[1]["event"]) == (None, "loop")


def test_read_only_has_no_buttons(browser, training, serve):
    browser.open(serve(training.folder.parent, "--read-only").address)
    browser.follow("lively")
    assert [browser.button(label) for label in ("Stop…", "Save now", "Stacks")] == [None] * 3


def test_a_run_that_begins_appears_in_the_list(browser, serve, start, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    browser.open(serve(runs).address)
    trainer = start(runs / "late-comer", "--sleep", 0.02, script=SCRIPTS / "train_numpy.py")
    trainer.ready()
    browser.wait_for("return document.body.innerText.includes('late-comer')", "the new run")
    browser.follow("late-comer")
    browser.wait_for(
        "return /steps\\/s/.test(document.querySelector('#facts').innerText)", "its speed"
    )
    browser.wait_for(
        "return document.querySelector('#metrics').innerText.includes('val_loss')", "its metrics"
    )
