"""Commands where packages are not installed: one process that cannot import them, for all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cli.command import environment

_ROOT = Path(__file__).parents[2]
# None in sys.modules is an import that fails.
_PROGRAM = """
import json, sys
hidden, commands = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(hidden))
from tests.cli.command import holdfast
done = [holdfast(*words) for words in commands]
print(json.dumps([[each.returncode, each.stdout, each.stderr] for each in done]))
"""


def holdfast_without(
    packages: Sequence[str], commands: Sequence[Sequence[Any]]
) -> list[subprocess.CompletedProcess[str]]:
    """How each of these commands ends where none of these packages is installed."""
    wanted = [[str(word) for word in words] for words in commands]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps([list(packages), wanted]),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(PYTHONPATH=str(_ROOT), JAX_PLATFORMS="cpu"),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found = json.loads(done.stdout)
    return [
        subprocess.CompletedProcess(words, *ended)
        for words, ended in zip(wanted, found, strict=True)
    ]
