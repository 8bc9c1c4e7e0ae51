"""Where the line stays away, what it leaves as it was, and how it ends when a process does."""

from __future__ import annotations

import re
import signal

import pytest

CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f]")  # all but line feed and return


def test_standard_output_that_goes_to_a_file_is_left_alone(watch, tmp_path):
    seen = watch(
        """
        write = sys.stdout.write
        progress.begin()
        wait("begin")
        assert "write" not in vars(sys.stdout)
        print("to the file")
        progress.close()
        """,
        shell=f"SCRIPT > {tmp_path}/out",
    )
    seen.wait_for_line()
    seen.let("begin")
    assert seen.wait() == 0
    assert seen.lines == []
    assert (tmp_path / "out").read_text() == "to the file\n"


@pytest.mark.parametrize("extra", [{"TERM": "dumb"}, {"HOLDFAST_PROGRESS": "plain"}], ids=str)
def test_a_terminal_gets_plain_lines_where_they_are_all_it_can_or_should_have(watch, extra):
    seen = watch(
        """
        from holdfast._run.progress import line
        line.PLAIN_GAPS_SECONDS = (0.05, 0.05)
        progress.begin()
        wait("begin")
        progress.close()
        """,
        **extra,
    )
    said = "holdfast: epoch 3/10, step 1240/5000, loss 0.231; safe: step 1200 on disk"
    seen.wait_until(lambda lines: lines.count(said) >= 2)
    seen.let("begin")
    assert seen.wait() == 0
    assert set(seen.lines) == {said}
    assert not CONTROL.search(seen.raw)


@pytest.mark.parametrize("wish", ["0", "No"])
def test_nothing_is_shown_to_whom_wants_nothing(watch, wish):
    seen = watch(
        """
        import threading
        progress.begin()
        assert threading.active_count() == 1
        assert "tqdm" not in sys.modules
        progress.close()
        """,
        HOLDFAST_PROGRESS=wish,
    )
    assert seen.wait() == 0
    assert seen.raw == b""


def test_a_terminal_without_unicode_gets_plain_lines(watch):
    seen = watch(
        """
        from holdfast._run.progress import line
        line.PLAIN_GAPS_SECONDS = (0.05, 0.05)
        training.move(metrics={"loss": 1.0})
        progress.begin()
        wait("begin")
        """,
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )
    said = "holdfast: epoch 3/10, step 1241/5000, loss 1.00; safe: step 1200 on disk"
    seen.wait_until(lambda lines: said in lines)
    seen.let("begin")
    assert seen.wait() == 0
    assert seen.raw.isascii()


def test_streams_are_what_they_were_during_the_run_and_after_it(watch):
    seen = watch("""
        before = sys.stdout, sys.stderr
        attributes = [(dict(vars(s)), s.write, s.flush) for s in before]
        progress.begin()
        assert (sys.stdout, sys.stderr) == before
        assert sys.stdout.isatty() and sys.stdout.fileno() == 1
        assert sys.stdout.buffer.write(b"") == 0
        assert sys.stdout.write("four") == 4
        print()
        progress.close()
        assert [(dict(vars(s)), s.write, s.flush) for s in before] == attributes

        # Somebody who covers our cover, or puts another stream in its place, is left with it.
        progress.begin()
        ours = sys.stdout.write
        theirs = lambda text: ours(text.upper())
        sys.stdout.write = theirs
        sys.stderr = replaced = open(os.devnull, "w")
        progress.close()
        assert sys.stdout.write is theirs and sys.stderr is replaced
        print("through theirs")
        del sys.stdout.write

        # And somebody who was there before gets back what was theirs.
        sys.stdout.write = theirs
        sys.stderr = before[1]
        progress.begin()
        print("once more")
        progress.close()
        assert sys.stdout.write is theirs
        """)
    assert seen.wait() == 0, seen.lines
    assert seen.lines == ["four", "THROUGH THEIRS", "ONCE MORE"]


def test_a_forked_worker_neither_draws_nor_gets_stuck(watch):
    seen = watch("""
        from multiprocessing import get_context
        from tqdm import tqdm
        progress.begin()

        def work(number):
            print("worker", number)
            for _ in tqdm(range(3), disable=False, file=open(os.devnull, "w")):
                pass
            progress.begin()
            progress.close()
            return number

        wait("begin")
        for number in range(25):
            training.move()
            child = get_context("fork").Process(target=work, args=(number,))
            child.start()
            child.join(10)
            assert child.exitcode == 0
        wait("end")
        progress.close()
        """)
    seen.wait_for_line()
    seen.let("begin")
    seen.wait_at("end")
    seen.wait_for_line("step 1265")
    assert seen.lines[:-1] == [f"worker {number}" for number in range(25)]
    seen.let("end")
    assert seen.wait() == 0


def test_a_fork_in_the_middle_of_a_draw_leaves_the_child_a_free_lock(watch):
    seen = watch("""
        import threading
        from tqdm import tqdm
        progress.begin()
        lock = progress._display._lock
        taken = threading.Event()

        def draw():
            with lock:
                taken.set()
                time.sleep(0.3)

        threading.Thread(target=draw).start()
        taken.wait()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if lock.acquire(timeout=5) else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert lock.acquire(timeout=5)
        lock.release()
        progress.close()
        sys.exit(status)
        """)
    assert seen.wait() == 0, seen.lines


def test_the_start_method_of_processes_stays_free_to_choose(watch):
    seen = watch("""
        import multiprocessing
        progress.begin()
        print("hello")
        wait("begin")
        multiprocessing.set_start_method("spawn")
        """)
    seen.wait_for_line()
    seen.let("begin")
    assert seen.wait() == 0, seen.lines


@pytest.mark.parametrize(
    "ending",
    ["", "sys.exit(0)", "progress.close(); sys.stderr.close()", "os.close(2); sys.exit(0)"],
)
def test_a_process_that_ends_without_closing_leaves_a_clean_terminal(watch, ending):
    seen = watch(f"""
        progress.begin()
        wait("begin")
        print("last words")
        {ending}
        """)
    seen.wait_for_line()
    seen.let("begin")
    # 120 is Python's own: a line that was being drawn could not be flushed into a closed stderr.
    statuses = (0, 120) if "os.close" in ending else (0,)
    assert seen.wait() in statuses, seen.lines
    assert seen.lines[:1] == ["last words"]
    assert "os.close" in ending or seen.lines == ["last words"]


def test_an_error_is_shown_whole_and_the_line_is_gone(watch):
    seen = watch("""
        progress.begin()
        wait("begin")
        raise RuntimeError("no more")
        """)
    seen.wait_for_line()
    seen.let("begin")
    assert seen.wait() == 1
    assert seen.lines[0] == "Traceback (most recent call last):"
    assert seen.lines[-1] == "RuntimeError: no more"
    assert seen.shown == []


def test_ctrl_c_and_a_kill_leave_the_terminal_in_order(watch):
    seen = watch("""
        progress.begin()
        wait("begin")
        """)
    seen.wait_for_line()
    seen.press("\x03")
    assert seen.wait() == -signal.SIGINT
    assert seen.lines[-1] == "KeyboardInterrupt"
    assert seen.shown == []
    killed = watch("""
        progress.begin()
        wait("again")
        """)
    killed.wait_for_line()
    killed.process.kill()
    killed.wait()
    for one in (seen, killed):
        assert not one.screen.cursor.hidden
        assert one.screen.cursor.x == 0
        assert b"\x1b[?" not in one.raw


def test_a_job_in_the_background_leaves_the_terminal_to_the_shell(watch):
    seen = watch(
        """
        progress.begin()
        wait("begin")
        print("printed")
        wait("end")
        """,
        shell="set -m; SCRIPT & echo $! started; wait; echo over",
    )
    seen.wait_at("begin")
    seen.let("begin")
    seen.wait_at("end")
    seen.let("end")
    assert seen.wait() == 0
    assert [line.split()[-1] for line in seen.lines] == ["started", "printed", "over"]
    assert b"\x1b" not in seen.raw


def test_what_fails_in_the_look_is_only_not_shown(watch):
    seen = watch("""
        look = training.look
        def broken():
            raise ValueError("not now")
        progress._look = broken
        progress.begin()
        wait("begin")
        progress._look = look
        wait("end")
        progress.close()
        """)
    seen.wait_at("begin")
    seen.let("begin")
    seen.wait_for_line()
    seen.let("end")
    assert seen.wait() == 0
    assert seen.lines == []
