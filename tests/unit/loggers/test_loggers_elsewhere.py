"""W&B and MLflow as a logger sees them: stand-ins that note what they are asked."""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from holdfast.loggers._child import Memory


@pytest.fixture
def told():
    """What the trainer hears."""
    read, write = os.pipe()
    os.set_blocking(read, False)

    def hear():
        try:
            lines = os.read(read, 65536).decode().splitlines()
        except BlockingIOError:
            return []
        return [json.loads(line)["say"] for line in lines]

    hear.descriptor = write
    yield hear
    os.close(read)
    os.close(write)


def plan_for(told, tmp_path, mark, **options):
    places = {"loggers": str(tmp_path), "folder": "runs/demo", "script": "train.py"}
    return {"told": told.descriptor, "parent": 1, "mark": mark, "options": options, **places}


def known(tmp_path, **fields):
    memory = Memory(tmp_path / "known.json", "here")
    for name, value in fields.items():
        setattr(memory, name, value)
    return memory


class WandB(ModuleType):
    """Refuses what the test says."""

    def __init__(self):
        super().__init__("wandb")
        self.asked = []
        self.logged = []
        self.ended = []
        self.refused = ()

    def Settings(self, **given):
        return given

    def init(self, **given):
        self.asked.append({k: v for k, v in given.items() if k not in ("settings", "dir", "name")})
        for name in self.refused:
            if name in given and (name != "mode" or given["mode"] == "online"):
                raise RuntimeError(f"{name} is refused\nfor many reasons")
        return SimpleNamespace(
            dir="offline-run-1/files",
            log=lambda values, step: self.logged.append((step, values)),
            mark_preempting=lambda: self.ended.append("preempting"),
            finish=lambda exit_code: self.ended.append(exit_code),
        )


@pytest.fixture
def wandb(monkeypatch):
    made = WandB()
    monkeypatch.setitem(sys.modules, "wandb", made)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return made


def open_wandb(told, tmp_path, memory, mark, rewind=False, **init):
    from holdfast.loggers._child import WandBRun

    sink = WandBRun(plan_for(told, tmp_path, mark, rewind=rewind, init=init), memory)
    sink.open(memory.rewind(mark) if sink.rewinds else [])
    return sink


def test_all_lives_are_one_run_of_wandb(wandb, told, tmp_path):
    memory = known(tmp_path)
    open_wandb(told, tmp_path, memory, 0, project="p")
    assert len(memory.id) == 10
    open_wandb(told, tmp_path, memory, 20, project="p")
    assert wandb.asked == [{"project": "p", "id": memory.id, "resume": "allow"}] * 2
    assert told() == []


def test_a_run_of_wandb_is_rewound_to_before_the_step(wandb, told, tmp_path):
    memory = known(tmp_path, id="one")
    memory.record([{"m": 20, "s": 10, "t": 0.0, "v": {"validated": 1.0}, "b": 1}])
    sink = open_wandb(told, tmp_path, memory, 21, rewind=True)
    assert sink.rewinds
    assert wandb.asked == [{"resume_from": "one?_step=9"}]
    assert wandb.logged == [(10, {"validated": 1.0})]  # of that very step, and before its turn


def test_a_run_that_cannot_be_rewound_goes_on_without(wandb, told, tmp_path):
    wandb.refused = ("resume_from",)
    sink = open_wandb(told, tmp_path, known(tmp_path, id="one"), 20, rewind=True)
    assert not sink.rewinds
    assert wandb.asked[1:] == [{"id": "one", "resume": "allow"}]
    [said] = told()
    assert "could not be rewound (resume_from is refused)" in said


@pytest.mark.parametrize(("memory_id", "mark"), [("", 20), ("one", 0)])
def test_a_first_life_rewinds_nothing(wandb, told, tmp_path, memory_id, mark):
    open_wandb(told, tmp_path, known(tmp_path, id=memory_id), mark, rewind=True)
    assert all("resume_from" not in asked for asked in wandb.asked)


def test_what_cannot_be_reached_is_logged_to_files(wandb, told, tmp_path):
    wandb.refused = ("mode",)
    open_wandb(told, tmp_path, known(tmp_path), 0, mode="online")
    assert [asked["mode"] for asked in wandb.asked] == ["online", "offline"]
    [said] = told()
    assert "cannot be reached (mode is refused)" in said
    assert said.endswith("wandb sync offline-run-1")


@pytest.mark.parametrize(
    ("status", "ended"),
    [(0, [0]), (1, [1]), (143, ["preempting", 143]), (137, ["preempting", 137])],
)
def test_wandb_is_told_how_it_ended(wandb, told, tmp_path, status, ended):
    open_wandb(told, tmp_path, known(tmp_path), 0).finish(status)
    assert wandb.ended == ended


class MLflowClient:
    """A server with one experiment."""

    def __init__(self, tracking_uri=None):
        self.uri = tracking_uri
        self.values = []
        self.status = None

    def get_run(self, run_id):
        names = dict.fromkeys(name for name, *_ in self.values)
        info = SimpleNamespace(lifecycle_stage="active")
        return SimpleNamespace(info=info, data=SimpleNamespace(metrics=names))

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="7")

    def create_run(self, experiment, run_name, tags):
        return SimpleNamespace(info=SimpleNamespace(run_id="new"))

    def get_metric_history(self, run_id, name):
        return [SimpleNamespace(step=step) for known, _, step in self.values if known == name]

    def log_batch(self, run_id, metrics):
        assert len(metrics) <= 1000
        self.values += metrics

    def update_run(self, run_id, status):
        self.status = status

    set_terminated = update_run


@pytest.fixture
def open_mlflow(monkeypatch, told, tmp_path):
    client = MLflowClient()
    tracking, entities = ModuleType("mlflow.tracking"), ModuleType("mlflow.entities")
    tracking.MlflowClient = lambda tracking_uri: client
    entities.Metric = lambda name, value, when, step: (name, value, step)
    for module in (ModuleType("mlflow"), tracking, entities):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def begin(memory):
        from holdfast.loggers._child import MLflowRun

        options = {"tracking_uri": "http://x", "experiment": "e", "run_name": None, "tags": {}}
        sink = MLflowRun(plan_for(told, tmp_path, 0, **options), memory)
        sink.open([])
        return sink

    return begin, client


def row(step, **values):
    return {"m": 2 * step, "s": step, "t": 0.0, "v": values}


def test_a_logger_that_died_asks_mlflow_how_far_it_came(open_mlflow, tmp_path):
    begin, client = open_mlflow
    client.values = [("loss", 0.0, step) for step in range(9)]
    memory = known(tmp_path, id="one", is_whole=False)
    begin(memory)
    assert client.status == "RUNNING"
    rows = [memory.without_known(row(step, loss=0.0)) for step in (7, 8, 9)]
    assert [r["v"] for r in rows] == [{}, {}, {"loss": 0.0}]


def test_values_go_to_mlflow_in_requests_that_it_takes(open_mlflow, tmp_path):
    begin, client = open_mlflow
    memory = known(tmp_path)
    begin(memory).write([row(step, a=1.0, b=2.0) for step in range(1600)])
    assert memory.id == "new"
    assert len(client.values) == 3200


def test_what_is_tried_again_is_not_there_twice(open_mlflow, tmp_path, monkeypatch):
    begin, client = open_mlflow
    sink, rows = begin(known(tmp_path)), [row(step, a=1.0) for step in range(1600)]
    log_batch, asked = client.log_batch, []

    def fail_once(run_id, metrics):
        asked.append(len(metrics))
        if len(asked) == 2:
            raise ConnectionError
        log_batch(run_id, metrics)

    monkeypatch.setattr(client, "log_batch", fail_once)
    with pytest.raises(ConnectionError):
        sink.write(rows)
    sink.write(rows)
    assert [step for *_, step in client.values] == list(range(1600))


def test_a_name_that_mlflow_does_not_allow_is_changed_and_said_once(open_mlflow, told, tmp_path):
    sink = open_mlflow[0](known(tmp_path))
    names = [sink.name(each) for each in ("acc@1", "ok/a b", "<x>", "acc@1")]
    assert names == ["acc_1", "ok/a b", "_x_", "acc_1"]
    assert told() == ["allows no metric 'acc@1': it is called 'acc_1' there."]


ODD = [
    "",
    "/",
    "..",
    "a//b",
    "/a",
    "a/",
    "a/../b",
    "./a",
    "x" * 300,
    "y/" * 200,
    "a\nb",
    "\udc80",
    "é",
]


@pytest.mark.parametrize("given", ODD)
def test_whatever_a_metric_is_called_mlflow_takes_it(open_mlflow, tmp_path, given):
    name = open_mlflow[0](known(tmp_path)).name(given)
    # As they check it themselves.
    assert re.fullmatch(r"[/\w.\- :]{1,250}", name)
    assert posixpath.normpath(name) == name
    assert name[0] != "/"
    assert not name.startswith(".")


@pytest.mark.parametrize(
    ("status", "how"), [(0, "FINISHED"), (1, "FAILED"), (65, "FAILED"), (75, "KILLED")]
)
def test_mlflow_is_told_how_it_ended(open_mlflow, tmp_path, status, how):
    begin, client = open_mlflow
    begin(known(tmp_path)).finish(status)
    assert client.status == how
