"""The spare process: it has imported the packages that the script uses, and waits to run it.

    python OPTIONS spare_process.py ORDERS ANSWERS MODULES [-m MODULE | SCRIPT] ARGS…

`holdfast run` starts it with the streams, the environment and the session of the next attempt. It
imports what the first process has imported from Python and from installed packages, as listed in
MODULES, and nothing of the script: its own modules could write files or start processes. It reports
on ANSWERS that it is ready, or why it cannot be used. After an order it runs the script. The end of
ORDERS means that there is no `holdfast run` any more.

Invariant: after the order this process is in the state of a fresh start that has imported these
packages: `__main__`, sys.argv, sys.path, the environment, atexit.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType, ModuleType, TracebackType

_GIVEN = 4  # words before those of the script: this file, two descriptors, a file of names
_OOM_SCORE = "/proc/self/oom_score_adj"
_GOES_FIRST = "1000"
# The driver, cuBLAS and torch.distributed read these when they are used.
_READ_LATE = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120  no pathlib: quicker at import
_WORK_SECONDS = 0.01  # of imports, then a pause


class SpareRefused(Exception):
    """The spare cannot be used."""


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
    environment = dict(os.environ)
    import builtins
    import contextlib
    import json
    import warnings

    score = ""
    with contextlib.suppress(OSError):
        with open(_OOM_SCORE) as file:  # noqa: PTH123  as above
            score = file.read()
        with open(_OOM_SCORE, "w") as file:  # noqa: PTH123  as above
            file.write(_GOES_FIRST)

    def answer(**values: object) -> None:
        os.write(int(answers), json.dumps(values).encode())

    for each in (orders, answers):
        os.set_inheritable(int(each), False)
    main_module = type(sys)("__main__")
    main_module.__dict__["__builtins__"] = builtins
    # Not every version of Python has these.
    for name, value in (("__annotations__", {}), ("__cached__", None)):
        if name in globals():
            main_module.__dict__[name] = value
    sys.modules["__main__"] = main_module
    if not module:
        _name_script(main_module)
    files = open_files()
    try:
        with warnings.catch_warnings():  # of the script: it gets them when it runs
            warnings.simplefilter("ignore")
            if not module:
                _compile(main_module)  # refused if it is no text of Python, such as a zip file
        with open(names, "rb") as listed:  # noqa: PTH123  as above
            import_packages(json.load(listed))
        if why := found_alive(files):
            raise SpareRefused(why)
    except BaseException as error:  # noqa: BLE001  after any error this process is of no use
        kind = "" if isinstance(error, SpareRefused) else f"{type(error).__name__}: "
        answer(refused=f"{kind}{error}")
        os._exit(0)
    stamps = package_stamps()
    answer(ready=_private_bytes())
    order = os.read(int(orders), 4096)
    if not order:
        os._exit(0)
    group = json.loads(order)["group"]
    if group is not None:
        os.setpgid(0, group)
    with contextlib.suppress(OSError), open(_OOM_SCORE, "w") as file:  # noqa: PTH123  as above
        file.write(score)
    for each in (orders, answers):
        os.close(int(each))
    if package_stamps() != stamps:
        # A package was updated meanwhile: what is imported from now on would not fit to what is.
        os.execve(sys.executable, sys.orig_argv, environment)
    _run(_name_module(module, main_module) if module else _compile(main_module), main_module)


def import_packages(listed: dict[str, Any]) -> None:
    """Import what the first process has imported, in its order, as far as it is installed.

    Refused if the script changes variables by itself: packages may have read them at their import.
    """
    import contextlib
    import importlib.util

    from holdfast._environment import variables

    end_pauses = _pause_at_imports()
    for name in listed["modules"]:
        top = name.partition(".")[0]
        path = listed["files"].get(top)
        if name in sys.modules or path is None or not is_installed(path):
            continue
        with contextlib.suppress(Exception):  # some are made by their package only
            # The script may have found another file of this name: it can change sys.path.
            found = None if top in sys.modules else importlib.util.find_spec(top)
            if top in sys.modules or (found is not None and found.origin == path):
                importlib.import_module(name)
    end_pauses()
    here = variables.changed_since_start()  # by the imports, too
    changed = {name for name, _ in here.items() ^ listed["environment"].items()}
    if set_here := ", ".join(sorted(changed.difference(_READ_LATE))):
        raise SpareRefused(f"the script sets {set_here}: set that before `holdfast run`")


def _pause_at_imports() -> Any:
    """Leave the processors to the training; returns what ends that.

    A higher nice value could not be lowered again, and native threads inherit it.
    """
    import time

    since: list[float] = [time.process_time()]

    def pause(event: str, _: object) -> None:
        if (
            event == "import"
            and since
            and (spent := time.process_time() - since[0]) > _WORK_SECONDS
        ):
            time.sleep(min(1.0, spent))
            since[0] = time.process_time()

    sys.addaudithook(pause)  # cannot be removed
    return since.clear


def is_installed(path: str) -> bool:
    """Whether a file belongs to Python or to an installed package, and not to the script."""
    here = __file__.rpartition("_supervise")[0]
    inside = path.startswith((_STANDARD, here)) and "/site-packages/" not in path
    return inside or "/site-packages/" in path or "/dist-packages/" in path


def package_stamps() -> dict[str, int]:
    """When one file of each package that is imported was changed."""
    found: dict[str, int] = {}
    for name, each in list(sys.modules.items()):
        path = getattr(each, "__file__", None)
        if "." not in name and isinstance(path, str):
            try:
                found[path] = os.stat(path).st_ctime_ns  # noqa: PTH116  as above
            except OSError:
                continue  # it has no file, or none any more
    return found


def found_alive(before: dict[int, str]) -> str:
    """What the imports have left running or open, in words; empty if nothing."""
    import contextlib

    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        names = [each.name for each in threading.enumerate()[1:]]
        return f"a thread is left running by the imports ({', '.join(names)})"
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "a process is left running by the imports"
    for number, name in open_files().items():
        if before.get(number) != name and (name.startswith("socket:") or _is_written(number)):
            return f"{name} is left open by the imports"
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "the imports have initialized CUDA"
    jax = sys.modules.get("jax._src.xla_bridge")
    if jax is not None and getattr(jax, "_backends", None):
        return "the imports have initialized the devices of JAX"
    return ""


def open_files() -> dict[int, str]:
    """What each descriptor is open on."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  as above
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115  as above
        except OSError:
            continue  # that of this listing
    return found


def _is_written(number: int) -> bool:
    import fcntl
    import stat

    try:
        status = os.fstat(number)
        mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and mode != os.O_RDONLY and status.st_nlink > 0


def _private_bytes() -> int:
    """What the system would get back if this process ended."""
    try:
        with open("/proc/self/smaps_rollup") as file:  # noqa: PTH123  as above
            lines = [line.split() for line in file]
    except OSError:  # not every system tells
        return 0
    private = ("Private_Clean:", "Private_Dirty:", "Swap:")
    return sum(int(words[1]) for words in lines if words[0] in private) * 1024


def _name_script(main_module: ModuleType) -> None:
    """Give `__main__` the names that the interpreter gives to that of a script."""
    from importlib.machinery import SourceFileLoader

    path = sys.argv[0]
    if not os.path.isabs(path):  # noqa: PTH117  as above
        path = os.path.join(os.getcwd(), path.removeprefix("./"))  # noqa: PTH109, PTH118
    loader = SourceFileLoader("__main__", path)
    main_module.__dict__.update(__file__=path, __loader__=loader)


def _compile(main_module: ModuleType) -> CodeType:
    path = str(main_module.__file__)
    with open(path, "rb") as file:  # noqa: PTH123  as above
        code: CodeType = compile(file.read(), path, "exec", dont_inherit=True)
    return code


def _name_module(name: str, main_module: ModuleType) -> CodeType:
    """As `python -m` does; also for a package that has a `__main__`, or a module without source."""
    import runpy

    code: CodeType
    _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]  # private
    sys.argv[0] = spec.origin
    main_module.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return code


def _run(code: CodeType, main_module: ModuleType) -> None:
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        """Let the traceback of the error that ends the script begin with the script."""
        sys.excepthook = hook
        found = trace
        while found is not None and found.tb_frame.f_code is not code:
            found = found.tb_next
        value.__traceback__ = found or trace
        hook(kind, value, found or trace)

    try:
        exec(code, main_module.__dict__)
    except SystemExit:
        raise
    except BaseException:
        hook, sys.excepthook = sys.excepthook, show  # the script may have set its own
        raise


if __name__ == "__main__":
    _THIS = sys.modules["__main__"]  # kept: its functions run on when another has its name
    main()
