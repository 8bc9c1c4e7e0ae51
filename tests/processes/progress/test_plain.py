"""The progress in a log file, a pipe or a notebook: plain lines now and then."""

from __future__ import annotations

import re
import subprocess
import textwrap

import pytest

from holdfast._run.progress import line
from holdfast._run.progress.line import Standing

SAID = "holdfast: epoch 3/10, step 1240/5000, loss 0.231; safe: step 1200 on disk"
OFTEN = """
    from holdfast._run.progress import line
    line.PLAIN_GAPS_SECONDS = (0.05, 0.05)
"""
BODY = f"""{OFTEN}
    progress.begin()
    print("printed", flush=True)
    wait("said")
    progress.close()
    print("closed", flush=True)
"""


def run_until_said(command, gates, env, **popen):
    process = subprocess.Popen(command, env=env, text=True, **popen)
    lines = []
    for text in process.stdout:
        lines.append(text.rstrip("\n"))
        if lines.count(SAID) == 3:
            (gates / "said").touch()
    assert process.wait(20) == 0
    process.stdout.close()
    return lines


@pytest.mark.parametrize("end", ["", " | cat"])
def test_a_pipe_gets_whole_lines_without_control_characters(script, surroundings, tmp_path, end):
    command = ["sh", "-c", f"{' '.join(script(BODY))} 2>&1{end}"]
    lines = run_until_said(command, tmp_path, surroundings(), stdout=subprocess.PIPE)
    assert set(lines) == {SAID, "printed", "closed"}
    assert lines[-1] == "closed"
    assert all(text.isprintable() for text in lines)


def test_a_log_file_gets_them_too_and_tqdm_is_not_even_loaded(script, surroundings, tmp_path):
    body = BODY.replace('print("closed"', 'assert "tqdm" not in sys.modules; print("closed"')
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(script(body), env=surroundings(), stdout=out, stderr=out)
    while log.read_text().count(SAID) < 3:
        assert process.poll() is None
    (tmp_path / "said").touch()
    assert process.wait(20) == 0
    assert re.fullmatch(rf"(printed|closed|{re.escape(SAID)}\n|\n)*", log.read_text())


def test_silence_is_silent(script, surroundings):
    body = BODY.replace('wait("said")', "time.sleep(0.2)")
    env = surroundings(HOLDFAST_PROGRESS="0")
    found = subprocess.run(script(body), env=env, capture_output=True, text=True)
    assert found.returncode == 0
    assert (found.stdout, found.stderr) == ("printed\nclosed\n", "")


@pytest.mark.parametrize("closing", ["sys.stderr.close()", "os.close(2)", "sys.stderr = None"])
def test_nobody_listening_is_no_trouble(script, surroundings, closing):
    body = f"""{OFTEN}
    {closing}
    progress.begin()
    time.sleep(0.15)
    progress.close()
    print("done")
    """
    found = subprocess.run(script(body), env=surroundings(), capture_output=True, text=True)
    assert found.stdout == "done\n"


def test_the_lines_become_rarer(monkeypatch):
    now = [1000.0]
    said = []
    monkeypatch.setattr(line.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(line, "say", lambda _: said.append(round(now[0] - 1000)))
    lines = line.PlainLines()
    for _ in range(300):
        now[0] += 1
        lines.show(Standing(step=1), None, None)
    assert said == [10, 40, 100, 160, 220, 280]
    lines.close()
    now[0] += 1000
    lines.show(Standing(step=1), None, None)
    assert len(said) == 6


@pytest.mark.layer("interactive")
def test_a_notebook_gets_plain_lines(surroundings, tmp_path):
    jupyter_client = pytest.importorskip("jupyter_client", reason="pip install ipykernel")
    manager = jupyter_client.KernelManager(kernel_name="python3")
    env = surroundings(JUPYTER_PLATFORM_DIRS="1", IPYTHONDIR=str(tmp_path))
    manager.start_kernel(env=env)
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        cell = f"import sys, time; sys.argv = ['', {str(tmp_path)!r}]\n" + textwrap.dedent(f"""
            from progress_training import progress
            {textwrap.dedent(OFTEN).strip().replace(chr(10), "; ")}
            progress.begin(); time.sleep(0.5); progress.close()
        """)
        said = []
        client.execute_interactive(cell, timeout=60, output_hook=said.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    texts = [message["content"].get("text", "") for message in said]
    assert SAID in "".join(texts), said
    assert "\x1b" not in "".join(texts)
    assert "\r" not in "".join(texts)
