"""Forks scripts that are to be proven from a process that has imported torch already.

Real processes and real signals; only the seconds that an import takes are saved.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

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
    # As in a process of its own, the script is __main__, to the very end.
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = sys.argv[0]
    code = compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec")
    run_and_leave(lambda: exec(code, main.__dict__))
