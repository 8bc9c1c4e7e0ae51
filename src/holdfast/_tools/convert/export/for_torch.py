"""A checkpoint for torch: a .pt file, or a folder of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import IO, Any

from holdfast._errors import HoldfastError, SettingsError, install_command
from holdfast._tools.convert.export.chosen import Selected, Written
from holdfast._tools.convert.export.folder import check_folder, size_of, writing_folder
from holdfast._tools.convert.export.stored_tree import NamedTensors, to_plain


def load_torch(what: str, instead: str) -> ModuleType:
    """What writes its files."""
    try:
        from holdfast.torch import checkpoints
    except ImportError as error:
        reason = error.__cause__ or error  # the adapter has words of its own
        raise HoldfastError(
            f"{what} needs PyTorch, which cannot be imported here ({reason}).\n"
            f"{install_command('torch')}, or {instead}"
        ) from error
    return checkpoints


def load_for_pt() -> ModuleType:
    return load_torch("a .pt file", "export to a .safetensors file, which needs none.")


def write_pt(file: IO[bytes], selected: Selected, *, strip: bool) -> int:
    """Write a dict with the state of each object; returns the number of tensors."""
    from holdfast.torch import pt_file

    plain = as_values(selected)
    pt_file.write_pt(file, next(iter(plain.values())) if strip else plain)
    return _count(selected)


def as_values(selected: Selected) -> dict[str, Any]:
    """The states as containers, numbers and tensors of torch, on the CPU."""
    from holdfast.torch import pt_file

    loaded = selected.loaded
    read = pt_file.tensor_reader(loaded.plan.specs, loaded.data)
    return {name: to_plain(encoded, read) for name, encoded in selected.state.items()}


def _count(selected: Selected) -> int:
    names = NamedTensors(selected.loaded.plan.specs)
    for name, encoded in selected.state.items():
        names.walk(encoded, name)
    return len(names.names)


# -- torch.distributed.checkpoint ------------------------------------------------------


def check_dcp(out: Path, *, force: bool) -> None:
    """Refuse what cannot be before gigabytes are read."""
    load_torch("--to dcp", "export to a .safetensors file, which needs none.")
    check_folder(out, force=force, what="DCP", is_ours=_is_ours)


def _is_ours(name: str) -> bool:
    return name == ".metadata" or name.endswith(".distcp")


def write_dcp(out: Path, selected: Selected, *, strip: bool, force: bool) -> Written:
    """Write a folder for torch.distributed.checkpoint.load, on any number of ranks."""
    from holdfast.torch import checkpoints

    plain = as_values(selected)
    if strip:
        (plain,) = plain.values()
        if not isinstance(plain, dict):
            raise SettingsError(
                f"--strip: {selected.names[0]} has no parts with names.\n"
                "Leave out --strip: what DCP writes has a name."
            )
    with writing_folder(out, force=force) as folder:
        try:
            checkpoints.write_dcp(folder, plain)
        except checkpoints.Unwritable as error:
            raise HoldfastError(
                f"{', '.join(selected.names)}: torch.distributed.checkpoint cannot write it "
                f"({error}).\nExport to a .pt file, or fewer states: --only NAME."
            ) from error
        size_bytes = size_of(folder)
    return Written(_count(selected), size_bytes)
