"""A checkpoint of another library becomes a run of one attempt, which has ended.

Its files show which library wrote it. No code in it is ever run. An arena in memory whose run
folder is gone gets a folder again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from holdfast._errors import (
    DamagedCheckpoint,
    FolderError,
    HoldfastError,
    SaveFailed,
    not_installed,
)
from holdfast._run.exit.leaving import ExitRecord
from holdfast._run.saving.saver import write_direct
from holdfast._store.commit.write import Policy
from holdfast._store.folder import journal
from holdfast._store.folder.atomic import writing_folder
from holdfast._store.folder.attempts import claim, note_origin, open_folder, read_json, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format.version import __version__
from holdfast._text import say
from holdfast._tools.convert.foreign import (
    ROOT,
    TRAINER_FILES,
    TRAINER_STATE,
    Adoption,
    Foreign,
    Prepared,
    guess_parts,
    number_of,
    prepare_foreign,
    prepare_tensorflow,
)

_NAMED = 8
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_RANDOM = "rng_state.pth"
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_KNOWN = (
    "tf.train.CheckpointManager, torch.save, Lightning, Hugging Face, torch.distributed.checkpoint "
    "or Orbax"
)


def adopt_files(folder: Path, wanted: Adoption) -> Prepared:
    _refuse_a_run(folder)
    prepared = _prepare(wanted)
    _publish_run(folder, lambda unfinished: _make_run(unfinished, prepared, wanted))
    return prepared


def _publish_run(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a run folder under another name, and then rename it.

    A folder without its checkpoint would be a run that begins from nothing.
    """
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        with writing_folder(folder.absolute()) as unfinished:
            make(unfinished)
    except (OSError, SaveFailed) as error:
        if isinstance(error, FileExistsError) and folder.exists():
            raise _is_taken(folder) from error
        reason = getattr(error, "strerror", None) or error
        raise HoldfastError(
            f"{folder}: could not be written ({reason}).\n"
            "Nothing was left there. Choose a place that has room and that you may write to."
        ) from error


def _make_run(folder: Path, prepared: Prepared, wanted: Adoption) -> None:
    """A run of one attempt, which has one checkpoint and has left."""
    layout, run_id = open_folder(folder)
    attempt = claim(layout, folder, say)
    note_origin(layout, attempt, None)
    policy = Policy(
        layout, run_id, attempt, line={attempt: None}, keep_last=1, best=None, version=__version__
    )
    step, source = prepared.step, prepared.source
    adopted = {"from": source, "fresh": list(wanted.fresh), "kind": prepared.kind}
    head: dict[str, Any] = {"attempt": attempt, "world": 1, "common": "", "metrics": {}}
    head |= {"best": None, "by_hand": False, "adopted": adopted}
    write_direct(policy, prepared.captured, head, step, "adopted")
    journal.append(layout.journal, "adopted", attempt=attempt, step=step, source=source)
    record = {"status": 0, "how": "closed", "reason": "adopted", "step": step}
    ExitRecord(layout, attempt).write(record, asked=False)


def _refuse_a_run(folder: Path) -> None:
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


def adopt_memory(folder: Path, source: Path) -> int:
    """Make a run folder for the arena in this file; returns the step that is in it.

    The new folder has the id of the run and its last attempt. So the next start finds the arenas
    as those of the attempt before, checks them, goes on there and makes the state durable.
    """
    from holdfast._store.memory.backing import users_of

    _refuse_a_run(folder)
    if pids := users_of().get(source):
        raise HoldfastError(
            f"{source}: a process has it open (pid {', '.join(map(str, sorted(pids)))}): its run "
            "has not ended.\nStop that first."
        )
    run_id, attempt, step = _read_arena(source)

    def make(unfinished: Path) -> None:
        layout = RunLayout(unfinished)
        for path in (layout.attempt(attempt), layout.checkpoints, layout.requests):
            path.mkdir(parents=True)
        identity = {"run_id": run_id, "created": time.time(), "folder": str(folder.absolute())}
        write_json(layout.identity, identity)
        note_origin(layout, attempt, None)
        journal.append(layout.journal, "adopted", attempt=attempt, step=step, source=str(source))
        record = {"status": None, "how": "adopted from memory", "step": step}
        ExitRecord(layout, attempt).write(record, asked=False)

    _publish_run(folder, make)
    return step


def _read_arena(source: Path) -> tuple[str, int, int]:
    from holdfast._store.memory.arena import Arena, NotAnArena
    from holdfast._store.memory.backing import open_leftover

    descriptor = open_leftover(source)
    if descriptor is None:
        raise HoldfastError(f"{source}: there is no arena of yours here.")
    try:
        arena = Arena(descriptor)
    except (NotAnArena, ValueError, OSError) as error:
        os.close(descriptor)
        raise HoldfastError(f"{source}: is not an arena ({error}).") from error
    steps = [record.step for record in arena.whole() if record.is_hashed]
    found = arena.run_id, arena.attempt, max(steps, default=-1)
    place = arena.folder
    arena.close()
    if not steps:
        raise HoldfastError(f"{source}: holds no snapshot that a start would use.")
    if place and read_json(RunLayout(Path(place)).identity).get("run_id") == found[0]:
        raise HoldfastError(
            f"{source}: its run is in {place}.\nStart the same command again: it goes on there."
        )
    return found


def _prepare(wanted: Adoption) -> Prepared:
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
        return (source / "checkpoint").is_file() and not _has_any(source, _ORBAX)
    near = source.parent.is_dir() and any(source.parent.glob("*.index"))
    return source.suffix in (".h5", ".keras", ".index") or (not source.exists() and near)


def _recognise(source: Path) -> tuple[Callable[[Path], Foreign], Path]:
    if source.is_file():
        return (_read_weights if source.suffix == ".safetensors" else _read_torch), source
    for names, _, read in _FOLDERS:
        if _has_any(source, names):
            return read, source
    for names, pattern, read in reversed(_FOLDERS):
        found = {
            int(match[1]): each
            for each in source.iterdir()
            if (match := re.fullmatch(pattern, each.name)) and _has_any(each, names)
        }
        if found:
            return read, found[max(found)]
    return _read_torch, _only_file(source)


def _has_any(folder: Path, names: Iterable[str]) -> bool:
    return any((folder / name).is_file() for name in names)


def _only_file(folder: Path) -> Path:
    files = sorted(
        each
        for ending in ("ckpt", "pt", "pth", "safetensors")
        for each in folder.glob(f"*.{ending}")
    )
    last = folder / "last.ckpt"
    if last in files or len(files) == 1:
        return last if last in files else files[0]
    shown = ", ".join(str(each) for each in files[-_NAMED:])
    if files:
        raise FolderError(f"{folder}: there are several checkpoints.\nName one: {shown}.")
    raise FolderError(
        f"{folder}: there is no checkpoint in it that is known here.\nName one of {_KNOWN}."
    )


def _read(path: Path, reader: str) -> Any:
    """The result of a reader in `holdfast/torch/checkpoints.py`; its errors in a sentence."""
    try:
        from holdfast.torch import checkpoints as torch
    except ImportError as error:
        what = f"{path}: reading it"
        raise HoldfastError(not_installed(what, "PyTorch", "torch")) from error
    try:
        return getattr(torch, reader)(path)
    except torch.Refused as error:
        what = f"a {error.stranger}" if error.stranger else f"more than values ({error})"
        raise HoldfastError(
            f"{path}: holds {what}, and loading that could run any code. It was not loaded.\n"
            "If you trust it: load it in a script of yours, and torch.save a dict of state_dicts."
        ) from error
    except Exception as error:  # a damaged file makes the readers fail in many ways
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{path}: cannot be read ({_reason(error)}).\nNothing was changed. Adopt the previous one."
    )


def _reason(error: Exception) -> str:
    """The error in one line; of a KeyError the text alone would say nothing."""
    text = str(error).partition("\n")[0]
    is_told = bool(text) and not isinstance(error, KeyError)
    return text if is_told else f"{type(error).__name__} {text}".rstrip()


def _guess(path: Path, kind: str, whole: Any) -> Foreign:
    from holdfast.torch.checkpoints import is_tensor

    return Foreign(str(path), kind, whole, guess_parts(whole, is_tensor))


def _read_torch(path: Path) -> Foreign:
    whole = _read(path, "read_file")
    if isinstance(whole, dict) and {"pytorch-lightning_version", "state_dict"} <= whole.keys():
        return _lightning(path, whole)
    return _guess(path, "torch.save", whole)


def _read_weights(path: Path) -> Foreign:
    return Foreign(str(path), "safetensors", _read(path, "read_safetensors"), {"model": ROOT})


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
    whole: dict[str, Any] = {"model": _shards(folder)}
    for name, file in TRAINER_FILES.items():
        if (folder / file).is_file():
            whole[name] = _read(folder / file, "read_file")
    foreign = Foreign(str(folder), "Hugging Face", whole, {name: name for name in whole})
    if (folder / TRAINER_STATE).is_file():
        about = _read_json(folder / TRAINER_STATE)
        steps = number_of(about.get("global_step"))
        foreign.counted = None if steps is None else (TRAINER_STATE, steps)
        epochs = about.get("epoch")
        if isinstance(epochs, int | float) and 0 <= epochs < 2**53:  # JSON's NaN and Infinity, too
            foreign.epochs = epochs
    if (folder / _RANDOM).is_file():
        from holdfast.torch.checkpoints import generators_of

        foreign.generators = generators_of(_read(folder / _RANDOM, "read_file"))
    return foreign


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error


def _shards(folder: Path) -> dict[str, Any]:
    """The weights of a model, perhaps in several files with an index."""
    name = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if name is None:
        raise FolderError(
            f"{folder}: has no {_WEIGHTS[0]} and no {_WEIGHTS[2]}, so there is no model in it.\n"
            "An adapter (PEFT) is loaded in the script; adopt the model that it was made for."
        )
    files = [name]
    if name.endswith(".index.json"):
        table = _read_json(folder / name)["weight_map"]
        files = sorted(set(table.values()))
    weights: dict[str, Any] = {}
    for file in files:
        path = folder / file
        if path.parent != folder:
            raise FolderError(f"{path}: is named by {name}, and is not in its folder.\nRefused.")
        is_plain = path.suffix == ".safetensors"
        weights |= _read(path, "read_safetensors" if is_plain else "read_file")
    return weights


def _read_dcp(folder: Path) -> Foreign:
    whole = _read(folder, "read_dcp")
    # Lightning puts the values that are not sharded into a file of their own.
    if (folder / "meta.pt").is_file():
        whole = {**_read(folder / "meta.pt", "read_file"), **whole}
    return _guess(folder, "DCP", whole)


def _read_orbax(folder: Path) -> Foreign:
    try:
        from holdfast.jax import checkpoints
    except ImportError as error:
        what = f"{folder}: reading it"
        raise HoldfastError(not_installed(what, "Orbax", "orbax")) from error
    try:
        whole, left_out = checkpoints.read_orbax(folder)
    except Exception as error:
        raise _damaged(folder, error) from error
    if isinstance(whole, dict) and len(whole) == 1 and next(iter(whole)) in ("default", "state"):
        inner = next(iter(whole.values()))
        whole = inner if isinstance(inner, dict) else whole
    parts = {key: key for key in whole} if isinstance(whole, dict) else {"params": ROOT}
    foreign = Foreign(str(folder), "Orbax", whole, parts)
    foreign.left_out = left_out
    if folder.name.isdigit() and "step" not in foreign.parts:
        foreign.counted = ("its folder", int(folder.name))
    return foreign


# A folder with one of these files, the pattern of its name among several, and its reader.
_FOLDERS: tuple[tuple[tuple[str, ...], str, Callable[[Path], Foreign]], ...] = (
    ((".metadata",), r"\D*?(\d+)", _read_dcp),
    (_ORBAX, r"(\d+)", _read_orbax),
    ((*_WEIGHTS, TRAINER_STATE), r"checkpoint-(\d+)", _read_hugging_face),
)
