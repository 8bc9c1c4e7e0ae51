"""Forks scripts from a process that has imported a framework, the one that it is started with.

Real processes and real signals; only the seconds that an import takes are saved. Nothing is
computed before a fork: TensorFlow and JAX would start threads, and a child has none of them.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

from tests.data.zygote import run_and_leave, serve

# What a life imports, sooner or later: by the name that the zygote is started with.
MODULES = {
    "nothing": (),
    "numpy": ("numpy.ma", "holdfast._numpy"),
    "torch": ("torch.utils.data", "holdfast.torch.loader", "holdfast._witness.torch_watch"),
    "lightning": (
        *("lightning.pytorch", "holdfast.lightning.callback"),
        *("holdfast.torch.loader", "holdfast._witness.torch_watch"),
    ),
    "transformers": (
        *("torch.utils.data", "holdfast.torch.loader", "holdfast._witness.torch_watch"),
        *("transformers.trainer", "holdfast.transformers.callback"),
    ),
    "jax": ("jax.numpy", "optax", "holdfast.jax"),
    "tensorflow": ("tensorflow", "keras", "holdfast.tensorflow", "holdfast.keras"),
}
OF_EACH = (
    "holdfast._run",
    "holdfast._custody.launch",
    "holdfast._save.snapshots",
    "holdfast._witness.run_eye",
    "holdfast._witness.arrive",
)


def import_all(framework: str) -> None:
    for name in (*MODULES[framework], *OF_EACH):
        importlib.import_module(name)
    if framework in ("torch", "lightning"):
        from tests.data.zygote import warm_up

        warm_up()


def become(argv: list[str], folder: str, environment: dict[str, str]) -> None:
    """Be the script, in a process that is as if it had been started with it."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).absolute().parent)
    if environment.get("HOLDFAST_ERRAND"):
        from holdfast._witness.arrive import arrive

        arrive()
    # As in a process of its own, the script is __main__, to the very end.
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = argv[0]
    code = compile(Path(argv[0]).read_text(), argv[0], "exec")
    run_and_leave(lambda: exec(code, main.__dict__))


if __name__ == "__main__":
    import_all(sys.argv[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any script
    request = serve()
    become(request["argv"], request["folder"], request["environment"])
