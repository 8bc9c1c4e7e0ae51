"""What the watch of each framework records: updates, batches, files, and the script's variables.

The variables are found by walking the script's frames, and named by their path. Only frames,
instances and containers of the script's own are walked, not those of libraries.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from holdfast._run.witness.observer import Leaf, Observer, digest_of, plain_text, whole_leaf
from holdfast._state.capture import capture_generators
from holdfast._tools.prove.witness.bootstrap import FRESH, SEEDS, in_handler, record_seeds

_MOST_BATCHES = 4096
Items = dict[str, Leaf]
Numbers = dict[str, int | float]
MOST_VALUES = 4 << 20  # elements: a larger tensor is taken for data
_MOST_DUMPED = 1 << 28
_UNTOUCHED: Leaf = ("untouched", None, 1)
_DEPTH = 5
_MOST_ITEMS = 2000
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")}
)
_HERE = str(Path(__file__).resolve().parents[3])


def intercept(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around`, whose first argument is the original."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def intercepted(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(owner, name, intercepted)


class ScriptRecorder:
    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.updates = 0
        self.batches: list[dict[str, Any]] = []
        self._amid = "start"

    def install(self, module: Any, seed: str, generator: str) -> None:
        """Record seeds, renames of files and the end of the script."""
        record_seeds(module, seed, generator)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            record_seeds(numpy.random, "seed", "numpy")
        sys.addaudithook(self._record_renames)
        atexit.register(self.end)

    def end(self) -> None:
        raise NotImplementedError

    def ask_update(self, batches: list[dict[str, Any]], state: dict[str, Any]) -> None:
        self._amid = "update"
        self._observer.ask(
            "sight",
            number=self.updates,
            boundary_id=self._observer.boundary_id,
            batches=batches,
            seeds=SEEDS if self.updates == 0 else {},
            **state,
        )

    def count_update(self) -> None:
        self.updates += 1
        self._amid = "after the update"

    def record_batch(
        self, loader: int, index: int, indices: Any, batch: Any, workers: int = 0
    ) -> None:
        """A batch was taken, for the next update or for nothing."""
        self._amid = "step"
        if index == 0:  # the rest of an earlier pass was for no update
            self.batches = [known for known in self.batches if known["loader"] != loader]
        self.batches.append(
            {
                "loader": loader,
                "at": index,
                "indices": None if indices is None else digest_of(indices),
                "bytes": digest_of(batch),
                "workers": workers,
            }
        )
        del self.batches[:-_MOST_BATCHES]

    def take_batches(self) -> list[dict[str, Any]]:
        """Those for this update: of the loader that gave the last one, not of an evaluation."""
        found, self.batches = self.batches, []
        return [batch for batch in found if batch["loader"] == found[-1]["loader"]]

    def record_save(
        self, path: str | None, save: Callable[[], Any], tear: Callable[[], Any]
    ) -> Any:
        """Save; where the prover wants to kill during a save, `tear`: write half and wait."""
        if not self._observer.is_open or path is None:
            return save()
        self._observer.ask(
            "save",
            path=path,
            updates=self.updates,
            in_handler=in_handler(sys._getframe(1)),
            amid=self._amid,
        )
        result = tear() if self._observer.is_armed("tear") else save()
        self._observer.send("saved", path=path)
        return result

    def record_load(self, path: str | None, load: Callable[[], Any]) -> Any:
        """Load, and send whether that worked."""
        if not self._observer.is_open or path is None:
            return load()
        self._observer.ask("load", path=path)
        try:
            found = load()
        except Exception as error:
            text = re.sub(r"\x1b\[[0-9;]*m", "", f"{type(error).__name__}: {error}")
            self._observer.send("load-failed", path=path, error=text.splitlines()[0][:200])
            raise
        self._observer.send("loaded", path=path)
        return found

    def _record_renames(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook."""
        if event != "os.rename" or not self._observer.is_open:
            return
        source, target = (path_of(argument) for argument in arguments[:2])
        if source and target:
            self._observer.send("rename", source=source, target=target)


def path_of(target: Any) -> str | None:
    """The absolute path of a file that is given by its name, or is open."""
    if not isinstance(target, str | os.PathLike):
        target = getattr(target, "name", None)
    return os.path.realpath(target) if isinstance(target, str | os.PathLike) else None


@functools.cache
def is_own_file(name: str) -> bool:
    """Whether code in this file is the user's, and no library's."""
    if name.startswith("<") or "site-packages" in name or "dist-packages" in name:
        return name == "<string>"  # python -c
    whole = str(Path(name).resolve())
    return not whole.startswith((*_LIBRARIES, _HERE))


@functools.cache
def is_own_class(kind: type) -> bool:
    module: ModuleType | None = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_own_file(file))


def own_frames(frame: FrameType | None) -> list[FrameType]:
    """The script's own frames, the outermost first."""
    found = []
    while frame is not None:
        if is_own_file(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


_modules: list[tuple[str, ModuleType]] = []
_modules_known = 0


def _own_modules() -> list[tuple[str, ModuleType]]:
    """The script, and the modules of its own that it has imported."""
    global _modules, _modules_known
    if len(sys.modules) != _modules_known:
        _modules_known = len(sys.modules)
        # One module may have several names: multiprocessing calls the script __mp_main__ as well.
        own = {
            id(module): ("" if name == "__main__" else f"{name}.", module)
            for name, module in reversed(sys.modules.copy().items())
            if name == "__main__" or is_own_file(getattr(module, "__file__", None) or "<none>")
        }
        _modules = list(reversed(own.values()))
    return _modules


def _variables(frames: list[FrameType]) -> Iterator[tuple[str, Any]]:
    """Every variable of the script: the globals of its modules, then the locals of functions."""
    for prefix, module in _own_modules():
        for name, value in list(vars(module).items()):
            if not name.startswith("__"):
                yield f"{prefix}{name}", value
    for frame in frames:
        if frame.f_code.co_name == "<module>":
            continue
        for name, value in list(frame.f_locals.items()):
            yield f"{frame.f_code.co_name}.{name}", value


def name_arguments(
    arguments: tuple[Any, ...], named: dict[str, Any], frames: list[FrameType]
) -> dict[str, Any]:
    """The arguments of a call, by the variables of the script that hold them."""
    variables = frames[-1].f_locals if frames else {}
    held = {id(value): name for name, value in list(variables.items())[::-1]}
    found = {held.get(id(v), f"argument {n}"): v for n, v in enumerate(arguments, start=1)}
    return found | named


def is_numpy_leaf(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    if isinstance(value, numpy.ndarray):
        return bool(value.dtype.kind in "fiu" and value.size <= MOST_VALUES)
    return isinstance(value, numpy.random.Generator)


class StateReader:
    """Reads a script's variables; the reader of each framework says which values are leaves.

    `is_closed` values are not walked: data, and objects that are read in another way.
    """

    def __init__(
        self, observer: Observer, is_leaf: Callable[[Any], bool], is_closed: Callable[[Any], bool]
    ) -> None:
        self._observer = observer
        self._is_leaf = is_leaf
        self._is_closed = is_closed
        self._frames: list[FrameType] = []  # a frame keeps its variables after its function's end
        self._found: dict[str, Any] = {}
        self._seen: set[int] = set()
        self._named: dict[str, str] = {}

    def find(self, frames: list[FrameType]) -> Numbers:
        """Find all leaves, by path; returns the numbers among the variables."""
        self._frames, self._found, self._seen = frames, {}, set()
        numbers: Numbers = {}
        for path, value in _variables(frames):
            self._walk(path, value, 0, numbers)
        return numbers

    def _walk(self, path: str, value: Any, depth: int, numbers: Numbers) -> None:
        if depth > _DEPTH or id(value) in self._seen or len(self._found) > _MOST_ITEMS:
            return
        if value is None or isinstance(value, str | bytes | int | float | type | ModuleType):
            if isinstance(value, int | float) and type(value) is not bool:
                numbers.setdefault(path, value)
            return
        if self._is_leaf(value) or isinstance(value, random.Random):
            self._seen.add(id(value))
            self._found.setdefault(path, value)
        if self._is_closed(value):
            return
        if isinstance(value, dict | list | deque):
            numbers.setdefault(f"len({path})", len(value))
        # Of mappings only dict: another one may load or compute its values.
        if isinstance(value, dict):
            self._seen.add(id(value))
            for key, item in list(dict.items(value))[:_MOST_ITEMS]:
                self._walk(f"{path}[{key!r}]"[:200], item, depth + 1, numbers)
        elif isinstance(value, list | tuple | deque) and len(value) <= _MOST_ITEMS:
            self._seen.add(id(value))
            if plain_text(list(value)) is not None:  # no leaf is in it
                return
            for index, item in enumerate(value):
                self._walk(f"{path}[{index}]", item, depth + 1, numbers)
        elif is_own_class(value.__class__) and hasattr(value, "__dict__"):
            self._seen.add(id(value))
            for key, item in list(vars(value).items()):
                self._walk(f"{path}.{key}", item, depth + 1, numbers)

    def global_generators(self) -> Items:
        items: Items = {}
        for name, state in capture_generators().items():
            leaf = whole_leaf(state)
            items[f"generator/{name}"] = _UNTOUCHED if leaf[0] == FRESH.get(name) else leaf
        return items

    def changed_names(self, names: dict[str, str]) -> dict[str, str]:
        """The names that were not sent yet."""
        changed = {key: name for key, name in names.items() if self._named.get(key) != name}
        self._named |= names
        return changed

    def dump(self, count: int, arrays: Callable[[], Sequence[Any]]) -> None:
        """Write the weights themselves, so that the prover can say how far apart two ends are."""
        import numpy as np

        if count <= _MOST_DUMPED:
            flat = [array.astype(np.float64, copy=False).ravel() for array in arrays()]
            folder = Path(self._observer.prove_config.end)
            np.concatenate(flat).tofile(folder / f"{self._observer.rank}.float64")


def generator_state(value: Any) -> Leaf | None:
    """The state of a generator of Python or NumPy; None for another value."""
    if isinstance(value, random.Random):
        return whole_leaf(value.getstate())
    if hasattr(value, "bit_generator"):
        return whole_leaf(value.bit_generator.state)
    return None
