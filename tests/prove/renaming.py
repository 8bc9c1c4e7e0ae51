"""Scripts without meaning: every name of a script's own becomes n1, n2, …

A proof may look at what a script does, never at what its author calls things. So each script is
tried a second time under names that say nothing, and must be found out just the same.
"""

from __future__ import annotations

import ast
import builtins
import pathlib
import re
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

_LIBRARY_TYPES = (
    torch.Tensor,
    torch.Generator,
    torch.nn.Module,
    torch.nn.Sequential,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.swa_utils.AveragedModel,
    torch.amp.GradScaler,
    DataLoader,
    Dataset,
    Sampler,
    pathlib.Path,
    bytes,
    dict,
    list,
    set,
    str,
    tuple,
)
# What a library reads by name, so that another name would break the script.
_LIBRARY_ATTRIBUTES = {name for kind in _LIBRARY_TYPES for name in dir(kind)}
_LIBRARY_ATTRIBUTES |= {"batch_sampler", "dataset", "module", "param_groups", "sampler", "training"}
_LIBRARY_KEYS = {
    *("params", "lr", "initial_lr", "momentum", "weight_decay", "betas", "state", "param_groups"),
    *("exp_avg", "exp_avg_sq", "momentum_buffer", "last_epoch", "scale", "_growth_tracker"),
}
_SUFFIX = re.compile(r"\.(bin|ckpt|json|new|npz|part|pt|pth|tmp|txt)$")
_IS_FILE = re.compile(r"[\w./*-]*\.\w+")
_WORD = re.compile(r"[A-Za-z_]\w*")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def rename(source: str) -> str:
    """The script under meaningless names, without its docstrings and comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(_Renamer(tree).visit(tree))) + "\n"


class _Renamer(ast.NodeTransformer):
    """One table for all kinds of names: a key may be used as an attribute, by `getattr`."""

    def __init__(self, tree: ast.Module) -> None:
        self._new: dict[str, str] = {}
        self._imported = set(_imported(tree))
        foreign = self._imported | set(dir(builtins))
        members = set(_members(tree))
        # `_` says that nobody reads it; that is no meaning.
        self._names = {n for n in _bound(tree) if not _is_dunder(n) and n != "_"} - foreign
        self._attributes = {n for n in members if not _is_dunder(n)} - _LIBRARY_ATTRIBUTES
        # An option's string stays, and argparse makes an attribute of it.
        self._attributes -= set(_option_names(tree))
        self._callables = {n.name for n in ast.walk(tree) if isinstance(n, _DOCUMENTED[1:])}
        self._keys = set(_keys(tree)) - _LIBRARY_KEYS
        self._class_bodies = {
            id(statement)
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for statement in node.body
        }
        self._fields = {
            id(target)
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for statement in node.body
            for target in _targets(statement)
        }

    def _new_name(self, old: str) -> str:
        return self._new.setdefault(old, f"n{len(self._new) + 1}")

    def _name(self, old: str) -> str:
        return self._new_name(old) if old in self._names else old

    def _attribute(self, old: str) -> str:
        return self._new_name(old) if old in self._attributes else old

    # -- names ----------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_field = id(node) in self._fields
        node.id = self._attribute(node.id) if is_field else self._name(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self._name(node.arg)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        is_method = id(node) in self._class_bodies
        node.name = self._attribute(node.name) if is_method else self._name(node.name)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self._name(node.name)
        return self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        node.names = [self._name(name) for name in node.names]
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        node.names = [self._name(name) for name in node.names]
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = node.name and self._name(node.name)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _root(node) not in self._imported:  # `torch.save` is no method of ours
            node.attr = self._attribute(node.attr)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        is_bare = isinstance(function, ast.Name)
        is_own = called in self._callables and (is_bare or called in self._attributes)
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            is_key = called in ("dict", "update") and keyword.arg in self._keys
            if is_own or is_key:
                keyword.arg = self._new_name(keyword.arg)
        if called == "add_argument":  # the rest is what a user types, and what he gets if not
            node.func = self.visit(function)
            return node
        if called == "Path" and len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
            text = str(node.args[0].value)
            node.args = [ast.Constant(self._file(text))]
            return node
        return self.generic_visit(node)

    # -- strings --------------------------------------------------------------------

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if node.value in self._keys:
                return ast.Constant(self._new_name(node.value))
            if _SUFFIX.search(node.value) and _IS_FILE.fullmatch(node.value):
                return ast.Constant(self._file(node.value))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        right = node.right
        is_path = isinstance(node.op, ast.Div) and isinstance(right, ast.Constant)
        if is_path and isinstance(right.value, str):
            node.right = ast.Constant(self._file(right.value))
            node.left = self.visit(node.left)
            return node
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        last = node.values[-1] if node.values else None
        is_file = isinstance(last, ast.Constant) and bool(_SUFFIX.search(last.value))
        values: list[ast.expr] = []
        for part in node.values:
            if not isinstance(part, ast.Constant):
                # Only the value: what stands behind its colon is a format.
                part.value = self.visit(part.value)
            elif is_file:
                part = ast.Constant(self._file(part.value))
            values.append(part)
        node.values = values
        return node

    def _file(self, text: str) -> str:
        """The words of a path; its suffix stays, since `with_suffix` may be used on it."""
        suffix = _SUFFIX.search(text)
        stem = text[: suffix.start()] if suffix else text
        return _WORD.sub(lambda word: self._new_name(word[0]), stem) + text[len(stem) :]


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (*_DOCUMENTED[1:], ast.ExceptHandler)) and node.name:
            yield node.name


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def _members(tree: ast.Module) -> Iterator[str]:
    """What belongs to the script's own classes: methods, fields, and what is set on `self`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                yield statement.name
            yield from (t.id for t in _targets(statement) if isinstance(t, ast.Name))
        for inner in ast.walk(node):
            is_set = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
            if is_set and getattr(inner.value, "id", "") == "self":
                yield inner.attr


def _option_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    yield str(argument.value).lstrip("-").replace("-", "_")


def _keys(tree: ast.Module) -> Iterator[str]:
    """Strings by which a dictionary is made or read."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            found = list(node.keys)
        elif isinstance(node, ast.Subscript):
            found = [node.slice]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "pop"):
            found = list(node.args[:1])
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            found = [node.left]
        for key in found:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value
