"""A process to be looked at by py-spy: a program of its own, see `doctor_question`.

It lets itself be traced as a run of holdfast lets its keeper, says that it is ready, and sleeps.
"""

import contextlib
import ctypes
import time

_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)


def stand_still_for_doctor(seconds: float) -> None:
    """The name is what the dump is searched for."""
    time.sleep(seconds)


if __name__ == "__main__":
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
    print('{"ready": true}', flush=True)
    stand_still_for_doctor(10.0)
