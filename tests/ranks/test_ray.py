"""Ray Train with a real Ray on this machine: workers that are killed, a stop, and Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import holdfast
from holdfast._run.signals import handlers
from tests.ports import free_port
from tests.ranks.test_examples import EXAMPLES, check_nothing_left, find_line
from tests.support import Trainer, environment, journal_events, wait_for_keeper_gone, wait_until

if importlib.util.find_spec("ray") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("pip install 'ray[train]' torch", allow_module_level=True)

SIZE, STEPS_IN_EPOCH = 3200, 50
FOR_EVER = 100_000  # epochs
# Ray starts eight processes for a training, each of which imports half of it.
SECONDS = 120
VARIABLES = {
    **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    "RAY_USAGE_STATS_ENABLED": "0",
    # Its own way to keep to loopback, whatever the system: else it listens at all addresses.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
HEAD = """
import sys, ray
ray.init(num_cpus=2, object_store_memory=80_000_000, include_dashboard=False, _temp_dir=sys.argv[1])
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def ray_variables() -> Iterator[dict[str, str]]:
    """What a script needs to find the one Ray of these tests, which ends with them."""
    # In a short path, as sockets have; and not in $HOME, where Ray would write its token.
    with tempfile.TemporaryDirectory(prefix="hf-ray-", ignore_cleanup_errors=True) as place:
        token = Path(place) / "token"
        token.touch(0o600)
        token.write_text(os.urandom(32).hex())
        variables = {**VARIABLES, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        head = subprocess.Popen(
            [sys.executable, "-c", HEAD, place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(**variables),
        )
        assert head.stdin is not None
        assert head.stdout is not None
        try:
            line = next(each for each in head.stdout if each.startswith("address "))
            started = psutil.Process(head.pid).children(recursive=True)
            yield {**variables, "RAY_ADDRESS": line.split()[1]}
        finally:
            head.stdin.close()
            head.wait(SECONDS)
            head.stdout.close()
    left = psutil.wait_procs(started, timeout=30)[1]
    assert not left


class Script:
    """The example, started again and again with one folder."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder = folder
        self.started: list[Trainer] = []
        self._variables = variables

    def start(self, epochs: int = FOR_EVER, **more: Any) -> Trainer:
        options = ("--folder", self.folder.name, "--epochs", epochs, "--size", SIZE)
        env = environment(**self._variables, **more.pop("variables", {}))
        place = {"cwd": self.folder.parent, "env": env}  # a relative folder is this script's
        self.started.append(
            Trainer(*options, *more.get("options", ()), script=EXAMPLES / "ray_train.py", **place)
        )
        return self.started[-1]

    def end(self) -> None:
        for each in self.started:
            each.end()

    def trained(self, script: Trainer, attempt: int) -> dict[str, Any]:
        """Wait until an attempt has trained for some steps; returns its heartbeat."""
        path = self.folder / "attempts" / f"{attempt:04d}" / "heartbeat.json"

        def look() -> dict[str, Any] | None:
            assert script.process.poll() is None, script.output
            found = json.loads(path.read_text()) if path.exists() else {}
            is_known = len(found.get("ranks") or ()) == 2 and found["memory_step"]
            return found if is_known else None

        return wait_until(look, SECONDS, f"the first steps in\n{script.output}\n")


@pytest.fixture
def script(ray_variables: dict[str, str], folder: Path) -> Iterator[Script]:
    made = Script(folder, ray_variables)
    yield made
    made.end()


def undisturbed(place: Path, epochs: int) -> str:
    """The last line of the same loop without a Ray: two processes as torchrun starts them."""
    made = Script(place / "undisturbed", VARIABLES)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    given |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        made.start(
            epochs,
            options=("--workers", 0),
            variables={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [each.wait(SECONDS) for each in ranks] == [0, 0], ranks[0].output + ranks[1].output
    finally:
        made.end()
    return find_line(ranks[0].output)


@pytest.mark.timeout(900)
def test_a_killed_worker_and_a_stop_and_another_fit_end_with_the_bits_of_an_undisturbed_run(
    script, tmp_path
):
    life = script.start()
    ranks = script.trained(life, 1)["ranks"]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    script.trained(life, 2)  # Ray has started them again
    (death,) = journal_events(script.folder, "end")
    assert death["durable_step"] > 0
    assert journal_events(script.folder, "start")[1]["step"] == death["durable_step"]
    holdfast.stop(script.folder)
    assert life.wait(SECONDS) == 130, life.output
    assert "main thread" not in life.output
    assert "was opened in a worker of Ray" not in life.output
    # Not a failure: Ray has started nothing after it.
    assert len(journal_events(script.folder, "start")) == 2
    check_nothing_left(script.folder)

    stopped = journal_events(script.folder, "checkpoint")[-1]["step"]
    epochs = stopped // STEPS_IN_EPOCH + 1
    last = script.start(epochs)
    assert last.wait(SECONDS) == 0, last.output
    assert f"resumed at step {stopped} from" in last.output
    assert find_line(last.output) == undisturbed(tmp_path, epochs)
    check_nothing_left(script.folder)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ctrl_c_by_which_ray_kills_its_workers_leaves_the_newest_step_durable(script):
    life = script.start()
    script.trained(life, 1)
    life.send(signal.SIGINT)
    assert life.wait(SECONDS) != 0, life.output
    wait_for_keeper_gone(script.folder)
    (checkpoint,) = journal_events(script.folder, "checkpoint")
    assert checkpoint["reason"] == "death"
    check_nothing_left(script.folder)


class Config:
    """As much of a RunConfig as is touched."""

    worker_runtime_env: dict[str, Any] | None = None


class Trained:
    """A trainer of Ray that runs its loop here, in a thread as Ray's workers do."""

    def __init__(self, loop: Callable[[dict[str, Any]], Any]) -> None:
        self.train_loop_per_worker = loop
        self.run_config = Config()
        self.seen: Any = None

    def fit(self) -> Any:
        import threading

        from ray.train import Result

        found: list[Any] = []

        def run() -> None:
            try:
                found.append(self.train_loop_per_worker({}))
            except BaseException as error:  # noqa: BLE001  as Ray does
                found.append(RuntimeError(f"{error!r} would be undone"))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        self.seen = self.run_config.worker_runtime_env
        if isinstance(found[0], RuntimeError):
            raise found[0]
        return Result(metrics=None, checkpoint=None, error=None, path=None, return_value=found[0])


def stopping(status: int) -> Callable[[dict[str, Any]], Any]:
    def loop(config: dict[str, Any]) -> None:
        raise holdfast.Stopped(status, "why", 7)

    return loop


@pytest.mark.parametrize("status", [130, 65, 74, 76, 143])
def test_a_stop_is_raised_where_fit_was_called(status):
    import holdfast.ray

    with pytest.raises(holdfast.Stopped) as found:
        holdfast.ray.fit(Trained(stopping(status)))
    assert (found.value.status, found.value.reason, found.value.step) == (status, "why", 7)
    assert not handlers.is_led()


@pytest.mark.parametrize("status", [75, 77])
def test_an_interruption_is_left_to_ray_which_starts_again(status):
    import holdfast.ray

    with pytest.raises(RuntimeError, match="would be undone"):
        holdfast.ray.fit(Trained(stopping(status)))


def test_a_trainer_is_as_before_after_a_fit():
    import holdfast.ray

    def loop(config: dict[str, Any]) -> str:
        return "as ever"

    trainer = Trained(loop)
    trainer.run_config.worker_runtime_env = {"env_vars": {"A": "1"}, "pip": ["x"]}
    assert holdfast.ray.fit(trainer).return_value == "as ever"
    assert trainer.train_loop_per_worker is loop
    assert trainer.run_config.worker_runtime_env == {"env_vars": {"A": "1"}, "pip": ["x"]}
    spared = {"A": "1", "RAY_kill_child_processes_on_worker_exit": "0"}
    assert trainer.seen == {"env_vars": spared, "pip": ["x"]}


def test_a_run_in_a_plain_fit_says_what_to_use(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RAY_RAYLET_PID", "1")

    def loop(config: dict[str, Any]) -> None:
        with holdfast.Run(tmp_path / "run", number=0) as run:
            for _ in run.steps(2):
                pass

    Trained(loop).fit()
    said = capfd.readouterr().err
    assert "takes `holdfast stop` for a failure" in said
    assert "Use holdfast.ray.fit(trainer) in place of trainer.fit()." in said
