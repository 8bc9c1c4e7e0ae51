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
import sys
from importlib.machinery import SourceFileLoader
from pathlib import PurePath
from types import CodeType, ModuleType, TracebackType
from typing import Any

from holdfast._environment import variables
from holdfast._supervise.spare.effects import SpareRefused, is_installed, signature

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
