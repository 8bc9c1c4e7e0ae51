"""The spare process: it has run the leading statements of the script, and waits to run the rest.

    python OPTIONS spare_process.py ORDERS ANSWERS MODULES [-m MODULE | SCRIPT] ARGS…

`holdfast run` starts it with the streams, the environment and the session of the next attempt.
It runs the script's leading statements (see spare_program.py). Then it imports the modules that the
first process has imported later from packages that are here by now, such as torch._dynamo; with an
empty MODULES it does not. It reports on ANSWERS what it takes, or why it cannot be used, and waits
for an order. After the order the script goes on in it. The end of ORDERS means that there is no
`holdfast run` any more.

Invariant: after the order this process is in the state of a fresh start that has come as far:
`__main__`, sys.argv, sys.path, the environment, warnings, atexit. So the leading statements are
run in the `__main__` that the rest gets.
"""

from __future__ import annotations

import os
import sys

_GIVEN = 4  # words before those of the script: this file, two descriptors, a file of names
_OOM_SCORE = "/proc/self/oom_score_adj"
_GOES_FIRST = "1000"


def _take_place() -> tuple[str, ...]:
    """Make sys.argv and sys.path those of the script; before any other import, since the folder of
    this file is in sys.path now."""
    given, target = tuple(sys.argv[:_GIVEN]), sys.argv[_GIVEN:]
    before = len(sys.orig_argv) - len(sys.argv)
    sys.orig_argv[before : before + _GIVEN] = []
    is_module = target[0] == "-m"
    sys.argv[:] = ["-m", *target[2:]] if is_module else target
    if not sys.flags.safe_path:  # before pathlib can be imported
        sys.path_importer_cache.pop(sys.path[0], None)
        real = os.path.realpath(target[0])
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(real)  # noqa: PTH109, PTH120
    return (*given[1:], target[1] if is_module else "")


def main() -> None:
    orders, answers, names, module = _take_place()
    import builtins
    import contextlib
    import json

    from holdfast._supervise import spare_program as spare

    score = ""
    with contextlib.suppress(OSError):
        with open(_OOM_SCORE) as file:  # noqa: PTH123  no pathlib: quicker at import
            score = file.read()
        with open(_OOM_SCORE, "w") as file:  # noqa: PTH123  no pathlib: quicker at import
            file.write(_GOES_FIRST)

    def answer(**values: object) -> None:
        os.write(int(answers), (json.dumps(values) + "\n").encode())

    for each in (orders, answers):
        os.set_inheritable(int(each), False)
    main_module = type(sys)("__main__")
    main_module.__dict__["__builtins__"] = builtins
    # Not every version of Python has these.
    for name, value in (("__annotations__", {}), ("__cached__", None)):
        if name in globals():
            main_module.__dict__[name] = value
    sys.modules["__main__"] = main_module
    sys.modules["holdfast._supervise.spare_process"] = _THIS
    files, audit = spare.open_files(), spare.ImportAudit()
    try:
        program = spare.Program(module, main_module)
        program.run_leading()
        if why := audit.why or spare.found_alive(files):
            raise spare.SpareRefused(why)
        later = ""
        if names:
            sets = program.import_later(names)
            later = f"the script sets {sets} after its imports" if sets else ""
            later = later or spare.found_alive(files)
        program.add_files(audit.files)
    except BaseException as error:  # noqa: BLE001  after any error this process is of no use
        kind = "" if isinstance(error, spare.SpareRefused) else f"{type(error).__name__}: "
        answer(refused=audit.why or f"{kind}{error}")
        os._exit(0)
    if later:
        answer(later=later)
        os._exit(0)
    answer(ready=_private_bytes(), note=program.note)
    order = os.read(int(orders), 4096)
    if not order:
        os._exit(0)
    wanted = json.loads(order)
    if changed := program.find_changed(audit.files):
        answer(refused=f"{changed} has changed since it was imported")
        os._exit(0)
    audit.close()
    if wanted["group"] is not None:
        os.setpgid(0, wanted["group"])
    with contextlib.suppress(OSError), open(_OOM_SCORE, "w") as file:  # noqa: PTH123  no pathlib yet
        file.write(score)
    answer(taken=True)
    for each in (orders, answers):
        os.close(int(each))
    program.run_rest()


def _private_bytes() -> int:
    """What the system would get back if this process ended."""
    try:
        with open("/proc/self/smaps_rollup") as file:  # noqa: PTH123  no pathlib: quicker at import
            lines = [line.split() for line in file]
    except OSError:  # not every system tells
        return 0
    private = ("Private_Clean:", "Private_Dirty:", "Swap:")
    return sum(int(words[1]) for words in lines if words[0] in private) * 1024


if __name__ == "__main__":
    _THIS = sys.modules["__main__"]  # kept: its functions run on when another has its name
    main()
