"""`holdfast run --hang-timeout` above several ranks: one hangs, and all go on."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from tests.cli.command import PROGRAM
from tests.ranks import train
from tests.ranks.jobs import EAGER
from tests.support import environment, journal_events, keepers

LED = Path(__file__).parent / "led.py"
LEAD = (str(PROGRAM), "run", "--hang-timeout", "2", "--")
WORLD = 4
TOTAL = 40


def _last_line_of(function: object) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + len(lines) - 1


# test_hangs.py has the hang of one rank that all leave to the same bits, and
# tests/processes/test_supervisor_hangs.py the leader that starts again after one.
@pytest.mark.nightly
def test_a_hang_in_one_of_four_ranks_is_named_and_all_are_started_again_to_the_same_bits(
    tmp_path, undisturbed, start
):
    folder = tmp_path / "run"
    outputs = [tmp_path / f"output-{rank}" for rank in range(WORLD)]
    plan = {
        **{"folder": str(folder), "world": WORLD, "meets": "group", "loop": "steps"},
        **{"total": TOTAL, "pauses": [0.01] * WORLD, "settings": EAGER},
        **{"store": str(tmp_path / "store"), "outputs": list(map(str, outputs))},
        "events": [(2, 20, "hang", None)],
    }
    env = environment(
        HOLDFAST_STATE=str(tmp_path / "state"),
        HOLDFAST_PAUSE_SECONDS="0.01",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        PYTHONPATH=str(LED.parents[2]),
    )
    job = start(json.dumps(plan), script=LED, prefix=LEAD, env=env)
    assert job.wait(100) == 0, job.output
    texts = [path.read_text() for path in outputs]

    hang = read_json(RunLayout(folder).hang(1))
    line = _last_line_of(train.Rank._do_hang)
    assert (hang["cause"], len(hang["looks"]), hang["missing"]) == ("hang-rank", WORLD, [])
    assert re.search(rf"rank 2 .*train\.py:{line}\b", hang["sentence"]), hang["sentence"]
    assert hang["sentence"] in job.output + texts[0]
    assert [event["rank"] for event in journal_events(folder, "hang")] == [2]

    records = sorted((tmp_path / "state").glob("led/*/life-*/led.json"))
    first, second = (json.loads(path.read_text()) for path in records)
    assert first["decision"]["restart"]
    assert "restart 1 of 3" in job.output
    assert second["status"] == 0
    began = [re.findall(r"^ready (\d+)$", text, re.MULTILINE) for text in texts]
    assert all(each == ["0", began[0][1]] for each in began)
    assert int(began[0][1]) > 0

    ends = [re.findall(r"^hash (\S+)$", text, re.MULTILINE)[-1] for text in texts]
    assert ends == undisturbed(WORLD, total=TOTAL)
    assert not keepers(folder)
