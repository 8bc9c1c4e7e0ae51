"""Forks scripts that are to be proven from a process that has imported torch already.

Real processes and real signals; only the seconds that an import takes are saved.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.data.zygote import run_and_leave, serve, warm_up

if __name__ == "__main__":
    import torch

    # Whatever would be imported only now, in every child anew.
    import holdfast._witness.run_eye
    import holdfast._witness.torch_watch  # noqa: F401
    from holdfast._witness.arrive import arrive

    warm_up()
    torch.utils.data.DataLoader([0])
    request = serve()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
    arrive()
    run_and_leave(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
