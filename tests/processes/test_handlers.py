"""Whose handlers run, when, and that all is put back."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

import holdfast
from tests.processes.conftest import LIGHT
from tests.support import (
    checkpoint_steps,
    journal_events,
    wait_for_keeper_gone,
)


def test_handlers_are_put_back_when_the_run_closes(folder, script):
    trainer = script(
        folder,
        """
        import multiprocessing

        def standing():
            numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
            descriptor = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(descriptor)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            start = multiprocessing.process.BaseProcess.start
            return [signal.getsignal(n) for n in numbers], descriptor, mask, start

        def own(number, frame):
            print("own handler")

        signal.signal(signal.SIGUSR1, own)
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        imported = standing()
        weights = make_weights()
        run = holdfast.Run(folder, weights=weights)
        print("same when made:", standing() == imported)
        with run:
            within = standing()
            print("all taken:", all(a != b for a, b in zip(within[0], imported[0])))
            print("descriptor taken:", within[1] != imported[1])
            for step in run.steps(5):
                train_one(weights)
        print("same after the end:", standing() == imported)
        try:
            with holdfast.Run(folder, weights=weights) as run:
                raise ValueError
        except ValueError:
            print("same after an error:", standing() == imported)
        os.kill(os.getpid(), signal.SIGUSR1)
        print("noted there:", list(os.read(read, 10)) == [signal.SIGUSR1])
        signal.signal(signal.SIGQUIT, lambda *_: print("own quit"))
        os.kill(os.getpid(), signal.SIGQUIT)
        """,
    )
    assert trainer.wait() == 0, trainer.output
    assert [line for line in trainer.lines if "holdfast:" not in line] == [
        "same when made: True\n",
        "all taken: True\n",
        "descriptor taken: True\n",
        "same after the end: True\n",
        "same after an error: True\n",
        "own handler\n",
        "noted there: True\n",
        "own quit\n",
    ]


def test_sigquit_kills_again_after_the_run(folder, script):
    trainer = script(
        folder,
        """
        with holdfast.Run(folder, weights=make_weights()):
            pass
        os.kill(os.getpid(), signal.SIGQUIT)
        """,
    )
    assert trainer.wait() == -signal.SIGQUIT


def test_a_handler_of_the_users_own_is_called_at_the_boundary(folder, gate, script):
    trainer = script(
        folder,
        """
        signal.signal(signal.SIGTERM, lambda *_: print("own handler", run.step, flush=True))
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                if step == 8:
                    show_holding(run)
                    wait_for(gate)
                    print("step complete", flush=True)
        """,
    )
    trainer.wait_for("holding")
    trainer.send(signal.SIGTERM)
    trainer.wait_for("SIGTERM: step 9")
    gate.touch()
    assert trainer.wait() == 143
    assert trainer.lines.index("step complete\n") < trainer.lines.index("own handler 9\n")
    durable = next(i for i, line in enumerate(trainer.lines) if "step 9 is durable" in line)
    assert durable < trainer.lines.index("own handler 9\n")


@pytest.mark.parametrize("how", ["loop.add_signal_handler", "signal.set_wakeup_fd"])
def test_what_asyncio_replaces_is_taken_back_at_the_next_boundary(folder, gate, script, how):
    replace = {
        "loop.add_signal_handler": "loop.add_signal_handler(signal.SIGTERM, print, 'asyncio')",
        "signal.set_wakeup_fd": "signal.set_wakeup_fd(other)",
    }[how]
    trainer = script(
        folder,
        f"""
        import asyncio, socket

        loop = asyncio.new_event_loop()
        other_end, mine = socket.socketpair()
        mine.setblocking(False)
        other = mine.fileno()
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(400):
                train_one(weights)
                time.sleep(0.02)
                if step == 3:
                    {replace}
                if step == 20:
                    show_holding(run)
                    wait_for(gate)
        """,
    )
    trainer.wait_for("holding")
    what = "the handler of SIGTERM" if "loop" in how else "the wakeup descriptor"
    said = f"{what} had been replaced by another library; it is restored now."
    assert sum(said in line for line in trainer.lines) == 1
    assert trainer.output.index(said) < trainer.output.index("holding")
    trainer.send(signal.SIGTERM)
    trainer.wait_for("SIGTERM: step 21")  # from the keeper: the descriptor is ours again
    gate.touch()
    assert trainer.wait() == 143
    assert checkpoint_steps(folder) == [21]


def test_what_asyncio_installed_during_the_run_works_after_it(folder, script):
    trainer = script(
        folder,
        """
        import asyncio

        loop = asyncio.new_event_loop()
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(20):
                train_one(weights)
                time.sleep(0.02)
                if step == 3:
                    loop.add_signal_handler(signal.SIGTERM, loop.stop)
        loop.call_soon(os.kill, os.getpid(), signal.SIGTERM)
        loop.call_later(30, os._exit, 3)
        loop.run_forever()
        print("asyncio heard it")
        loop.close()
        """,
    )
    assert trainer.wait() == 0, trainer.output
    assert "it is restored now" in trainer.output
    assert "asyncio heard it\n" in trainer.lines


def test_a_wakeup_descriptor_that_was_closed_meanwhile_is_no_obstacle(folder, script):
    trainer = script(
        folder,
        """
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            os.close(write)
            for step in run.steps(5):
                train_one(weights)
        print("descriptor", signal.set_wakeup_fd(-1))
        """,
    )
    assert trainer.wait() == 0, trainer.output
    assert "descriptor -1\n" in trainer.lines


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_training_inside_asyncio_run_stops_as_any_other(
    folder, gate, script, light, light_reference, number, status
):
    trainer = script(
        folder,
        """
        import asyncio

        async def train():
            weights = make_weights()
            with holdfast.Run(folder, weights=weights) as run:
                for step in run.steps(40):
                    train_one(weights)
                    await asyncio.sleep(0)
                    if step == 8:
                        show_holding(run)
                        wait_for(gate)
            print("after the run")

        asyncio.run(train())
        """,
    )
    trainer.wait_for("holding")
    trainer.send(number)
    trainer.wait_for(": step 9 is being finished")
    gate.touch()
    assert trainer.wait() == status, trainer.output
    assert "Traceback" not in trainer.output
    assert "after the run\n" not in trainer.lines
    assert checkpoint_steps(folder) == [9]
    assert light(folder, "--total", 40).state_hash() == light_reference(40)


def test_a_ctrl_c_that_was_ignored_from_the_start_stays_ignored(folder, gate, light_reference):
    command = [sys.executable, "-u", LIGHT, folder, "--gate", gate, "--total", 40, "--hold-at", 8]
    trainer = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with trainer:
        assert trainer.stdout is not None
        try:
            assert any(line.startswith("holding") for line in trainer.stdout)
            trainer.send_signal(signal.SIGINT)
            trainer.send_signal(signal.SIGINT)
            gate.touch()
            assert light_reference(40) in trainer.stdout.read()
        finally:
            trainer.kill()
    assert journal_events(folder, "signal") == []
    assert journal_events(folder, "finished") != []


def test_outside_the_main_thread_a_line_says_so_and_a_request_still_stops_it(
    folder, gate, script, light, light_reference
):
    trainer = script(
        folder,
        """
        def train():
            weights = make_weights()
            try:
                with holdfast.Run(folder, weights=weights) as run:
                    for step in run.steps(40):
                        train_one(weights)
                        if step == 8:
                            show_holding(run)
                            wait_for(gate)
            except holdfast.Stopped as stopped:
                print("stopped with", stopped.status)

        before = signal.getsignal(signal.SIGTERM)
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        print("handler untouched:", signal.getsignal(signal.SIGTERM) == before)
        """,
    )
    trainer.wait_for("holding")
    said = "opened outside the main thread, where Python allows no signal handlers"
    assert said in trainer.output
    holdfast.stop(folder)
    trainer.wait_for("asked to stop: holdfast.stop()")
    gate.touch()
    assert trainer.wait() == 0, trainer.output
    assert "stopped with 130\n" in trainer.lines
    assert "handler untouched: True\n" in trainer.lines
    assert checkpoint_steps(folder) == [9]
    assert light(folder, "--total", 40).state_hash() == light_reference(40)


def test_ctrl_c_inside_with_but_outside_the_loop_is_an_ordinary_interrupt(folder, gate, script):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(8):
                train_one(weights)
            try:
                show_holding(run)
                wait_for(gate)
            except KeyboardInterrupt:
                print("interrupted in the evaluation", flush=True)
                raise
        """,
    )
    trainer.wait_for("holding")
    trainer.send(signal.SIGINT)
    assert trainer.wait() == -signal.SIGINT  # how Python itself leaves: 130 by the shell
    assert "interrupted in the evaluation\n" in trainer.lines
    assert trainer.lines[-1] == "KeyboardInterrupt\n"
    assert checkpoint_steps(folder) == [8]
    wait_for_keeper_gone(folder)


def test_sigterm_inside_with_but_outside_the_loop_leaves_at_once(folder, gate, script):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(8):
                train_one(weights)
            show_holding(run)
            wait_for(gate)
        """,
    )
    trainer.wait_for("holding")
    trainer.send(signal.SIGTERM)
    assert trainer.wait() == 143
    assert "Traceback" not in trainer.output
    assert checkpoint_steps(folder) == [8]
