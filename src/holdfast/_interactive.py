"""Whether the interpreter outlives the run: a notebook, IPython, `python -i`.

There an exception ends the cell and not the process, so nothing of ours may end
the process either: with the kernel would go everything else that a person has in it.
"""

from __future__ import annotations

import sys
import threading


def is_interactive() -> bool:
    """Whether somebody sits at a prompt or a notebook, and goes on after an exception."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)  # IPython and its kernel set ps1 too


def ends_a_cell() -> bool:
    """Whether an exception raised here comes out at a prompt; in a thread it would not."""
    return is_interactive() and threading.current_thread() is threading.main_thread()
