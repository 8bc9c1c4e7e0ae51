"""The script or module of a command, run in two parts in one `__main__`."""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import json
import os
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from holdfast._environment import variables
from holdfast._supervise.spare.effects import SpareRefused, is_installed, signature
from holdfast._supervise.spare.leading import count_leading, later_import

_FUTURES = {name: getattr(__future__, name).compiler_flag for name in __future__.all_feature_names}
# The driver, cuBLAS and torch.distributed read these when they are used.
_READ_LATE = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"),
    *("MASTER_ADDR", "MASTER_PORT"),
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
        self._note = ""
        if later is not None:
            self._note = (
                f"{os.path.basename(self._path)}, line {rest[0].lineno}, comes before the import "  # noqa: PTH119
                f"in line {later.lineno}: the spare has only the imports above it"
            )

    def run_leading(self) -> None:
        exec(self._leading, self._main.__dict__)

    @property
    def note(self) -> str:
        """What the user should know of a spare that is ready; mostly empty."""
        return self._note

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

        _, spec, _ = runpy._get_module_details(name)  # type: ignore[attr-defined]
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
