"""`holdfast run`: a warning reaches whoever catches it, and kills nobody."""

from __future__ import annotations

import functools
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes.leading import LEAD, beaten_step, send_and_see_it_taken, start_led
from tests.support import Trainer, checkpoint_steps, keepers, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, for its keepers")


@pytest.fixture
def led(start: Callable[..., Trainer], tmp_path: Path) -> Callable[[str], Trainer]:
    """Start a script that a test spells out, led by `holdfast run`."""
    return functools.partial(start_led, start, tmp_path)


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_a_warning_waits_until_the_command_catches_it(led, tmp_path, name):
    trainer = led(f"""\
        tell("imports")
        wait_for(here / "imported")
        hear("{name}")
        tell("ready")
        wait_for(here / "gate")
        """)
    trainer.wait_for("imports")
    send_and_see_it_taken(trainer, getattr(signal, f"SIG{name}"))
    (tmp_path / "imported").touch()
    trainer.wait_for(f"heard SIG{name}")
    (tmp_path / "gate").touch()
    assert trainer.wait() == 0
    assert trainer.output.count("heard") == 1


def test_a_warning_does_not_kill_a_command_that_never_catches_it(led, tmp_path):
    trainer = led("""\
        tell("ready")
        wait_for(here / "gate")
        tell("done")
        """)
    trainer.wait_for("ready")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        send_and_see_it_taken(trainer, number)
    (tmp_path / "gate").touch()
    assert trainer.wait() == 0
    assert "done" in trainer.output


def test_a_later_warning_is_passed_on_again(led, tmp_path):
    trainer = led("""\
        hear("USR2")
        tell("ready")
        wait_for(here / "gate")
        """)
    trainer.wait_for("ready")

    def heard_again() -> bool:
        # The same within a second is SLURM's stammering.
        send_and_see_it_taken(trainer, signal.SIGUSR2)
        time.sleep(0.2)  # between two tries, of which the deadline allows many
        return trainer.output.count("heard SIGUSR2") >= 2

    wait_until(heard_again, 20, "the second warning")
    (tmp_path / "gate").touch()
    assert trainer.wait() == 0


_LAUNCHER = """\
    def rank(number):
        import multiprocessing
        wait_for(here / f"import{number}")
        hear("USR2")
        # A worker has the rank's handler, and nobody means it.
        worker = os.fork()
        if worker == 0:
            signal.signal(signal.SIGUSR2, lambda *_: tell("worker heard"))
            tell("worker", os.getpid())
            wait_for(here / "gate")
            os._exit(0)
        tell("rank", number)
        wait_for(here / "gate")
        os.waitpid(worker, 0)
        sys.exit(0)

    if len(sys.argv) > 2:
        rank(int(sys.argv[2]))
    ranks = [subprocess.Popen([sys.executable, __file__, here, str(n)]) for n in (0, 1)]
    tell("launched")
    """


def test_a_warning_reaches_the_ranks_below_a_launcher_that_does_not_catch_it(led, tmp_path):
    trainer = led(
        _LAUNCHER
        + """
    wait_for(here / "again")
    ranks.append(subprocess.Popen([sys.executable, __file__, here, "2"]))
    sys.exit(sum(rank.wait() for rank in ranks))
    """
    )
    trainer.wait_for("launched")
    send_and_see_it_taken(trainer, signal.SIGUSR2)
    (tmp_path / "import0").touch()
    trainer.wait_for("rank 0")
    wait_until(lambda: trainer.output.count("heard SIGUSR2") == 1, 10, "the first rank's")
    (tmp_path / "import1").touch()  # one that is slower to import
    trainer.wait_for("rank 1")
    wait_until(lambda: trainer.output.count("heard SIGUSR2") == 2, 10, "the second rank's")
    # A rank that is started later is another life.
    (tmp_path / "import2").touch()
    (tmp_path / "again").touch()
    trainer.wait_for("rank 2")
    time.sleep(0.3)  # for one more that should not come
    (tmp_path / "gate").touch()
    assert trainer.wait() == 0
    assert trainer.output.count("heard") == 2, trainer.output


def test_a_launcher_that_catches_the_warning_gets_it_alone(led, tmp_path):
    trainer = led(
        _LAUNCHER
        + """
    hear("USR2")
    tell("launcher is ready")
    sys.exit(sum(rank.wait() for rank in ranks))
    """
    )
    trainer.wait_for("launcher is ready")
    for number in (0, 1):
        (tmp_path / f"import{number}").touch()
        trainer.wait_for(f"rank {number}")
    send_and_see_it_taken(trainer, signal.SIGUSR2)
    trainer.wait_for("heard SIGUSR2")
    time.sleep(0.3)  # for one more that should not come
    (tmp_path / "gate").touch()
    assert trainer.wait() == 0
    assert trainer.output.count("heard") == 1


def test_a_wrapper_that_hands_on_whatever_comes_does_not_get_the_warning(led, tmp_path):
    trainer = led("""\
        if len(sys.argv) > 2:
            tell("imports")
            wait_for(here / "imported")
            hear("USR2")
            wait_for(here / "gate")
            sys.exit(0)
        hear("USR2", "URG")  # as a program written in Go does
        sys.exit(subprocess.call([sys.executable, __file__, here, "trainer"]))
        """)
    trainer.wait_for("imports")
    send_and_see_it_taken(trainer, signal.SIGUSR2)
    (tmp_path / "imported").touch()
    trainer.wait_for("heard SIGUSR2")
    (tmp_path / "gate").touch()
    assert trainer.wait() == 0
    assert trainer.output.count("heard") == 1


def test_a_warning_stops_a_trainer_with_75(folder, gate, light):
    trainer = light(folder, "--total", 100_000, "--sleep", 0.01, prefix=LEAD)
    trainer.ready()
    wait_until(lambda: beaten_step(folder) > 0, 20, "the first step")
    trainer.send(signal.SIGUSR2)
    assert trainer.wait() == 75
    assert checkpoint_steps(folder)
    assert not keepers(folder)
