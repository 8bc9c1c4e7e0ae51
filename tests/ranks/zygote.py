"""Forks ranks from a process that has imported torch already: a job of two starts in no time.

Nobody launches them: they meet through torch's process group, or know each other only by RANK and
WORLD_SIZE. Or one child does, by torch.multiprocessing.
"""

from __future__ import annotations

import json
import os

from tests.data.zygote import run_and_leave, serve, warm_up

if __name__ == "__main__":
    import torch.distributed
    import torch.nn.parallel.distributed  # noqa: F401  what a run looks at if it is there

    # Whatever would be imported only now, in every rank anew.
    import holdfast._custody.joining
    import holdfast._data.loader_feed
    import holdfast.torch.group  # noqa: F401
    from tests.ranks import train

    warm_up()
    request = serve()
    os.environ.update(request["environment"])
    plan = json.loads(request["argv"][0])
    run_and_leave(lambda: train.spawn(plan) if "outputs" in plan else train.main(plan))
