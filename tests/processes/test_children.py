"""Children of the trainer neither run its handlers nor speak for it."""

from __future__ import annotations

import signal

import pytest

from tests.support import checkpoint_steps, journal_events, wait_for_keeper_gone


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_terminating_a_helper_ends_the_helper_and_not_the_trainer(
    folder, script, light_reference, method
):
    trainer = script(
        folder,
        f"""
        import multiprocessing

        def help_out(pipe):
            pipe.send(True)
            time.sleep(20)

        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            weights = make_weights()
            with holdfast.Run(folder, weights=weights) as run:
                for step in run.steps(40):
                    train_one(weights)
                    if step == 8:
                        ours, theirs = context.Pipe()
                        helper = context.Process(target=help_out, args=(theirs,))
                        helper.start()
                        ours.recv()
                        helper.terminate()
                        helper.join(30)
                        print("helper", helper.exitcode, flush=True)
                    if step == 9:  # time for the keeper to hear what it must not hear
                        time.sleep(0.5)
            show_hash(weights)
        """,
    )
    assert trainer.state_hash() == light_reference(40)
    assert f"helper {-signal.SIGTERM}\n" in trainer.lines
    assert journal_events(folder, "signal") == []


def test_signals_to_a_forked_child_do_not_reach_the_keeper(folder, script, light_reference):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                if step == 8:
                    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT):
                        child = os.fork()
                        if child == 0:
                            time.sleep(20)
                            os._exit(0)
                        os.kill(child, number)
                        _, status = os.waitpid(child, 0)
                        print("child", os.waitstatus_to_exitcode(status), flush=True)
                    read, write = os.pipe()
                    child = os.fork()
                    if child == 0:
                        try:
                            print("descriptor", signal.set_wakeup_fd(-1), flush=True)
                            os.write(write, b"x")
                            time.sleep(20)
                        except KeyboardInterrupt:
                            os._exit(7)
                        os._exit(8)
                    os.read(read, 1)
                    os.kill(child, signal.SIGINT)
                    _, status = os.waitpid(child, 0)
                    print("interrupted child", os.waitstatus_to_exitcode(status), flush=True)
                if step == 9:  # time for the keeper to hear what it must not hear
                    time.sleep(0.5)
        show_hash(weights)
        """,
    )
    assert trainer.state_hash() == light_reference(40)
    children = [line for line in trainer.lines if line.startswith("child")]
    assert children == ["child -15\n", "child -10\n", "child -3\n"]
    assert "interrupted child 7\n" in trainer.lines
    assert "descriptor -1\n" in trainer.lines
    assert journal_events(folder, "signal") == []
    assert not (folder / "attempts/0001/stacks.txt").exists()


def test_a_forked_child_that_leaves_the_block_does_not_close_the_run(
    folder, script, light, light_reference
):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                if step == 8:
                    child = os.fork()
                    if child == 0:
                        raise SystemExit(5)
                    _, status = os.waitpid(child, 0)
                    print("child", os.waitstatus_to_exitcode(status), flush=True)
                    print("exit noted:", (folder / "attempts/0001/exit.json").exists())
                if step == 20:
                    show_holding(run)
                    wait_for(gate)
        """,
    )
    trainer.wait_for("holding")
    assert "child 5\n" in trainer.lines
    assert "exit noted: False\n" in trainer.lines
    assert "keeper" not in trainer.output
    trainer.kill()
    trainer.wait()
    wait_for_keeper_gone(folder)
    assert checkpoint_steps(folder) != []
    assert light(folder, "--total", 40).state_hash() == light_reference(40)
