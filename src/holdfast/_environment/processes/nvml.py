"""A program that prints the memory of the GPUs, by NVIDIA's library; see `gpu.py`.

    python -I -S nvml.py PID…

One line of JSON, for each GPU: [index, used, total, used by the given processes, percent of the
time in which it was busy, watts, degrees Celsius]; null where the driver does not know.
It imports nothing of holdfast, so it starts fast.
"""

import ctypes
import json
import sys
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE
_NOT_TOLD = 2**64 - 1
_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _GpuProcess(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def read(pids: set[int]) -> list[list[int | None]]:
    library = ctypes.CDLL(_LIBRARY)
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    found: list[list[int | None]] = []
    for index in range(count.value):
        device, memory = ctypes.c_void_p(), _Memory()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            continue
        if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            continue
        held = [each.used for each in _running(library, device) if each.pid in pids]
        # A container may have other pids than the driver.
        mine = sum(held) if held and _NOT_TOLD not in held else None
        found.append([index, memory.used, memory.total, mine, *_figures(library, device)])
    return found


def _figures(library: Any, device: ctypes.c_void_p) -> list[int | None]:
    busy, milliwatts, celsius = _Utilization(), ctypes.c_uint(), ctypes.c_uint()
    is_known = not library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy))
    has_power = not library.nvmlDeviceGetPowerUsage(device, ctypes.byref(milliwatts))
    has_heat = not library.nvmlDeviceGetTemperature(device, _GPU_SENSOR, ctypes.byref(celsius))
    return [
        busy.gpu if is_known else None,
        round(milliwatts.value / 1000) if has_power else None,
        celsius.value if has_heat else None,
    ]


def _running(library: Any, device: ctypes.c_void_p) -> list[_GpuProcess]:
    for most in (64, 1024):
        count, found = ctypes.c_uint(most), (_GpuProcess * most)()
        ask = library.nvmlDeviceGetComputeRunningProcesses_v3
        status = ask(device, ctypes.byref(count), found)
        if status == 0:
            return list(found[: count.value])
        if status != _TOO_SMALL:
            break
    return []


if __name__ == "__main__":
    try:
        print(json.dumps(read({int(word) for word in sys.argv[1:]})))
    except (OSError, AttributeError):  # no such library, or too old a one
        print("null")
