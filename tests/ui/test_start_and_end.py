"""How the server starts, what it prints, and that it ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from holdfast._errors import SettingsError
from tests.cli.command import environment, holdfast_process
from tests.support import SLACK, wait_until
from tests.ui.made_runs import make_run
from tests.ui.server import INSTALL, Ui

pytest.importorskip("uvicorn", reason=INSTALL)

from holdfast._report.server.serve import listen

PROMPT_SECONDS = 3.0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once_and_nothing_more_is_printed(tmp_path, serve, number, status):
    make_run(tmp_path / "a")
    ui = serve(tmp_path)
    with contextlib.ExitStack() as held:
        for _ in range(5):  # connections that are open, and one with half a request
            connection = held.enter_context(ui.connect())
        connection.sendall(b"GET / HTTP/1.1\r\nHost:")
        ended, printed, seconds = ui.end(number)
    assert (ended, printed) == (status, "Ctrl-C ends the page; the runs go on.\n")
    assert seconds < PROMPT_SECONDS * SLACK


def test_requests_and_strangers_leave_nothing_on_the_terminal(tmp_path, serve):
    make_run(tmp_path / "a")
    ui = serve(tmp_path)
    ui.rows()
    ui.get("/?token=wrong")
    ui.see(f"run/{ui.key('a')}/view")
    for line in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
        b"A" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\n",
    ):
        with ui.connect() as connection, contextlib.suppress(OSError):
            connection.sendall(line)
            connection.recv(1000)
    websocket = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "eA=="}
    ui.see("runs", **websocket)
    _, printed, _ = ui.end()
    assert printed == "Ctrl-C ends the page; the runs go on.\n"


def test_the_address_is_printed_when_it_answers(ui):
    assert ui.visit.status == 303
    assert ui.line == f"{ui.folder}: http://127.0.0.1:{ui.port}/?token={ui.token}\n"
    assert len(ui.token) >= 40


def test_a_port_that_is_taken_is_told_in_two_lines(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = holdfast_process("ui", tmp_path, "--no-open", "--port", port)
    assert done.returncode == 2
    assert done.stderr == (
        f"port {port} of 127.0.0.1: is taken by another program.\n"
        "To take any that is free: holdfast ui --port 0\n"
    )


def test_another_address_than_loopback_is_refused_in_two_lines(tmp_path):
    done = holdfast_process("ui", tmp_path, "--no-open", "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "the page is for this machine only" in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("host", ["::", "192.168.0.1", "example.org", "127.0.0.2", "127.1", ""])
def test_only_the_names_of_loopback_are_taken(host):
    with pytest.raises(SettingsError, match="for this machine only"):
        listen(host, 0)


def test_nobody_else_can_connect(ui):
    with open("/proc/net/tcp") as table:  # noqa: PTH123 - of the kernel
        local = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert f"0100007F:{ui.port:04X}" in local
    assert f"00000000:{ui.port:04X}" not in local


def test_ipv6_loopback_is_answered(tmp_path, serve):
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        ui = serve(tmp_path, "--host", "::1", host="::1")
        assert f"http://[::1]:{ui.port}/" in ui.line
        assert ui.visit.status == 303
        return
    pytest.skip("this machine has no IPv6")


def test_without_the_extra_the_install_line_is_told(tmp_path):
    # As where it is not installed: None in sys.modules is an import that fails.
    program = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv[1:] = ['ui', '.', '--no-open'];"
        "from holdfast._tools.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env=environment(), cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "holdfast ui needs uvicorn, which is not installed here.",
        "Install it: pip install 'starlette>=0.37' 'uvicorn>=0.29'",
    ]


def test_a_folder_that_is_not_there_is_told(tmp_path):
    done = holdfast_process("ui", tmp_path / "no", "--no-open")
    assert done.returncode == 2
    assert "there is no such folder" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_the_browser_gets_the_key_by_a_file_that_only_we_can_read(tmp_path):
    browser = tmp_path / "browser"
    seen = tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\nprintf "%s" "$1" > {seen}.part\nmv {seen}.part {seen}\n')
    browser.chmod(0o755)
    state = tmp_path / "state"
    runs = tmp_path / "runs"
    runs.mkdir()
    env = environment(BROWSER=str(browser), DISPLAY=":99", HOLDFAST_STATE=str(state))
    env.pop("SSH_CONNECTION", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "ui", str(runs)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        wait_until(seen.exists, what="the browser")
        address = seen.read_text()
        assert address.startswith("file://")
        (page,) = state.glob("ui-*.html")
        assert page.stat().st_mode & 0o777 == 0o600
        assert line.split()[-1] in page.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(30 * SLACK) == 130
        assert not list(state.glob("ui-*.html"))
    finally:
        process.kill()
        process.communicate()


def is_cut(connection: socket.socket) -> bool:
    connection.settimeout(30 * SLACK)
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


@pytest.mark.nightly  # its limit is a minute
def test_half_a_request_is_cut_off_though_it_drips_on(tmp_path, serve):
    ui = serve(tmp_path)
    with ui.connect() as silent, ui.connect() as drip:
        began = time.monotonic()
        drip.sendall(b"GET / HTTP/1.1\r\n")

        def is_over() -> bool:
            try:
                drip.sendall(b"X-A: b\r\n")
            except OSError:
                return True
            return time.monotonic() - began > 60 * SLACK

        while not is_over():
            time.sleep(0.5)  # so slow that only a deadline can end it
        assert time.monotonic() - began < 15 * SLACK
        assert is_cut(silent)


def test_many_idle_connections_make_place_for_one_that_asks(ui):
    with contextlib.ExitStack() as held:
        for _ in range(150):
            held.enter_context(ui.connect())
        assert ui.see("runs").status == 200
        descriptors = len(os.listdir(f"/proc/{ui.process.pid}/fd"))  # noqa: PTH208 - of the kernel
        assert descriptors < 110


def test_nothing_of_a_key_is_shown_when_an_answer_fails(tmp_path, serve):
    layout = make_run(tmp_path / "a")
    ui: Ui = serve(tmp_path)
    key = ui.key("a")
    layout.identity.unlink()
    status = ui.see(f"run/{key}/view").status
    assert status in (404, 409, 500)
    _, printed, _ = ui.end()
    for secret in (ui.token, ui.cookie.partition("=")[2], ui.place.strip("/")):
        assert secret not in printed
