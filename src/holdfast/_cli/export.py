"""A checkpoint as a file that others read: safetensors, which needs no framework, or torch's .pt.

Every checksum is verified before the first byte is written, and the file has its
name only when it is whole and durable. Of the state that the user gave nothing is
left out; the random generators and the rest of what holdfast adds is. Of a run of several
ranks it is what they have in common, with sharded tensors made whole, and beside it what
rank 0 has of its own. For TensorFlow it is a folder: see `export_tensorflow`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from holdfast._cli.adopt_files import load_tensorflow
from holdfast._cli.chosen import Chosen, choose_newest, choose_step, newer_in_memory
from holdfast._cli.export_tensorflow import check_folder, write_folder
from holdfast._cli.put_together import put_together
from holdfast._cli.stored_tree import NamedTensors, to_plain
from holdfast._errors import FolderError, HoldfastError, SettingsError
from holdfast._record.atomic import writing_whole
from holdfast._record.attempts import find_run
from holdfast._record.faults import pass_point
from holdfast._record.image import TensorSpec
from holdfast._record.layout import RunLayout
from holdfast._resume.verify import Loaded

_CHUNK_BYTES = 16 << 20
_SUFFIXES = (".safetensors", ".pt")


@dataclass(frozen=True)
class Wanted:
    """What is to be exported, and how."""

    out: Path
    step: int | None = None
    only: tuple[str, ...] = ()
    strip: bool = False
    force: bool = False
    to: str | None = None  # "tensorflow": a folder; else the ending of `out` says it


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
    """Write one checkpoint of a run to a file."""
    layout, run_id = find_run(folder)
    _check_wanted(wanted, layout)
    if wanted.to == "tensorflow":
        load_tensorflow()
    write = _torch_writer() if _is_pt(wanted) else _write_safetensors
    if wanted.step is None:
        chosen = choose_newest(folder, layout, run_id)
    else:
        chosen = choose_step(folder, layout, run_id, wanted.step)
    names = _select(folder, chosen.loaded.head["tree"]["state"], wanted)
    chosen = replace(chosen, loaded=put_together(chosen.loaded, names))
    state = {name: chosen.loaded.head["tree"]["state"][name] for name in names}
    left_out: list[str] = []
    try:
        if wanted.to == "tensorflow":
            done = write_folder(
                wanted.out, chosen.loaded, names, strip=wanted.strip, force=wanted.force
            )
            count, size_bytes, left_out = done.variables, done.size_bytes, done.left_out
        else:
            with writing_whole(wanted.out, replace=wanted.force) as file:
                count = write(file, state, chosen, wanted.strip)
            size_bytes = wanted.out.stat().st_size
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
        tensors=count,
        size_bytes=size_bytes,
        passed_over=chosen.passed_over,
        newer_in_memory=newer_in_memory(layout, run_id, chosen) if wanted.step is None else None,
        ranks=chosen.loaded.world,
        left_out=left_out,
    )


def _is_pt(wanted: Wanted) -> bool:
    return wanted.to is None and wanted.out.suffix == ".pt"


def _check_wanted(wanted: Wanted, layout: RunLayout) -> None:
    """Refuse what cannot be before gigabytes are read."""
    out = wanted.out
    if wanted.to is None and out.suffix not in _SUFFIXES:
        raise SettingsError(
            f"{out}: the ending says which format is wanted, and it is none of "
            f"{' and '.join(_SUFFIXES)}.\nName it {out.stem or 'out'}.safetensors, which needs "
            f"no framework to be read, or {out.stem or 'out'}.pt for torch.load. Or give a folder, "
            "and --to tensorflow."
        )
    if wanted.strip and len(wanted.only) != 1:
        raise SettingsError(
            "--strip drops the name of one state from the names of its tensors.\n"
            "Say of which: --only model --strip"
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
    if wanted.to == "tensorflow":
        check_folder(out, force=wanted.force)
        return
    if out.is_dir():
        raise FolderError(f"{out}: this is a folder.\nName a file in it: {out / 'out'}{out.suffix}")
    if out.exists() and not wanted.force:
        raise _is_taken(out)


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


# -- .pt ------------------------------------------------------------------------

_Write = Callable[[IO[bytes], dict[str, Any], Chosen, bool], int]


def _torch_writer() -> _Write:
    try:
        from holdfast.torch import pt_file
    except ImportError as error:
        reason = error.__cause__ or error  # the adapter has words of its own
        raise HoldfastError(
            f"a .pt file needs PyTorch, which cannot be imported here ({reason}).\n"
            "pip install 'holdfast[torch]', or export to a .safetensors file, which needs none."
        ) from error

    def write(file: IO[bytes], state: dict[str, Any], chosen: Chosen, strip: bool) -> int:
        loaded = chosen.loaded
        names = NamedTensors(loaded.plan.specs)
        for name, encoded in state.items():
            names.walk(encoded, name)
        read = pt_file.tensor_reader(loaded.plan.specs, loaded.data)
        plain = {name: to_plain(encoded, read) for name, encoded in state.items()}
        pt_file.write_pt(file, next(iter(plain.values())) if strip else plain)
        return len(names.names)

    return write


# -- .safetensors -----------------------------------------------------------------


def _write_safetensors(file: IO[bytes], state: dict[str, Any], chosen: Chosen, strip: bool) -> int:
    loaded = chosen.loaded
    specs = loaded.plan.specs
    # A state that is a tensor itself has no prefix to drop, and keeps its name.
    named = NamedTensors(specs, prefix=f"{next(iter(state))}." if strip else "")
    tree = {name: named.walk(encoded, name) for name, encoded in state.items()}
    # Large items first, so that each tensor is aligned although there are no gaps.
    order = sorted(named.names, key=lambda name: (-_item_bytes(specs[named.names[name]]), name))
    entries = [(name, specs[named.names[name]]) for name in order]
    file.write(_header(entries, _metadata(loaded, tree, entries)))
    total, done = sum(spec.size_bytes for _, spec in entries), 0
    for name in order:
        for piece in _pieces(loaded.data(named.names[name])):
            file.write(piece)
            done += piece.nbytes
            if done * 2 >= total:
                pass_point("export-half-written")
    return len(order)


def _item_bytes(spec: TensorSpec) -> int:
    return 1 if spec.stored_as == "U8" else spec.item_bytes


def _is_uint8(spec: TensorSpec) -> bool:
    return spec.dtype.removeprefix("scalar ") in ("uint8", "|u1")


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def _metadata(
    loaded: Loaded, tree: dict[str, Any], entries: list[tuple[str, TensorSpec]]
) -> dict[str, str]:
    """All that is no tensor: safetensors has room for text, so it is JSON."""
    head = loaded.head
    about = {key: head[key] for key in ("step", "attempt", "at_turn", "metrics") if key in head}
    raw = {name: s.dtype for name, s in entries if s.stored_as == "U8" and not _is_uint8(s)}
    return {
        # Readers of other projects ask for it.
        "format": "pt" if any(spec.kind == "torch" for _, spec in entries) else "np",
        "holdfast": json.dumps(about),
        "holdfast.state": json.dumps(tree),
        "holdfast.dtypes": json.dumps(raw),  # of what is stored as plain bytes
    }


def _header(entries: list[tuple[str, TensorSpec]], metadata: dict[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, spec in entries:
        end = position + spec.size_bytes
        table[name] = {
            "dtype": spec.stored_as,
            "shape": spec.stored_shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    padded = -(-len(text) // 8) * 8
    return padded.to_bytes(8, "little") + text.ljust(padded)
