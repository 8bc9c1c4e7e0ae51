"""Prints what NVIDIA's library says of driver and GPUs.

A program of its own, see `doctor_question`:

python -I -S tell_gpus.py
"""

import ctypes
import json
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_UNCORRECTED = 1
_SINCE_REBOOT = 0


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def look() -> dict[str, Any]:
    """{"library", "driver", "cuda", "gpus": [{"index", "name", "used", "total", …}], "error"}."""
    found: dict[str, Any] = {"library": False, "driver": None, "cuda": None, "gpus": []}
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return found
    found["library"] = True
    status = library.nvmlInit_v2()
    if status:
        library.nvmlErrorString.restype = ctypes.c_char_p
        found["error"] = (library.nvmlErrorString(status) or b"").decode(errors="replace")
        return found
    text = ctypes.create_string_buffer(96)
    if not library.nvmlSystemGetDriverVersion(text, 96):
        found["driver"] = text.value.decode(errors="replace")
    number = ctypes.c_int()
    if not library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)):
        found["cuda"] = [number.value // 1000, number.value % 1000 // 10]
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found["gpus"] = [_gpu(library, index) for index in range(count.value)]
    return found


def _gpu(library: Any, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "name": "", "used": None, "total": None, "ecc": None}
    device = ctypes.c_void_p()
    status = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    if status:
        library.nvmlErrorString.restype = ctypes.c_char_p
        found["error"] = (library.nvmlErrorString(status) or b"").decode(errors="replace")
        return found
    text = ctypes.create_string_buffer(96)
    if not library.nvmlDeviceGetName(device, text, 96):
        found["name"] = text.value.decode(errors="replace")
    memory = _Memory()
    if not library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        found["used"], found["total"] = memory.used, memory.total
    errors = ctypes.c_ulonglong()
    ask = library.nvmlDeviceGetTotalEccErrors
    if not ask(device, _UNCORRECTED, _SINCE_REBOOT, ctypes.byref(errors)):
        found["ecc"] = errors.value
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(look()))
    except AttributeError:  # an older library
        print('{"library": true, "driver": null, "cuda": null, "gpus": [], "error": "too old"}')
