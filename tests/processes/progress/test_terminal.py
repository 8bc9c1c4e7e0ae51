"""What a person sees of the progress line, in a real terminal as an emulator shows it."""

from __future__ import annotations


def test_one_line_follows_the_training_and_is_gone_at_the_end(watch):
    seen = watch("""
        progress.begin()
        progress.begin()
        wait("one")
        training.move(step=1300, memory_step=1299, phase="eval")
        wait("two")
        progress.close()
        progress.close()
        print("the end")
        """)
    line = seen.wait_for_line()
    assert line.startswith("epoch 3/10  ━")
    assert "step 1240/5000" in line
    assert line.endswith("loss 0.231  safe: step 1200 on disk")
    seen.let("one")
    line = seen.wait_for_line("step 1300/5000")
    assert line.startswith("epoch 3/10  eval")
    assert line.endswith("safe: step 1299 in memory, 1200 on disk")
    assert seen.lines == [line]
    seen.let("two")
    assert seen.wait() == 0
    assert seen.lines == ["the end"]
    assert seen.screen.cursor.x == 0
    assert not seen.screen.cursor.hidden


def test_whatever_others_write_stands_above_the_line_whole_and_in_order(watch):
    seen = watch("""
        import logging, warnings
        from holdfast._text import say
        logging.basicConfig(format="%(message)s")   # holds sys.stderr from before the line
        progress.begin()
        for number in range(0, 60, 6):
            print("print", number)
            print("print", number + 1, file=sys.stderr)
            logging.warning("print %d", number + 2)
            say(f"print {number + 3}")
            warnings.warn_explicit(f"print {number + 4}", UserWarning, "file.py", number)
            sys.stdout.writelines(["print ", str(number + 5), "\\n"])
            training.move()
            time.sleep(0.03)
        wait("all")
        progress.close()
        """)
    seen.wait_at("all")
    seen.wait_for_line("step 1250")
    printed = [line for line in seen.lines if "print " in line]
    assert [int(line.split()[-1]) for line in printed] == list(range(60))
    assert {line.partition("print ")[0] for line in printed} == {
        *("", "holdfast: ", "file.py:"),
        *(f"file.py:{number}: UserWarning: " for number in range(0, 60, 6)),
    } - {"file.py:"}
    assert len(seen.shown) == 1
    seen.let("all")
    assert seen.wait() == 0
    assert seen.shown == []


def test_a_line_that_is_not_complete_is_left_alone(watch):
    seen = watch("""
        progress.begin()
        wait("one")
        print("loading ...", end="", flush=True)
        training.move()
        wait("two")
        print(" done")
        wait("three")
        print("50%", end="\\r", flush=True)
        wait("four")
        print("100%")
        wait("five")
        """)
    seen.wait_for_line()
    seen.let("one")
    seen.wait_until(lambda lines: lines == ["loading ..."])
    seen.wait_at("two")
    seen.let("two")
    seen.wait_for_line("step 1241")
    assert seen.lines[:-1] == ["loading ... done"]
    seen.let("three")
    seen.wait_until(lambda lines: lines == ["loading ... done", "50%"])
    seen.let("four")
    seen.wait_for_line()
    assert seen.lines[:-1] == ["loading ... done", "100%"]


def test_bars_of_the_users_own_find_their_place_below_and_leave_their_last_state(watch):
    seen = watch("""
        from tqdm import tqdm
        progress.begin()
        wait("begin")
        with tqdm(total=3, desc="outer") as outer:
            outer.update()
            with tqdm(desc="inner", leave=False) as inner:
                inner.update()
                print("printed")
                tqdm.write("written")
                wait("nested")
            outer.update(2)
        with tqdm(desc="no total") as short:
            short.update(5)
        wait("over")
        progress.close()
        """)
    seen.wait_for_line()
    seen.let("begin")
    seen.wait_until(lambda lines: len(lines) == 5)
    printed, written, line, outer, inner = seen.lines
    assert (printed, written) == ("printed", "written")
    assert "safe: step 1200 on disk" in line
    assert outer.startswith("outer:  33%")
    assert inner.startswith("inner: ")
    seen.let("nested")
    seen.wait_at("over")
    seen.wait_for_line()
    printed, written, outer, short, line = seen.lines
    assert outer.startswith("outer: 100%")
    assert short.startswith("no total: 5it [")
    assert short.endswith("it/s]")  # nothing of our line, which was longer, is left behind it
    seen.let("over")
    assert seen.wait() == 0
    assert seen.shown == []
    assert len(seen.lines) == 4


def test_a_bar_that_was_there_first_keeps_its_place(watch):
    seen = watch("""
        from tqdm import tqdm
        outer = tqdm(total=3, desc="outer")
        progress.begin()
        wait("begin")
        print("printed")
        wait("printed")
        outer.update(3)
        outer.close()
        wait("closed")
        with tqdm(total=3, desc="fixed", position=0) as fixed:
            wait("fixed")
        wait("end")
        """)
    seen.wait_for_line()
    assert seen.lines[0].startswith("outer:   0%")
    seen.let("begin")
    seen.wait_until(lambda lines: len(lines) == 3 and "safe: " in lines[2])
    assert seen.lines[0] == "printed"
    assert seen.lines[1].startswith("outer:   0%")
    seen.let("printed")
    seen.wait_until(lambda lines: len(lines) == 3 and lines[1].startswith("outer: 100%"))
    seen.wait_for_line()
    seen.let("closed")
    seen.wait_until(lambda lines: len(lines) == 4 and lines[2].startswith("fixed: "))
    seen.wait_for_line()
    seen.let("fixed")
    seen.wait_for_line()
    assert len(seen.shown) == 1


def test_it_stays_away_while_rich_has_the_screen(watch):
    seen = watch("""
        from rich.live import Live
        progress.begin()
        wait("begin")
        with Live("rich is here", refresh_per_second=20):
            training.move()
            print("printed")
            wait("live")
        wait("end")
        """)
    seen.wait_for_line()
    seen.let("begin")
    seen.wait_until(lambda lines: lines == ["printed", "rich is here"])
    seen.wait_at("live")
    assert seen.shown == []
    seen.let("live")
    seen.wait_for_line("step 1241")
    assert seen.lines[:-1] == ["printed", "rich is here"]


def test_a_question_is_not_overwritten(watch):
    seen = watch("""
        progress.begin()
        wait("begin")
        print("printed")
        answer = input("go on? ")
        print("answer", answer)
        training.move()
        breakpoint()
        training.move()
        wait("end")
        """)
    seen.wait_for_line()
    seen.let("begin")
    seen.wait_until(lambda lines: lines == ["printed", "go on?"])
    seen.press("yes\n")
    seen.wait_until(lambda lines: lines[-1:] == ["(Pdb)"])
    assert seen.lines[1:3] == ["go on? yes", "answer yes"]
    assert seen.shown == []
    seen.press("c\n")
    seen.wait_for_line("step 1242")
    assert seen.lines[-2] == "(Pdb) c"


def test_it_fits_the_terminal_also_after_a_change_of_its_size(watch):
    seen = watch(
        """
        progress.begin()
        wait("narrow")
        for i in range(50):
            training.move()
            time.sleep(0.01)
        print("printed")
        wait("end")
        """,
        columns=120,
    )
    assert "━" in seen.wait_for_line()
    seen.resize(50)
    seen.wait_for_line("epoch 3/10  step 1240/5000  safe: 1200")
    assert len(seen.lines) == 1
    assert len(seen.lines[0]) < 50
    seen.let("narrow")
    seen.wait_for_line("step 1290")
    seen.resize(120)
    assert "━" in seen.wait_for_line("loss 0.231")
    assert seen.lines == ["printed", seen.shown[0]]
