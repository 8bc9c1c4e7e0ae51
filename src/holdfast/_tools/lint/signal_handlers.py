"""Whether a Python program certainly handles no signal; it is read, never imported.

Any module may install a handler. So this is certain only if each import is a package known to
install none, or a file in the folder of the program that is read in the same way.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath

# A module for signals by any of its names, and anything that runs code which is not visible here.
_MAY_HANDLE = re.compile(
    r"signal|holdfast|preempt|importlib|__import__|runpy|ctypes|cffi|(?<![.\w])(?:exec|eval)\s*\(",
    re.IGNORECASE,
)
_KNOWN = frozenset([
    "PIL", "cv2", "einops", "flax", "h5py", "jax", "matplotlib", "numpy", "optax", "pandas",
    "safetensors", "scipy", "sentencepiece", "sklearn", "timm", "tokenizers", "torch",
    "torchaudio", "torchmetrics", "torchvision", "tqdm", "yaml",
])  # fmt: skip
_MOST_FILES = 20

Reader = Callable[[str], str | None]


def has_no_handler(name: str, read: Reader) -> bool:
    """True if neither this file nor its imports can install a handler."""
    waiting, seen = [name], {name}
    while waiting:
        text = read(waiting.pop())
        if text is None or _MAY_HANDLE.search(text):
            return False
        try:
            modules = set(_imported(ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError):
            return False
        if "" in modules:
            return False
        for path in _files_of(modules, PurePosixPath(name).parent, read):
            if path not in seen:
                seen.add(path)
                waiting.append(path)
        if len(seen) > _MOST_FILES:
            return False
    return True


def _files_of(modules: Iterable[str], folder: PurePosixPath, read: Reader) -> Iterator[str]:
    """The files in the folder of the program: all modules that are no known packages."""
    for module in modules:
        parts = module.split(".")
        if parts[0] in _KNOWN or parts[0] in sys.stdlib_module_names:
            continue
        yield str(folder.joinpath(*parts)) + ".py"
        packages = [folder.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts))]
        yield from (str(each) for each in packages if read(str(each)) is not None)


def _imported(tree: ast.AST) -> Iterator[str]:
    """The names of modules; "" for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "") if node.level == 0 else ""
