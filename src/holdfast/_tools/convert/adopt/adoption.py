"""A checkpoint of another library becomes a run of one attempt, which has ended.

Its files show which library wrote it. No code in it is ever run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast._errors import (
    DamagedCheckpoint,
    FolderError,
    HoldfastError,
    SaveFailed,
    install_command,
)
from holdfast._run.exit.leaving import ExitRecord
from holdfast._run.saving.direct import write_direct
from holdfast._store.commit.checkpoint import Policy
from holdfast._store.folder import journal
from holdfast._store.folder.atomic import publish_folder, remove_folder, sync_folder
from holdfast._store.folder.attempts import claim, note_origin, open_folder
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format.version import __version__
from holdfast._text import say
from holdfast._tools.convert.adopt.foreign import (
    ROOT,
    Adoption,
    Foreign,
    Prepared,
    guess_parts,
    number_of,
    prepare_foreign,
)
from holdfast._tools.convert.adopt.tensorflow_bundle import prepare_tensorflow

_NAMED = 8
_OF_KERAS = (".h5", ".keras")
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TRAINER_STATE = "trainer_state.json"
_BESIDE = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
_RANDOM = "rng_state.pth"
_DCP_TABLE = ".metadata"
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_ORBAX_DEFAULTS = ("default", "state")
_LIGHTNING_VERSION = "pytorch-lightning_version"
_LAST = "last.ckpt"
_KNOWN = (
    "tf.train.CheckpointManager, torch.save, Lightning, Hugging Face, torch.distributed.checkpoint "
    "or Orbax"
)


def adopt_files(folder: Path, wanted: Adoption) -> Prepared:
    """Make a run of a checkpoint that another library wrote."""
    refuse_a_run(folder)
    prepared = prepare(wanted)
    publish_run(folder, lambda unfinished: _make_run(unfinished, prepared, wanted))
    return prepared


def publish_run(folder: Path, make: Callable[[Path], None]) -> None:
    """Have a run folder made beside its place, and then rename it.

    A folder without its checkpoint would be a run that begins from nothing.
    """
    unfinished = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}.unfinished")
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        sync_folder(unfinished)
        if not publish_folder(unfinished, folder.absolute()):
            raise _is_taken(folder)
    except (OSError, SaveFailed) as error:
        reason = getattr(error, "strerror", None) or error
        raise HoldfastError(
            f"{folder}: could not be written ({reason}).\n"
            "Nothing was left there. Choose a place that has room and that you may write to."
        ) from error
    finally:
        remove_folder(unfinished)


def _make_run(folder: Path, prepared: Prepared, wanted: Adoption) -> None:
    """A run of one attempt, which has one checkpoint and has left."""
    layout, run_id = open_folder(folder)
    attempt = claim(layout, folder, say)
    note_origin(layout, attempt, None)
    policy = Policy(layout, run_id, attempt, {attempt: None}, 1, None, __version__)
    adopted = {"from": prepared.source, "fresh": list(wanted.fresh), "kind": prepared.kind}
    head: dict[str, Any] = {
        "attempt": attempt,
        "world": 1,
        "common": "",
        "metrics": {},
        "best": None,
        "by_hand": False,
        "adopted": adopted,
    }
    step, source = prepared.step, prepared.source
    write_direct(policy, prepared.captured, head, step, "adopted")
    journal.append(layout.journal, "adopted", attempt=attempt, step=step, source=source)
    record = {"status": 0, "how": "closed", "reason": "adopted", "step": step}
    ExitRecord(layout, attempt).write(record, asked=False)


def refuse_a_run(folder: Path) -> None:
    layout = RunLayout(folder.absolute())
    if layout.identity.exists() or layout.checkpoints.exists():
        raise FolderError(
            f"{folder}: there is a run here already, and it was left as it is.\n"
            "Adopt into a new folder, and give Run that one."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _is_taken(folder)


def _is_taken(folder: Path) -> FolderError:
    return FolderError(
        f"{folder}: is there already, and was left as it is.\nName a folder that is not there yet."
    )


# -- reading ----------------------------------------------------------------------


def prepare(wanted: Adoption) -> Prepared:
    source = wanted.source
    if _is_of_tensorflow(source):
        return prepare_tensorflow(wanted)
    if not source.exists():
        raise FolderError(
            f"{source}: there is no such file or folder.\n"
            "Name a checkpoint, or the folder that it is in."
        )
    read, path = _recognise(source)
    try:
        return prepare_foreign(read(path), wanted)
    except HoldfastError:
        raise
    except RecursionError as error:
        raise HoldfastError(
            f"{path}: holds something that holds itself, or thousands of lists in each other.\n"
            "Save a dict of state_dicts, and adopt that."
        ) from error
    except Exception as error:  # it can be read, but has not the layout of its library
        raise DamagedCheckpoint(
            f"{path}: is not understood ({_reason(error)}).\n"
            "Save a dict of state_dicts with torch.save, and adopt that."
        ) from error


def _is_of_tensorflow(source: Path) -> bool:
    if source.is_dir():
        return (source / "checkpoint").is_file() and not _is_of_orbax(source)
    near = source.parent.is_dir() and any(source.parent.glob("*.index"))
    return source.suffix in (*_OF_KERAS, ".index") or (not source.exists() and near)


def _recognise(source: Path) -> tuple[Callable[[Path], Foreign], Path]:
    if source.is_file():
        return (_read_weights if source.suffix == ".safetensors" else _read_torch), source
    for is_one, read in _FOLDERS:
        if is_one(source):
            return read, source
    for pattern, is_one, read in (
        (r"checkpoint-(\d+)", _is_of_hugging_face, _read_hugging_face),
        (r"(\d+)", _is_of_orbax, _read_orbax),
        (r"\D*?(\d+)", _is_of_dcp, _read_dcp),
    ):
        newest = _newest(source, pattern, is_one)
        if newest is not None:
            return read, newest
    return _read_torch, _only_file(source)


def _newest(folder: Path, pattern: str, is_one: Callable[[Path], bool]) -> Path | None:
    """The folder with the highest number in its name."""
    found = {
        int(match[1]): each
        for each in folder.iterdir()
        if (match := re.fullmatch(pattern, each.name)) and each.is_dir() and is_one(each)
    }
    return found[max(found)] if found else None


def _only_file(folder: Path) -> Path:
    files = sorted(
        each
        for ending in ("ckpt", "pt", "pth", "safetensors")
        for each in folder.glob(f"*.{ending}")
    )
    if folder / _LAST in files:
        return folder / _LAST
    if len(files) == 1:
        return files[0]
    shown = ", ".join(str(each) for each in files[-_NAMED:])
    if files:
        raise FolderError(f"{folder}: there are several checkpoints.\nName one: {shown}.")
    raise FolderError(
        f"{folder}: there is no checkpoint in it that is known here.\nName one of {_KNOWN}."
    )


def _is_of_hugging_face(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*_WEIGHTS, _TRAINER_STATE))


def _is_of_dcp(folder: Path) -> bool:
    return (folder / _DCP_TABLE).is_file()


def _is_of_orbax(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _ORBAX)


def _load_torch(path: Path) -> ModuleType:
    try:
        from holdfast.torch import checkpoints
    except ImportError as error:
        raise HoldfastError(
            f"{path}: reading it needs PyTorch, which is not installed here.\n"
            f"Install it: {install_command('torch')}"
        ) from error
    return checkpoints


def _reading(torch: ModuleType, path: Path, read: Callable[[Path], Any]) -> Any:
    """The result of a reader; its errors in a sentence."""
    try:
        return read(path)
    except torch.Refused as error:
        what = f"a {error.stranger}" if error.stranger else f"more than values: {error}"
        raise HoldfastError(
            f"{path}: holds {what}, and loading that could run any code. It was not loaded.\n"
            "If you trust it: load it in a script of yours, and torch.save a dict of state_dicts."
        ) from error
    except Exception as error:  # a damaged file makes the readers fail in many ways
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{path}: cannot be read ({_reason(error)}).\nNothing was changed. Adopt the one before it."
    )


def _reason(error: Exception) -> str:
    """The error in one line; of a KeyError the text alone would say nothing."""
    text = str(error).partition("\n")[0]
    is_told = bool(text) and not isinstance(error, KeyError)
    return text if is_told else f"{type(error).__name__} {text}".rstrip()


def _read_torch(path: Path) -> Foreign:
    torch = _load_torch(path)
    whole = _reading(torch, path, torch.read_file)
    if isinstance(whole, dict) and _LIGHTNING_VERSION in whole and "state_dict" in whole:
        return _lightning(path, whole)
    return Foreign(str(path), "torch.save", whole, guess_parts(whole, torch.is_tensor))


def _read_weights(path: Path) -> Foreign:
    torch = _load_torch(path)
    whole = _reading(torch, path, torch.read_safetensors)
    return Foreign(str(path), "safetensors", whole, {"model": ROOT})


def _lightning(path: Path, whole: dict[str, Any]) -> Foreign:
    parts = {"model": "state_dict"}
    for name, key in (("optimizer", "optimizer_states"), ("scheduler", "lr_schedulers")):
        found = whole.get(key) or []
        if len(found) == 1:
            parts[name] = f"{key}.0"
        elif found:
            parts[f"{name}s"] = key  # Run(optimizers=[first, second])
    scalers = [k for k, v in whole.items() if isinstance(v, dict) and "_growth_tracker" in v]
    if scalers:
        parts["scaler"] = scalers[0]
    loops = whole.get("loops", {}).get("fit_loop", {})
    epochs = loops.get("epoch_progress", {}).get("current", {}).get("processed", whole.get("epoch"))
    batches = loops.get("epoch_loop.batch_progress", {}).get("current", {}).get("processed", 0)
    steps = number_of(whole.get("global_step"))
    foreign = Foreign(str(path), "Lightning", whole, parts)
    foreign.counted = None if steps is None else ("global_step", steps)
    if isinstance(epochs, int):
        started = loops.get("epoch_progress", {}).get("current", {}).get("started", epochs)
        foreign.epochs = epochs + (0.5 if batches and started > epochs else 0.0)
    taken = {way.partition(".")[0] for way in parts.values()}
    of_the_trainer = ("callbacks", "loops")
    foreign.left_out = [k for k in whole if k in of_the_trainer and k not in taken and whole[k]]
    return foreign


def _read_hugging_face(folder: Path) -> Foreign:
    torch = _load_torch(folder)
    whole: dict[str, Any] = {"model": _shards(torch, folder)}
    for name, file in _BESIDE.items():
        if (folder / file).is_file():
            whole[name] = _reading(torch, folder / file, torch.read_file)
    foreign = Foreign(str(folder), "Hugging Face", whole, {name: name for name in whole})
    if (folder / _TRAINER_STATE).is_file():
        about = _reading(torch, folder / _TRAINER_STATE, _read_json)
        steps = number_of(about.get("global_step"))
        foreign.counted = None if steps is None else (_TRAINER_STATE, steps)
        epochs = about.get("epoch")
        if isinstance(epochs, int | float) and 0 <= epochs < 2**53:  # JSON's NaN and Infinity, too
            foreign.epochs = epochs
    if (folder / _RANDOM).is_file():
        random = _reading(torch, folder / _RANDOM, torch.read_file)
        foreign.generators = torch.generators_of(random)
    return foreign


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _shards(torch: ModuleType, folder: Path) -> dict[str, Any]:
    """The weights of a model, perhaps in several files with an index."""
    name = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if name is None:
        raise FolderError(
            f"{folder}: has no {_WEIGHTS[0]} and no {_WEIGHTS[2]}, so there is no model in it.\n"
            "An adapter (PEFT) is loaded in the script; adopt the model that it was made for."
        )
    files = [name]
    if name.endswith(".index.json"):
        table = _reading(torch, folder / name, _read_json)["weight_map"]
        files = sorted(set(table.values()))
    weights: dict[str, Any] = {}
    for file in files:
        path = folder / file
        if path.parent != folder:
            raise FolderError(f"{path}: is named by {name}, and is not in its folder.\nRefused.")
        is_plain = path.suffix == ".safetensors"
        weights |= _reading(torch, path, torch.read_safetensors if is_plain else torch.read_file)
    return weights


def _read_dcp(folder: Path) -> Foreign:
    torch = _load_torch(folder)
    whole = _reading(torch, folder, torch.read_dcp)
    # Lightning puts the values that are not sharded beside it.
    if (folder / "meta.pt").is_file():
        whole = {**_reading(torch, folder / "meta.pt", torch.read_file), **whole}
    return Foreign(str(folder), "DCP", whole, guess_parts(whole, torch.is_tensor))


def _read_orbax(folder: Path) -> Foreign:
    try:
        from holdfast.jax import checkpoints
    except ImportError as error:
        raise HoldfastError(
            f"{folder}: reading it needs JAX and Orbax, which are not installed here.\n"
            f"Install them: {install_command('orbax')}"
        ) from error
    try:
        whole, left_out = checkpoints.read_orbax(folder)
    except Exception as error:
        raise _damaged(folder, error) from error
    if isinstance(whole, dict) and len(whole) == 1 and next(iter(whole)) in _ORBAX_DEFAULTS:
        inner = next(iter(whole.values()))
        whole = inner if isinstance(inner, dict) else whole
    parts = {key: key for key in whole} if isinstance(whole, dict) else {"params": ROOT}
    foreign = Foreign(str(folder), "Orbax", whole, parts)
    foreign.left_out = left_out
    if folder.name.isdigit() and "step" not in foreign.parts:
        foreign.counted = ("its folder", int(folder.name))
    return foreign


_FOLDERS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Foreign]], ...] = (
    (_is_of_dcp, _read_dcp),
    (_is_of_orbax, _read_orbax),
    (_is_of_hugging_face, _read_hugging_face),
)
