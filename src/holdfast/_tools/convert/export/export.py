"""A checkpoint in a format that others read: safetensors, which needs no framework, or others.

Every checksum is verified before the first byte is written, and a file or folder has its
name only when it is whole and durable. Of the state that the user gave nothing is
left out that the format has a place for; the random generators and the rest of what holdfast
adds is. Of a run of several ranks it is what they have in common, with sharded tensors made
whole, and beside it what rank 0 has of its own.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast._errors import FolderError, HoldfastError, SettingsError
from holdfast._store.folder.atomic import writing_whole
from holdfast._store.folder.attempts import find_run
from holdfast._store.folder.layout import RunLayout
from holdfast._tools.convert.export.chosen import Selected as Selected
from holdfast._tools.convert.export.chosen import Wanted as Wanted
from holdfast._tools.convert.export.chosen import (
    Written,
    choose_newest,
    choose_step,
    newer_in_memory,
)
from holdfast._tools.convert.export.for_torch import check_dcp, load_for_pt, write_dcp, write_pt
from holdfast._tools.convert.export.huggingface_folder import check_huggingface, write_huggingface
from holdfast._tools.convert.export.put_together import put_together
from holdfast._tools.convert.export.safetensors_file import write_safetensors
from holdfast._tools.convert.export.tensorflow_folder import check_tensorflow, write_tensorflow

_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch"}
FOLDERS = ("dcp", "huggingface", "tensorflow")
FORMATS = (*sorted(_SUFFIXES.values()), *FOLDERS)


@dataclass(frozen=True)
class Exported:
    """What was exported."""

    step: int
    attempt: int
    tensors: int
    size_bytes: int
    passed_over: list[str]
    newer_in_memory: int | None  # a step that is not on disk yet
    ranks: int  # that stored it
    left_out: list[str]  # what the format has no place for


def export(folder: Path, wanted: Wanted) -> Exported:
    """Write one checkpoint of a run."""
    layout, run_id = find_run(folder)
    wanted = replace(wanted, to=wanted.to or _SUFFIXES.get(wanted.out.suffix))
    _check_wanted(wanted, layout)
    if wanted.step is None:
        chosen = choose_newest(folder, layout, run_id)
    else:
        chosen = choose_step(folder, layout, run_id, wanted.step)
    names = _select(folder, chosen.loaded.head["tree"]["state"], wanted)
    selected = Selected(put_together(chosen.loaded, names), names)
    try:
        done = _write(wanted, selected)
    except FileExistsError as error:
        raise _is_taken(wanted.out) from error
    except OSError as error:
        raise HoldfastError(
            f"{wanted.out}: could not be written ({error.strerror or error}).\n"
            "Nothing was left there. Choose a place that has room and that you may write to."
        ) from error
    return Exported(
        step=chosen.step,
        attempt=chosen.attempt,
        tensors=done.tensors,
        size_bytes=done.size_bytes,
        passed_over=chosen.passed_over,
        newer_in_memory=newer_in_memory(layout, run_id, chosen) if wanted.step is None else None,
        ranks=chosen.loaded.world,
        left_out=done.left_out,
    )


def _write(wanted: Wanted, selected: Selected) -> Written:
    out, strip, force = wanted.out, wanted.strip, wanted.force
    if wanted.to == "tensorflow":
        return write_tensorflow(out, selected.loaded, selected.names, strip=strip, force=force)
    if wanted.to == "huggingface":
        return write_huggingface(wanted, selected)
    if wanted.to == "dcp":
        return write_dcp(out, selected, strip=strip, force=force)
    write = write_pt if wanted.to == "torch" else write_safetensors
    with writing_whole(out, replace=force) as file:
        count = write(file, selected, strip=strip)
    return Written(count, out.stat().st_size)


def _check_wanted(wanted: Wanted, layout: RunLayout) -> None:
    """Refuse what cannot be before gigabytes are read."""
    out = wanted.out
    if wanted.to is None:
        raise SettingsError(
            f"{out}: the ending says which format is wanted, and it is none of "
            f"{' and '.join(_SUFFIXES)}.\nName it {out.stem or 'out'}.safetensors, which needs "
            f"no framework to be read, or {out.stem or 'out'}.pt for torch.load. Or give a folder, "
            f"and --to {' or '.join((', '.join(FOLDERS[:-1]), FOLDERS[-1]))}."
        )
    if wanted.strip and len(wanted.only) != 1:
        raise SettingsError(
            "--strip drops the name of one state from the names of its tensors.\n"
            "Say of which: --only model --strip"
        )
    if wanted.config is not None and wanted.to != "huggingface":
        raise SettingsError(
            f"--config {wanted.config}: only a Hugging Face folder has a config.\n"
            "Add --to huggingface, or leave it out."
        )
    if not out.parent.is_dir():
        raise FolderError(
            f"{out.parent}: there is no such folder.\n"
            f"Make it first: mkdir -p {shlex.quote(str(out.parent))}"
        )
    if out.resolve().is_relative_to(layout.checkpoints.resolve()):
        raise FolderError(
            f"{out}: this is inside the run's own checkpoints, which nobody else may change.\n"
            "Choose a place outside of the run."
        )
    _check_place(wanted)


def _check_place(wanted: Wanted) -> None:
    out, force = wanted.out, wanted.force
    if wanted.to == "tensorflow":
        check_tensorflow(out, force=force)
    elif wanted.to == "huggingface":
        check_huggingface(wanted)
    elif wanted.to == "dcp":
        check_dcp(out, force=force)
    elif out.is_dir():
        suffix = out.suffix or next(s for s, name in _SUFFIXES.items() if name == wanted.to)
        raise FolderError(f"{out}: this is a folder.\nName a file in it: {out / 'out'}{suffix}")
    elif out.exists() and not force:
        raise _is_taken(out)
    elif wanted.to == "torch":
        load_for_pt()


def _is_taken(out: Path) -> FolderError:
    return FolderError(
        f"{out}: there is such a file already, and it was left as it is.\n"
        "To replace it: --force. Or choose another name."
    )


def _select(folder: Path, state: dict[str, Any], wanted: Wanted) -> list[str]:
    unknown = [name for name in wanted.only if name not in state]
    if unknown:
        raise SettingsError(
            f"{folder}: there is no {unknown[0]} in the state of this run.\n"
            f"There is: {', '.join(state) or 'nothing'}."
        )
    return list(wanted.only or state)
