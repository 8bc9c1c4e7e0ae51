"""Whether a Python program certainly lets a signal kill it.

Any module may install a handler, so this is certain only if all that the program imports is
known not to, or is a file beside it that is looked at in the same way. Nothing is imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath

from holdfast._check.launch import Reader

# What may install one without any import that would tell, or run what nobody can see from here.
_MAY_HEAR = re.compile(
    r"signal|\bSIG[A-Z]|holdfast|preempt|importlib|__import__|runpy|ctypes|cffi|"
    r"\b(?:exec|eval|entry_points)\s*\(",
    re.I,
)
_KNOWN = frozenset([
    "PIL", "cv2", "einops", "flax", "h5py", "jax", "matplotlib", "numpy", "optax", "pandas",
    "safetensors", "scipy", "sentencepiece", "sklearn", "timm", "tokenizers", "torch",
    "torchaudio", "torchmetrics", "torchvision", "tqdm", "yaml",
])  # fmt: skip
_MOST_FILES = 20


def is_deaf(name: str, read: Reader) -> bool:
    """Whether neither this file nor what it imports does anything about a signal."""
    waiting, seen = [name], {name}
    while waiting:
        text = read(waiting.pop())
        if text is None or _MAY_HEAR.search(text):
            return False
        try:
            modules = set(_imported(ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError):
            return False
        for module in modules - {""}:
            if module.partition(".")[0] in _KNOWN | sys.stdlib_module_names:
                continue
            path = str(PurePosixPath(name).parent / f"{module.replace('.', '/')}.py")
            if path not in seen:
                seen.add(path)
                waiting.append(path)
        if "" in modules or len(seen) > _MOST_FILES:
            return False
    return True


def _imported(tree: ast.AST) -> Iterator[str]:
    """The names of modules; "" for one that is named by its place in a package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "") if node.level == 0 else ""
