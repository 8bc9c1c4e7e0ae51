"""A job of several ranks that one process forks, for `holdfast run` to lead: PLAN as JSON."""

from __future__ import annotations

import json
import os
import sys

from tests.ranks import train

if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    # Each life meets anew: what the last one has left there would lead astray.
    plan["store"] += os.environ["HOLDFAST_RESTART"]
    train.spawn(plan)
