"""A real SLURM on this machine: munged, slurmctld and a slurmd for each node, on loopback.

Each node has a host name, an /etc/hosts and a /dev/shm of its own, by namespaces. The key, the
settings, the ports and the names belong to this cluster alone, so that several can run at once.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from functools import cache
from pathlib import Path

from tests.ports import free_port
from tests.slurm import sweep
from tests.slurm.settings import (
    Settings,
    cgroup_conf,
    cgroup_folders,
    limits_memory,
    slurm_conf,
    tracks_by_cgroup,
)
from tests.support import SLACK, wait_until

ENDED = frozenset(
    {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
)
# Debian keeps daemons where an ordinary user's PATH does not look.
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# $1 is the host name, $2 the cluster's folder.
_ON_A_NODE = """
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
shift 2
exec "$@"
"""


@cache
def what_is_missing() -> str | None:
    """Why no cluster can be started here and what to do about it, or None."""
    if sys.platform != "linux":
        return "these tests start a SLURM of their own, which needs Linux"
    programs = {
        "slurmctld": "slurm-wlm",
        "slurmd": "slurm-wlm",
        "sbatch": "slurm-wlm",
        "munged": "munge",
        "unshare": "util-linux",
    }
    missing = {p for name, p in programs.items() if not shutil.which(name, path=_SYSTEM_PATH)}
    if missing:
        packages = " ".join(sorted(missing))
        return f"these tests start a SLURM of their own: apt-get install {packages}"
    if os.geteuid() != 0:
        return "these tests start a SLURM of their own, which needs root: run them as root"
    allowed = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True)
    if allowed.returncode != 0:
        return "a SLURM of our own needs namespaces: run the tests with CAP_SYS_ADMIN"
    return None


class Cluster:
    """One cluster, from start() to stop(), and what one asks of it."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.limits_memory = limits_memory()
        self.tracks_by_cgroup = tracks_by_cgroup()
        # Short, since the paths of sockets must be.
        self.folder = Path(tempfile.mkdtemp(prefix="hfslurm"))
        self.prefix = _unused_prefix()
        self.nodes = [f"{self.prefix}{number}" for number in range(1, self.settings.nodes + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._sweeper: subprocess.Popen[bytes] | None = None

    # Its life

    def start(self) -> None:
        """Start the daemons and return when every node takes jobs."""
        self._sweeper = subprocess.Popen(
            [sys.executable, "-I", "-S", sweep.__file__, str(self.folder), self.prefix],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us
        )
        try:
            self._write_settings()
            self._start_munged()
            self._start_daemon("slurmctld", f"{self.prefix}0", "slurmctld", "-D")
            for node in self.nodes:
                self.start_slurmd(node)
            self.wait_for_nodes()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything that start() and the jobs have started; a second call does nothing."""
        if self._sweeper is not None:
            self._sweeper.communicate(timeout=60)
            self._sweeper = None
        for daemon in self._daemons.values():
            daemon.wait(30)
        self._daemons.clear()

    def start_slurmd(self, node: str) -> None:
        """Start a node's slurmd, also a second time after kill_slurmd()."""
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        self._start_daemon(node, node, "slurmd", "-D", "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """Kill a node's slurmd and nothing else: its jobs run on, out of SLURM's reach.

        SLURM notices after about `node_timeout` seconds; see also declare_down().
        """
        self._daemons[node].kill()
        self._daemons[node].wait(30)

    def declare_down(self, node: str) -> None:
        """What the timeout does, at once: jobs of this node are requeued or end as NODE_FAIL."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def wait_for_nodes(self, seconds: float = 30.0) -> None:
        """Wait until every node takes jobs."""

        def look() -> bool:
            for name, daemon in self._daemons.items():
                assert daemon.poll() is None, f"{name} has ended\n{self.tail(name)}"
            answer = self._ask("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T")
            ready = [line.split()[0] for line in answer.stdout.splitlines() if _is_up(line)]
            return set(ready) == set(self.nodes)

        try:
            wait_until(look, seconds, f"a cluster of {self.nodes}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail('slurmctld')}") from None

    def clear(self) -> None:
        """Cancel all jobs, end what they have left, and bring lost nodes back."""
        deadline = time.monotonic() + 60
        while jobs := self.run("squeue", "-h", "-o", "%A").split():
            assert time.monotonic() < deadline, f"jobs {jobs} do not end\n{self.tail('slurmctld')}"
            # KILL first: a job that saves when asked to end would keep the next test waiting.
            self._ask("scancel", "--full", "--signal=KILL", *jobs)
            self._ask("scancel", *jobs)
            time.sleep(0.05)
        for pid in self._job_processes():
            sweep.kill(pid)
        for node in self.nodes:
            if self._daemons[node].poll() is not None:
                self.start_slurmd(node)
            if not _is_up(self.run("sinfo", "-h", "-n", node, "-p", "main", "-o", "%N %T")):
                self._ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait_for_nodes()

    # Its jobs

    def sbatch(self, script: str | Path, *options: str, cwd: Path | None = None) -> str:
        """Submit a script, or the text of one, and return the job's number."""
        if isinstance(script, str):
            text = script if script.startswith("#!") else f"#!/bin/bash\n{script}"
            script = self.folder / "jobs" / f"{secrets.token_hex(4)}.sbatch"
            script.write_text(text)
        answer = self.run("sbatch", "--parsable", *options, str(script), cwd=cwd)
        return answer.strip().split(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says; of an array without a task's number, its first line."""
        line = self.run("scontrol", "show", "job", "-o", job).splitlines()[0]
        pairs = (word.partition("=") for word in line.split())
        return {name: value for name, equals, value in pairs if equals}

    def state(self, job: str) -> str:
        return self.show(job)["JobState"]

    def wait(self, job: str, states: str | Collection[str] = ENDED, seconds: float = 30.0) -> str:
        """Wait until the job is in one of these states, and return it."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + seconds * SLACK
        while (state := self.state(job)) not in wanted:
            if time.monotonic() > deadline or (state in ENDED and self.is_over(job)):
                raise AssertionError(
                    f"job {job} is {state} and not {' or '.join(sorted(wanted))}\n"
                    f"{self.show(job)}\nits output:\n{self.log(job)}\n{self.tail('slurmctld')}"
                )
            time.sleep(0.05)
        return state

    def is_over(self, job: str) -> bool:
        """Whether the job has left the queue: no process of it is left that SLURM knows of."""
        return not self.run("squeue", "-h", "-j", job, "-o", "%A").strip()

    def log(self, job: str) -> str:
        """What the job has written so far; nothing before it starts."""
        path = Path(self.show(job)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_log(self, job: str, text: str, seconds: float = 30.0) -> str:
        """Wait until the job has written this, and return all that it has written."""
        deadline = time.monotonic() + seconds
        while text not in (log := self.log(job)):
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"job {job}, {self.state(job)}, has not written {text!r} within {seconds} s:\n"
                    f"{log}\n{self.tail('slurmctld')}"
                )
            time.sleep(0.05)
        return log

    def scancel(self, job: str, *options: str) -> None:
        self.run("scancel", *options, job)

    def requeue(self, job: str) -> None:
        self.run("scontrol", "requeue", job)

    def end_in(self, job: str, seconds: int) -> None:
        """Move the job's time limit, which SLURM gives out by the minute only.

        SLURM looks at time limits every half minute: the end comes up to 30 seconds later.
        """
        self.run("scontrol", "update", f"JobId={job}", f"EndTime=now+{seconds}")

    def pids(self, job: str, rank: int | None = None) -> list[int]:
        """The job's processes on all nodes, of all its attempts; or those of one rank of its steps.

        A job of an array goes by its own number here, which show() gives as JobId.
        """
        wanted = {"SLURM_JOB_ID": job}
        if rank is not None:
            wanted["SLURM_PROCID"] = str(rank)
        return [
            pid
            for pid, environment in self._job_processes().items()
            if all(environment.get(name) == value for name, value in wanted.items())
            and (rank is None or "SLURM_STEP_ID" in environment)
        ]

    # Its commands

    def environment(self, **extra: str) -> dict[str, str]:
        """For commands and jobs of this cluster; the tests' own python and holdfast come first."""
        # Tests that run inside a job of a real cluster must not pass that job on.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "PYTEST_"))
        }
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"
        ours = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path, "OMP_NUM_THREADS": "1"}
        return {**kept, **ours, **extra}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Run one of SLURM's commands and return what it prints; it must succeed."""
        done = self._ask(*command, cwd=cwd)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{self.tail('slurmctld')}"
        return done.stdout

    def tail(self, name: str, lines: int = 30) -> str:
        """The end of a daemon's log: slurmctld, munged or a node."""
        logs = [self.folder / "log" / f"{name}.output", self.folder / "log" / name]
        text = "".join(log.read_text(errors="replace") for log in logs if log.exists())
        return "\n".join([f"the end of {name}'s log:", *text.splitlines()[-lines:]])

    # Within

    def _ask(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd or self.folder / "jobs",
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def _write_settings(self) -> None:
        self.folder.chmod(0o755)  # munge trusts no folder that others may write to
        for name in ("jobs", "log", "spool", "state"):
            (self.folder / name).mkdir()
        ports = [free_port() for _ in range(len(self.nodes) + 1)]
        assert len(set(ports)) == len(ports), "two daemons drew the same port"
        conf = slurm_conf(self.folder, self.prefix, ports, self.settings)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "cgroup.conf").write_text(cgroup_conf())
        names = "".join(f"127.0.0.1 {name}\n" for name in [f"{self.prefix}0", *self.nodes])
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text().rstrip() + f"\n{names}")
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def _start_munged(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        files |= {"log-file": "log/munged", "seed-file": "munge.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._start_daemon("munged", f"{self.prefix}0", "munged", "--foreground", *options)
        wait_until((self.folder / "munge.socket").exists, 10, "munged")

    def _start_daemon(self, name: str, host: str, *command: str) -> None:
        namespaces = ["unshare", "--uts", "--mount", "--propagation", "private"]
        on_a_node = ["sh", "-c", _ON_A_NODE, "sh", host, str(self.folder)]
        with (self.folder / "log" / f"{name}.output").open("ab") as output:
            # All of them become the daemon itself, so that its process id is the one we know.
            self._daemons[name] = subprocess.Popen(
                [*namespaces, *on_a_node, *command],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                start_new_session=True,
            )

    def _job_processes(self) -> dict[int, dict[str, str]]:
        found = {}
        for pid in sweep.members(self.folder):
            environment = _environment_of(pid)
            if "SLURM_JOB_ID" in environment:
                found[pid] = environment
        return found


def _environment_of(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return {}  # it has ended meanwhile
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def _is_up(line: str) -> bool:
    """Whether sinfo's line of a node says that it takes jobs; a star means that it is silent."""
    return line.split()[-1:] != [] and line.split()[-1] in {"idle", "mixed", "allocated"}


def _unused_prefix() -> str:
    """Letters that no node on this machine begins with: cgroups are named after nodes."""
    while cgroup_folders(prefix := "".join(random.Random().sample(string.ascii_lowercase, 4))):
        pass
    return prefix
