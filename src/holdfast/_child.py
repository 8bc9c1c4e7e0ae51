"""How a process of ours is started, so that it is this very package and lives through signals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Its life is tied to the trainer's or to a pipe; whoever wants to end it must mean it. It is deaf
# before it imports anything: on a busy machine that takes seconds.
_UNHEARD = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


def command(module: str, plan: dict[str, Any]) -> list[str]:
    """What starts `main` of one of our modules, which is given the plan as JSON."""
    package = str(Path(__file__).parents[1])
    program = (
        "import signal, sys\n"
        f"for name in {_UNHEARD!r}:\n"
        "    signal.signal(getattr(signal, name), signal.SIG_IGN)\n"
        f"place = {package!r}\n"
        # Not in front: the script may have modules that are named like ours or like others'.
        "at = [i for i, p in enumerate(sys.path) if p.endswith('site-packages')]\n"
        "sys.path.insert(at[0] if at else len(sys.path), place)\n"
        f"from {module} import main\n"
        "main(sys.argv[1])\n"
    )
    return [sys.executable, "-P", "-c", program, json.dumps(plan)]
