"""Prove each script of this folder before and after holdfast, and write the page of results.

    make table

Each proof runs in a copy of its script's folder, so that no run sees what another has left.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import difflib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from holdfast._tools.prove.proof import DIFFERS, EQUAL, UNREPEATABLE, Proof, ProofRequest, Watcher

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "before-and-after.md"
KILLS, SEED = 3, 1
SIDES = ("before", "after")
SIGNALS = ("INT", "TERM", "QUIT", "KILL")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TF = "tensorflow"
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Pair:
    """A script, before and after."""

    name: str
    pattern: str
    launcher: tuple[str, ...] = ()
    signals: tuple[str, ...] = SIGNALS
    framework: str = "torch"

    def command(self, *script: str) -> tuple[str, ...]:
        return (sys.executable, *self.launcher, *script)


PAIRS = (
    Pair("ctrl_c", "`except KeyboardInterrupt` around the training saves"),
    Pair("plain_loop", "a plain loop, saved when it is over"),
    Pair("handler_exit", "a handler of INT and TERM saves and exits; each epoch saves, too"),
    # USR2 is what this pattern is made for.
    Pair("slurm_flag", "SLURM's warning sets a flag, the step's end saves", (), ("USR2", *SIGNALS)),
    Pair("ddp", "DDP, rank 0 saves after each epoch", TORCHRUN),
    Pair("ddp_elastic", "DDP, a snapshot every two epochs", (*TORCHRUN, "--max-restarts=0")),
    Pair("tf_flag_manager", "SIGINT sets a flag, a CheckpointManager saves", framework=TF),
    Pair("tf_strategy", "a strategy on two devices, a flag and a CheckpointManager", framework=TF),
    Pair("tf_condition", "a condition of its own ends it, each epoch saves", framework=TF),
)

# Counts updates from outside of the script, so that it says by itself whether it trains on.
COUNTED = """
import os, runpy, sys
count = os.open("updates", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
{hook}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HOOKS = {
    "torch": """
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: os.write(count, b"."))
""",
    # Eagerly, since in a graph each call is seen once; of the replicas the first counts.
    TF: """
import keras, tensorflow as tf
tf.config.run_functions_eagerly(True)
apply = keras.Optimizer.apply
def apply_and_count(*arguments, **named):
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.replica_id_in_sync_group == 0:
        os.write(count, b".")
    return apply(*arguments, **named)
keras.Optimizer.apply = apply_and_count
""",
}


@dataclass(frozen=True)
class Restart:
    """What a script does that is started once more after it has come to its end."""

    status: int
    updates: int
    same_end: bool
    last_line: str


@dataclass(frozen=True)
class Measured:
    """A row of the table."""

    pair: Pair
    signal: str
    before: Proof
    after: Proof


def read_code(path: Path) -> list[str]:
    """The lines that count: not blank, without the docstring, and without their indentation."""
    text = path.read_text()
    first = ast.parse(text).body[0]
    assert isinstance(first, ast.Expr), f"{path} has no docstring"
    assert first.end_lineno is not None
    return [line.strip() for line in text.splitlines()[first.end_lineno :] if line.strip()]


def count_changes(before: Sequence[str], after: Sequence[str]) -> tuple[int, int]:
    """How many lines were added, and how many removed."""
    added = removed = 0
    for line in difflib.ndiff(before, after):
        added += line.startswith("+ ")
        removed += line.startswith("- ")
    return added, removed


def count_lost(proof: Proof) -> int:
    """Steps that had been made and had to be made again."""
    return sum(
        max(0, interruption.step - interruption.resumed_at)
        for interruption in proof.interruptions
        if interruption.step is not None and interruption.resumed_at is not None
    )


def say_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def say_proof(proof: Proof) -> str:
    """A cell of the table."""
    difference = proof.unrepeatable if proof.verdict == UNREPEATABLE else proof.difference
    if proof.verdict == EQUAL:
        text = "equal"
    elif proof.verdict in (DIFFERS, UNREPEATABLE) and difference is not None:
        where = "" if difference.step is None else f" at step {difference.step}"
        text = f"**{proof.verdict}**{where}: `{difference.cause}`"
    else:
        why = (proof.trouble or "no reason given").splitlines()[0]
        text = f"**{proof.verdict}**: {why}"
    return escape_cell(text)


def say_lost(proof: Proof) -> str:
    """A cell of the table."""
    return f"{count_lost(proof)} in {len(proof.interruptions)}"


def say_restart(restart: Restart) -> str:
    """A cell of the table."""
    if restart.status != 0:
        error = restart.last_line.partition(":")[0]
        return escape_cell(f"**fails** with {restart.status}: {error}")
    if not restart.updates:
        return "leaves at once" if restart.same_end else "**leaves with another end**"
    end = "to the same end" if restart.same_end else "**to another end**"
    return f"trains {say_steps(restart.updates)} again, {end}"


def escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


@contextmanager
def copied(pair: Pair, side: str) -> Iterator[Path]:
    """A folder with nothing in it but this script."""
    with tempfile.TemporaryDirectory(prefix=f"{pair.name}-{side}-") as folder:
        shutil.copy(HERE / pair.name / f"{side}.py", folder)
        yield Path(folder)


def prove_side(pair: Pair, side: str, name: str) -> Proof:
    """Interrupt a script with one signal."""
    from holdfast._tools.prove.prove import prove

    with copied(pair, side) as folder:
        wishes = ProofRequest(
            command=pair.command(f"{side}.py"),
            kills=KILLS,
            signals=(name,),
            seed=SEED,
            folder=folder,
        )
        return prove(wishes, Watcher())


def restart_side(pair: Pair, side: str) -> Restart:
    """Run a script to its end, and then once more."""
    with copied(pair, side) as folder:
        (folder / "counted.py").write_text(COUNTED.format(hook=HOOKS[pair.framework]))
        command = pair.command("counted.py", f"{side}.py")
        ends, updates = [], folder / "updates"
        for _ in range(2):
            updates.unlink(missing_ok=True)
            ends.append(
                subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
                )
            )
        first, second = ends
        assert first.returncode == 0, first.stderr
        return Restart(
            second.returncode,
            updates.stat().st_size,
            find_weights(first.stdout) == find_weights(second.stdout),
            find_error(second.stderr),
        )


def find_weights(output: str) -> str:
    """The line that every script prints at its end."""
    return next((line for line in output.splitlines() if line.startswith("weights ")), "")


def find_error(output: str) -> str:
    """The last line of a traceback; torchrun adds many of its own behind it."""
    errors = [line for line in output.splitlines() if "Error: " in line and line[:1] != " "]
    return errors[-1] if errors else ""


def describe_machine() -> str:
    """In words, without its name."""
    names = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    python = ".".join(platform.python_version_tuple()[:2])
    cores = os.cpu_count() or 1
    parts = [f"{cores} cores {platform.machine()}"]
    if hasattr(os, "sysconf"):
        size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        parts.append(f"{round(size_bytes / 2**30)} GiB")
    frameworks = [
        f"{name} {'.'.join(version(packages_distributions()[package][0]).split('.')[:2])}"
        for name, package in (("torch", "torch"), ("TensorFlow", "tensorflow"), ("Keras", "keras"))
        if find_spec(package)
    ]
    return ", ".join([*parts, names, f"Python {python}", *frameworks])


def write_scripts(
    measured: Iterable[Measured], restarts: dict[tuple[str, str], Restart]
) -> Iterator[str]:
    yield "| script | lines | started again when complete, before |"
    yield "|---|---|---|"
    for pair in dict.fromkeys(row.pair for row in measured):
        added, removed = count_changes(*(read_code(HERE / pair.name / f"{s}.py") for s in SIDES))
        end = say_restart(restarts[pair.name, "before"])
        yield f"| {pair.name}: {pair.pattern} | +{added} −{removed} | {end} |"  # noqa: RUF001


def write_rows(measured: Iterable[Measured]) -> Iterator[str]:
    yield "| script | signal | before | lost | after | lost |"
    yield "|---|---|---|---|---|---|"
    last = None
    for row in measured:
        cells = ["" if row.pair.name == last else row.pair.name, row.signal]
        for proof in (row.before, row.after):
            cells += [say_proof(proof), say_lost(proof)]
        last = row.pair.name
        yield f"| {' | '.join(cells)} |"


def write_section(
    title: str, measured: Sequence[Measured], restarts: dict[tuple[str, str], Restart]
) -> str:
    tables = "\n".join([*write_scripts(measured, restarts), "", *write_rows(measured)])
    return f"## {title}\n\n{tables}\n"


def write_page(
    measured: Sequence[Measured], restarts: dict[tuple[str, str], Restart], minutes: float
) -> str:
    """The whole page."""
    today = datetime.datetime.now(datetime.UTC).date()
    equal = {side: sum(getattr(row, side).verdict == EQUAL for row in measured) for side in SIDES}
    lost = {side: sum(count_lost(getattr(row, side)) for row in measured) for side in SIDES}
    after = {say_restart(end) for (_, side), end in restarts.items() if side == "after"}
    ends = "each script leaves at once" if after == {"leaves at once"} else "; ".join(sorted(after))
    sections = "\n".join(
        write_section(title, rows, restarts)
        for title, framework in (("PyTorch", "torch"), ("TensorFlow", TF))
        if (rows := [row for row in measured if row.pair.framework == framework])
    )
    return f"""# Before and after

Each script has its own way to survive an interruption. It was changed to use holdfast instead:
[`before_and_after/`](before_and_after) has a folder with both versions of each. `make table`
proves both with `holdfast prove`. A script runs twice undisturbed. Then one signal stops it at
{KILLS} random moments (seed {SEED}). It is started again until it is complete. Its end must be
the same, to the bit.

Equal to the bit: {equal["before"]} of {len(measured)} before, {equal["after"]} after. Steps that
were repeated: {lost["before"]} before, {lost["after"]} after.

* *Lines*: lines of code added and removed. Blank lines, docstrings and new indentation do not
  count.
* *Started again when complete*: with holdfast {ends}.
* *Equal*: weights, optimizer, schedulers, generators, data order and number of steps.
* *Differs*: the first step that differs, and the [likely cause](prove.md#reading-a-verdict). Such
  a proof may end early.
* *Lost*: steps that were made again, in so many interruptions.

{sections}
## What this does not show

* `plain_loop` is *equal* because it starts from its beginning each time. It never ends if
  interruptions come more often than it takes to train.
* The scripts train for about half a second. After a kill holdfast continues from the last
  snapshot, up to about a second old. Here that can be a large part of the training. It changes
  with the machine and with each measurement.
* {KILLS} interruptions by each signal hit few moments. There may be differences that were not
  found.
* DDP runs with two ranks on one machine, without torchrun's restarts. A signal hits one rank,
  all, or torchrun.
* The strategy of TensorFlow has two devices of one processor in one process. The update in a
  `tf.function` counts as one moment.
* GPUs, other file systems, a full disk and a real SLURM are not in this table.
* The scripts before holdfast were written for this page. They are not the best that can be done
  by hand.

Measured on {today} in {minutes:.0f} minutes: {describe_machine()}.
"""


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[pair.name for pair in PAIRS])
    parser.add_argument("--signals", help="these instead of each script's own, e.g. TERM,KILL")
    parser.add_argument("--jobs", type=int, default=2, help="proofs at the same time")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()

    # A shell that starts this in the background has these ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    pairs = [pair for pair in PAIRS if not options.only or pair.name in options.only]
    if options.signals:
        names = tuple(options.signals.split(","))
        pairs = [dataclasses.replace(pair, signals=names) for pair in pairs]
    began = time.monotonic()
    # Processes, since a proof handles signals of its own in its main thread.
    with ProcessPoolExecutor(options.jobs) as pool:
        restarts = {
            (pair.name, side): pool.submit(restart_side, pair, side)
            for pair in pairs
            for side in SIDES
        }
        proofs = {
            (pair.name, name, side): pool.submit(prove_side, pair, side, name)
            for pair in pairs
            for name in pair.signals
            for side in SIDES
        }
        restarted = {key: waiting.result() for key, waiting in restarts.items()}
        for key, restart in restarted.items():
            report(f"{' '.join(key)}, started again: {say_restart(restart)}")
        proved = {}
        for key, waiting in proofs.items():
            proved[key] = waiting.result()
            report(f"{' '.join(key)}: {say_proof(proved[key])} ({proved[key].seconds:.0f} s)")

    measured = [
        Measured(pair, name, *(proved[pair.name, name, side] for side in SIDES))
        for pair in pairs
        for name in pair.signals
    ]
    minutes = (time.monotonic() - began) / 60
    options.output.write_text(write_page(measured, restarted, minutes))
    report(f"{options.output} written after {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
