"""Commands that start torch's launcher, which numbers its ranks itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

# Also in a word that is a whole command, as in: bash -c "torchrun train.py"
_LAUNCHER = re.compile(
    r"(?:^|[\s/;&|])(?:torchrun|-m[\s=]*torch\.distributed\.(?:run|launch))(?=$|[\s;&|])"
)
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_MEETING = re.compile(
    r"(?:^|\s)--?(?:standalone|rdzv[-_](?:endpoint|backend)|"
    r"master[-_](?:addr|port))(?=$|[\s=])"
)


def starts_torchrun(command: Sequence[str]) -> bool:
    """Whether the command starts torchrun, directly or in a container or shell.

    >>> starts_torchrun(["apptainer", "exec", "image.sif", "torchrun", "train.py"])
    True
    >>> starts_torchrun(["python", "-m", "torch.distributed.run", "train.py"])
    True
    >>> starts_torchrun(["python", "train.py"])
    False
    """
    pairs = itertools.pairwise(command)
    if any(first == "-m" and second in _MODULES for first, second in pairs):
        return True
    return any(_LAUNCHER.search(word) for word in command)


def says_where_to_meet(command: Sequence[str]) -> bool:
    """Whether the person has chosen how the launchers of several nodes find each other.

    >>> says_where_to_meet(["torchrun", "--nnodes=2", "--rdzv-backend=c10d", "train.py"])
    True
    """
    return any(_MEETING.search(word) for word in command)
