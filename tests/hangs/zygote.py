"""Forks hangs from a process that has imported torch already."""

from __future__ import annotations

import os

from tests.data.zygote import run_and_leave, serve, warm_up

if __name__ == "__main__":
    import torch.distributed
    import torch.nn.parallel.distributed  # noqa: F401  what a run looks at if it is there

    import holdfast._custody.joining
    import holdfast._data.loader_feed
    import holdfast.torch.group  # noqa: F401
    from tests.hangs.scripts import hanging_ranks, hanging_torch

    warm_up()
    request = serve()
    os.environ.update(request["environment"])
    script = hanging_ranks if request["script"] == "hanging_ranks.py" else hanging_torch
    run_and_leave(lambda: script.main(request["argv"]))
