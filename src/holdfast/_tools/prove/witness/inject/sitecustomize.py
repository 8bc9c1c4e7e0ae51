"""Found by Python at its start where a proof has put this folder on PYTHONPATH."""

import os
import sys


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib is slow here
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]  # noqa: PTH100
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  the one that would have been found without ours
    except ImportError:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
    if not os.environ.get("HOLDFAST_ERRAND"):
        return
    try:
        from holdfast._tools.prove.witness.bootstrap import bootstrap
    except ImportError:  # another environment: the proof then reports that it observed nothing
        return
    bootstrap()


_begin()
