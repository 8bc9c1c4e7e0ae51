"""Forks trainings from a process that has imported TensorFlow, and has computed nothing yet."""

from __future__ import annotations

import json
import os
import signal

from tests.data.zygote import run_and_leave, serve

if __name__ == "__main__":
    # Whatever would be imported only now, in every life anew.
    import holdfast._custody.joining
    import holdfast._custody.launch
    import holdfast._data.tensorflow_feed
    import holdfast._run
    import holdfast._save.snapshots
    import holdfast.keras  # noqa: F401
    from tests.ranks import tf_train

    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any script
    request = serve()
    os.environ.update(request["environment"])
    run_and_leave(lambda: tf_train.main(json.loads(request["argv"][0])))
