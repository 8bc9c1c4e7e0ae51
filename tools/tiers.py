"""Runs a tier of the tests: quick, test, frameworks, nightly, or what a change affects.

    python tools/tiers.py frameworks jax
    python tools/tiers.py affected --base main

tests/tiers.toml says what each tier is. Every part runs, also after one that failed; the last lines
say which failed.
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from typing import Any

import environment

ROOT = environment.ROOT
FRAMEWORKS = ("jax", "tensorflow", "keras", "lightning", "transformers", "ray")
BUDGET_MINUTES = 25  # of the 40 of .ci/run: `make check` and `make test` take the others
NO_TESTS = 5  # the status of pytest if nothing was selected
Part = dict[str, Any]


def read_parts() -> dict[str, Part]:
    """The parts, with the paths of each group in place of its @name."""
    table = tomllib.loads(environment.TABLE.read_text())
    groups = {f"@{name}": paths for name, paths in table["groups"].items()}
    for part in table["parts"].values():
        part["paths"] = [path for each in part["paths"] for path in groups.get(each, [each])]
    return dict(table["parts"])


def pytest(layer: str, marks: str, paths: list[str], parallel: int, *words: str) -> int:
    """Run the tests of a layer that have these marks, in its environment."""
    environment.prepare(layer)
    command = [ROOT / "tools" / "in-memory", environment.python_of(layer), "-m", "pytest", "-q"]
    command += ["--layer", layer, "-m", marks]
    if parallel > 1:
        command += ["-n", str(parallel), "--dist", "worksteal"]
    command = [*map(str, command), *words, *paths]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def run_part(name: str, marks: str) -> int:
    """Run a part; a part of which nothing is selected is a success."""
    part = read_parts()[name]
    layer = part["layer"]
    # By name: what stands beside them may import what this layer lacks.
    tests = part.get("tests") or environment.files_of(layer)
    status = pytest(layer, marks, tests, part.get("parallel", 2))
    return 0 if status == NO_TESTS else status


def run_parts(chosen: dict[str, str]) -> int:
    """Run parts, each with its marks, and say in the end how long each took and which failed."""
    ends = []
    for name, marks in chosen.items():
        print(f"\n== {name} ==", flush=True)
        began = time.monotonic()
        status = run_part(name, marks)
        ends.append((name, status, time.monotonic() - began))
    print()
    for name, status, seconds in ends:
        print(f"{name:<14} {'passed' if status == 0 else 'FAILED'} {seconds / 60:5.1f} min")
    return int(any(status for _, status, _ in ends))


def run_quick() -> int:
    quick = tomllib.loads(environment.TABLE.read_text())["quick"]
    return pytest("test", "not nightly", quick["tests"], 3)


def run_test(words: list[str]) -> int:
    return pytest("test", "not nightly", ["tests"], 4, *words)


def run_frameworks(names: list[str]) -> int:
    return run_parts(dict.fromkeys(names or FRAMEWORKS, "not nightly"))


def run_nightly(names: list[str]) -> int:
    parts = read_parts()
    everything = "nightly or not nightly"
    # Tests by hypothesis draw other examples here than in `make test`.
    others = "nightly or hypothesis"
    marks = {n: others if part["layer"] == "test" else everything for n, part in parts.items()}
    return run_parts({name: marks[name] for name in names or parts})


# -- what a change affects -----------------------------------------------------------


def changed_files(base: str | None) -> list[str] | None:
    """The files that differ from a commit, uncommitted ones too; None if it is not known."""
    is_asked = base is not None
    base = base or _default_base()
    try:
        fork = _git("merge-base", base, "HEAD").strip()
        listed = _git("diff", "--name-only", fork) + _git("ls-files", "-o", "--exclude-standard")
    except subprocess.CalledProcessError:
        if is_asked:
            sys.exit(
                f"git does not know {base!r}. Name a commit or a branch: make affected BASE=main"
            )
        return None  # A shallow clone may lack the default one.
    return sorted(set(listed.splitlines()))


def _default_base() -> str:
    """The commit in .ci/base."""
    return (ROOT / ".ci" / "base").read_text().split()[0]


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def affected(files: list[str] | None, parts: dict[str, Part]) -> list[str]:
    """The parts that a change of these files can break; all of them if the change is not known."""
    if files is None:
        return list(parts)
    return [
        name
        for name, part in parts.items()
        if any(fnmatch.fnmatch(file, pattern) for file in files for pattern in part["paths"])
    ]


def fitting(names: list[str], parts: dict[str, Part]) -> list[str]:
    """As many of them, in their order, as fit into the budget."""
    found, left = [], BUDGET_MINUTES
    for name in names:
        if parts[name]["minutes"] <= left:
            found.append(name)
            left -= parts[name]["minutes"]
    return found


def run_affected(base: str | None, *, only_list: bool) -> int:
    parts = read_parts()
    files = changed_files(base)
    names = affected(files, parts)
    chosen = fitting(names, parts)
    left_out = [name for name in names if name not in chosen]
    what = "an unknown change" if files is None else f"{len(files)} changed files"
    print(f"{what} can break: {', '.join(names) or 'none of the other tiers'}")
    if left_out:
        print(f"More than {BUDGET_MINUTES} minutes: `make nightly` runs {', '.join(left_out)}.")
    if only_list or not chosen:
        return 0
    marks = {name: "nightly" if parts[name].get("nightly") else "not nightly" for name in chosen}
    return run_parts(marks)


def known(names: list[str], those: Iterable[str]) -> list[str]:
    """These names; a wrong one ends the program, with the right ones."""
    for name in names:
        if name not in those:
            sys.exit(f"There are no tests of {name!r}. Choose from: {', '.join(those)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tiers = parser.add_subparsers(dest="tier", required=True)
    tiers.add_parser("quick")
    tiers.add_parser("test").add_argument("words", nargs="*")
    tiers.add_parser("frameworks").add_argument("names", nargs="*")
    tiers.add_parser("nightly").add_argument("names", nargs="*")
    of_change = tiers.add_parser("affected")
    of_change.add_argument("--base", help="compare with this commit")
    of_change.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.tier == "quick":
        return run_quick()
    if options.tier == "test":
        return run_test(options.words)
    if options.tier == "frameworks":
        return run_frameworks(known(options.names, FRAMEWORKS))
    if options.tier == "nightly":
        return run_nightly(known(options.names, read_parts()))
    return run_affected(options.base, only_list=options.list)


if __name__ == "__main__":
    sys.exit(main())
