"""The leading statements of a script: those that a spare may run before it is needed.

They end at the first statement that is not in this list:

* imports, also in `try:` with what is done without them, and under `if TYPE_CHECKING:`;
* names for constants, and strings;
* values for `os.environ`, entries for `sys.path`, filters for `warnings`.

None of these depends on when it runs, and none leaves a trace outside of the process. A process
that has run them is in the state of a fresh start that has come as far.
"""

from __future__ import annotations

import ast

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
