"""The script or module of a command, run in two parts in one `__main__`.

A spare may run the leading statements of a script before it is needed. They end at the first
statement that is not in this list:

* imports, also in `try:` with what is done without them, and under `if TYPE_CHECKING:`;
* names for constants, and strings;
* values for `os.environ`, entries for `sys.path`, filters for `warnings`.

None of these depends on when it runs, and none leaves a trace outside of the process. A process
that has run them is in the state of a fresh start that has come as far.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import json
import os
import stat
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import PurePath
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

from holdfast._environment import variables

_FUTURES = {name: getattr(__future__, name).compiler_flag for name in __future__.all_feature_names}
# The driver, cuBLAS and torch.distributed read these when they are used.
_READ_LATE = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_CALLS = (
    *("os.environ.setdefault", "sys.path.append", "sys.path.insert"),
    *("warnings.filterwarnings", "warnings.simplefilter"),
)
_PATH_CALLS = ("str", "Path", "pathlib.Path", "os.fspath", "os.getcwd", "Path.cwd")
_PATH_METHODS = ("absolute", "as_posix", "joinpath", "resolve")
_PLAIN = (
    *(ast.Attribute, ast.BinOp, ast.Constant, ast.Name, ast.Subscript, ast.UnaryOp, ast.keyword),
    *(ast.expr_context, ast.operator, ast.unaryop),
)
_Files = dict[str, tuple[int, ...] | None]


class Program:
    """Runs the leading statements, and later the rest, as the interpreter would run the whole."""

    def __init__(self, module: str, main: ModuleType) -> None:
        """`module` is the name after `-m`, or empty; sys.argv and sys.path are set."""
        self._main = main
        if module:
            self._path = self._find_module(module)
        else:
            self._path = _absolute(sys.argv[0])
            loader = SourceFileLoader("__main__", self._path)
            main.__dict__.update(__file__=self._path, __loader__=loader)
        self._signature = signature(self._path)
        with open(self._path, "rb") as file:  # noqa: PTH123  no pathlib before the script's
            source = file.read()
        try:
            tree = ast.parse(source, self._path)
        except (SyntaxError, ValueError):
            raise SpareRefused(f"{self._path} is no text of Python") from None
        count = count_leading(tree.body)
        leading, rest = tree.body[:count], tree.body[count:]
        flags = 0
        for each in leading:
            if isinstance(each, ast.ImportFrom) and each.module == "__future__":
                for alias in each.names:
                    flags |= _FUTURES.get(alias.name, 0)
        self._leading = self._compile(leading, flags)
        # A string at the top of the rest is not the docstring of the script.
        place = {"lineno": 1, "col_offset": 0, "end_lineno": 1, "end_col_offset": 0}
        self._rest = self._compile([ast.Pass(**place), *rest], flags)
        later = later_import(tree.body)
        self.note = ""  # what the user should know of a spare that is ready
        if later is not None:
            self.note = (
                f"{PurePath(self._path).name}, line {rest[0].lineno}, comes before the import "
                f"in line {later.lineno}: the spare has only the imports above it"
            )

    def run_leading(self) -> None:
        exec(self._leading, self._main.__dict__)

    def import_later(self, names: str) -> str:
        """Import what the first process has imported from installed packages that are here by now.

        `names` is the file in which it has listed them. These modules may read the environment. So
        the variables that the script has set by itself are returned: with them it does not know
        what the modules would have read, and this spare cannot be used.
        """
        with open(names, "rb") as file:  # noqa: PTH123  as above
            listed: dict[str, Any] = json.load(file)
        for name in listed["modules"]:
            package = sys.modules.get(name.partition(".")[0])
            path = getattr(package, "__file__", None)
            if name not in sys.modules and path is not None and is_installed(path):
                with contextlib.suppress(Exception):  # some are made by their package only
                    importlib.import_module(name)
        here = variables.changed_since_start()  # by the imports, too
        changed = {name for name, _ in here.items() ^ listed["environment"].items()}
        return ", ".join(sorted(changed.difference(_READ_LATE)))

    def add_files(self, files: _Files) -> None:
        """Add the sources of the script's modules, and one file of each package."""
        files[self._path] = self._signature
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and ("." not in name or not is_installed(path)):
                files.setdefault(path, signature(path))

    @staticmethod
    def find_changed(files: _Files) -> str:
        """A file that is not as it was when it was read; empty if there is none."""
        return next((path for path, known in files.items() if signature(path) != known), "")

    def run_rest(self) -> None:
        try:
            exec(self._rest, self._main.__dict__)
        except SystemExit:
            raise
        except BaseException:
            _show_from(self._rest)
            raise

    def _find_module(self, name: str) -> str:
        """As `python -m` does; also for a package that has a `__main__`."""
        import runpy

        _, spec, _ = runpy._get_module_details(name)  # type: ignore[attr-defined]  # private
        if spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            raise SpareRefused(f"the module {name} has no source file")
        sys.argv[0] = spec.origin
        self._main.__dict__.update(
            __file__=spec.origin,
            __cached__=spec.cached,
            __loader__=spec.loader,
            __package__=spec.parent,
            __spec__=spec,
        )
        return str(spec.origin)

    def _compile(self, body: list[ast.stmt], flags: int) -> CodeType:
        module = ast.Module(body, type_ignores=[])
        code: CodeType = compile(module, self._path, "exec", flags, dont_inherit=True)
        return code


def _absolute(script: str) -> str:
    """The path that the interpreter gives to `__file__`."""
    if os.path.isabs(script):  # noqa: PTH117  as above
        return script
    return os.path.join(os.getcwd(), script.removeprefix("./"))  # noqa: PTH109, PTH118  as above


def _show_from(code: CodeType) -> None:
    """Let the traceback of the error that ends the script begin with the script."""
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        found = trace
        while found is not None and found.tb_frame.f_code is not code:
            found = found.tb_next
        value.__traceback__ = found or trace
        hook(kind, value, found or trace)

    sys.excepthook = show


def count_leading(body: list[ast.stmt]) -> int:
    """How many statements from the top a spare may run."""
    return next((n for n, each in enumerate(body) if not _is_leading(each)), len(body))


def later_import(body: list[ast.stmt]) -> ast.stmt | None:
    """The first import at the top level that is not among the leading statements."""
    rest = body[count_leading(body) :]
    return next((each for each in rest if isinstance(each, ast.Import | ast.ImportFrom)), None)


def _is_leading(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=function, args=arguments, keywords=keywords)):
            return _dotted(function) in _CALLS and all(map(_is_plain, [*arguments, *keywords]))
        case ast.Assign(targets=[ast.Subscript(value=place, slice=ast.Constant())], value=value):
            return _dotted(place) == "os.environ" and _is_plain(value)
        case ast.Assign(targets=targets, value=ast.Constant()):
            return all(isinstance(each, ast.Name) for each in targets)
        case ast.If(test=test, orelse=orelse):
            # Its own body is not run.
            is_for_types = _dotted(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            return is_for_types and all(map(_is_leading, orelse))
        case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
            inner = [*body, *orelse, *finalbody, *(s for each in handlers for s in each.body)]
            return all(map(_is_leading, inner))
    return False


def _is_plain(value: ast.AST) -> bool:
    """Whether a value is made of constants, names and paths only."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _PATH_METHODS
            if not (name in _PATH_CALLS or name.startswith("os.path.") or is_method):
                return False
        elif not isinstance(node, _PLAIN):
            return False
    return True


def _dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


# -- what the modules do outside of their own process while they are imported ---------------------
# A module that writes a file, starts a process or connects at its import would do so in the spare,
# which may never be used. Python's audit events are raised before the act: the first act of this
# kind is refused, and with it the spare. So the act never happens here.
#
# Installed packages may do so. They have done the same in the first process, for caches of their
# own mostly, and their code is not the script's. Whatever still runs or is open after the imports
# is found by `found_alive`, independent of what started it.


_ACTS = {
    **dict.fromkeys(
        ("_thread.start_joinable_thread", "_thread.start_new_thread"), "starts a thread"
    ),
    **dict.fromkeys(("os.exec", "os.system", "subprocess.Popen"), "starts a program"),
    **dict.fromkeys(("os.fork", "os.forkpty", "os.posix_spawn"), "starts a process"),
    **dict.fromkeys(("os.kill", "os.killpg"), "sends a signal"),
    **dict.fromkeys(("os.chmod", "os.truncate", "os.utime"), "changes a file"),
    **{"os.link": "makes a file", "os.remove": "removes a file", "os.rename": "moves a file"},
    **{"os.mkdir": "makes a folder", "os.rmdir": "removes a folder", "os.symlink": "makes a link"},
    **dict.fromkeys(("socket.sendmsg", "socket.sendto"), "sends to another process"),
    "socket.bind": "listens on a socket",
    "socket.connect": "connects to another process",
    "builtins.input": "asks for input",
    "os.chdir": "changes the working folder",
}
_READS = ("os.listdir", "os.scandir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_IMPORTING = "<frozen importlib"
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120  no pathlib before the script's
_HERE = __file__.rpartition("_supervise")[0]
_WORK_SECONDS = 0.01  # of imports, then a pause
_PAUSE_RATIO = 1.0


class SpareRefused(BaseException):
    """The spare cannot be used. Not an Exception: the module may catch those."""


class ImportAudit:
    """Watches the imports of a spare; `close` before the script goes on."""

    def __init__(self) -> None:
        self.why = ""  # it was refused, even if the module has caught that
        self.files: dict[str, tuple[int, ...] | None] = {}  # that the script's modules have read
        self._is_open = True
        self._paused_at = time.process_time()
        sys.addaudithook(self._observe)  # cannot be removed

    def close(self) -> None:
        self._is_open = False

    def _observe(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_open:
            return
        if event == "import":
            self._pause()
        elif event == "open":
            self._observe_open(*arguments)
        elif event in _ACTS and (frame := _responsible()) is not None:
            self._refuse(frame, _ACTS[event])
        elif event in _READS and _responsible() is not None:
            self._add_file(arguments[0])

    def _observe_open(self, path: object, mode: object, flags: object) -> None:
        writes = isinstance(flags, int) and bool(flags & _WRITING)
        if path == os.devnull or (frame := _responsible()) is None:
            return
        if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
            self._refuse(frame, f"writes to {path}")
        self._add_file(path)

    def _add_file(self, path: object) -> None:
        if isinstance(path, str | os.PathLike):
            name = os.path.abspath(path)  # noqa: PTH100  as above
            self.files.setdefault(name, signature(name))

    def _refuse(self, frame: FrameType, act: str) -> None:
        place = os.path.basename(frame.f_code.co_filename)  # noqa: PTH119  as above
        self.why = self.why or f"{place}, line {frame.f_lineno}, {act} while it is imported"
        raise SpareRefused(self.why)

    def _pause(self) -> None:
        """Leave the processors to the training.

        A higher nice value could not be lowered again, and native threads inherit it.
        """
        spent = time.process_time() - self._paused_at
        if spent > _WORK_SECONDS:
            time.sleep(min(1.0, spent * _PAUSE_RATIO))
            self._paused_at = time.process_time()


def is_installed(path: str) -> bool:
    """Whether a file belongs to Python or to an installed package, and not to the script."""
    inside = path.startswith((_STANDARD, _HERE)) and "/site-packages/" not in path
    return inside or "/site-packages/" in path or "/dist-packages/" in path


def signature(path: str) -> tuple[int, ...] | None:
    """Changes with the content of a file or folder; None if it is not there, or no such."""
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(path)  # noqa: PTH116  as above
        if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
            return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
    return None


def found_alive(before: dict[int, str]) -> str:
    """What the imports have left running or open, in words; empty if nothing."""
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
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115  as above
    return found


def _is_written(number: int) -> bool:
    import fcntl

    with contextlib.suppress(OSError):
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
        return is_file and mode != os.O_RDONLY and os.fstat(number).st_nlink > 0
    return False


def _responsible() -> FrameType | None:
    """The frame of the script's own module that acts; None if an installed package does so while
    it is imported itself."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_IMPORTING):
            return None
        if not name.startswith("<") and not is_installed(name):
            return frame
        frame = frame.f_back
    return None
