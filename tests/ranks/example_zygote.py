"""Forks ranks that run an example, from a process that has imported torch already.

As if somebody had started each of them by hand, with what torch asks for in its environment.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.data.zygote import run_and_leave, serve, warm_up

if __name__ == "__main__":
    import torch.distributed
    import torch.nn.parallel.distributed  # noqa: F401

    import holdfast._custody.joining
    import holdfast._data.loader_feed
    import holdfast.torch.launch  # noqa: F401

    warm_up()
    request = serve()
    os.environ.update(request["environment"])
    sys.argv = request["argv"]
    run_and_leave(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
