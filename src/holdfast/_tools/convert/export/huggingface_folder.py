"""A checkpoint as a folder of Hugging Face: what from_pretrained reads, and its Trainer.

The model is model.safetensors, with the config that was given. Where the run has an optimizer, a
scheduler or a scaler under that name, they lie beside it as the Trainer has them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from holdfast._errors import FolderError, HoldfastError, SettingsError
from holdfast._tools.convert.export.chosen import Selected, Wanted, Written
from holdfast._tools.convert.export.folder import check_folder, size_of, writing_folder
from holdfast._tools.convert.export.for_torch import as_values, load_torch
from holdfast._tools.convert.export.safetensors_file import is_raw, write_named
from holdfast._tools.convert.export.stored_tree import NamedTensors

_MODEL = "model"
_WEIGHTS = "model.safetensors"
_STATE = "trainer_state.json"
_CONFIG = "config.json"
_BESIDE = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
# What a model or its tokenizer is made from, as the folders of models have it.
_OF_A_MODEL = (
    _CONFIG,
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_OURS = (_WEIGHTS, _STATE, *_BESIDE.values(), *_OF_A_MODEL)


def check_huggingface(wanted: Wanted) -> None:
    """Refuse what cannot be before gigabytes are read."""
    check_folder(
        wanted.out, force=wanted.force, what="Hugging Face", is_ours=lambda name: name in _OURS
    )
    _configs(wanted.config)


def _configs(given: Path | None) -> dict[str, Path]:
    """The files that go beside the model, by their names there."""
    if given is None:
        return {}
    found = {name: given / name for name in _OF_A_MODEL if (given / name).is_file()}
    if given.is_file():
        found = {_CONFIG: given}
    if _CONFIG not in found:
        raise FolderError(
            f"{given}: there is no config.json.\n"
            "Give the file, or a folder with it: what model.config.save_pretrained wrote."
        )
    return found


def write_huggingface(wanted: Wanted, selected: Selected) -> Written:
    """Write the folder."""
    name = _model_of(selected, wanted)
    named = NamedTensors(selected.loaded.plan.specs, prefix=f"{name}.")
    named.walk(selected.state[name], name)
    _refuse_unknown(selected, named.names, name)
    beside = [n for n in selected.names if n in _BESIDE and n != name]
    if beside:
        load_torch("an optimizer in a Hugging Face folder", f"write the model only: --only {name}.")
    with writing_folder(wanted.out, force=wanted.force) as folder:
        with (folder / _WEIGHTS).open("wb") as file:
            count = write_named(file, selected.loaded, named.names, {"format": "pt"})
        _write_beside(folder, Selected(selected.loaded, beside))
        about = {**_former_state(wanted.config), **_trainer_state(selected.loaded.head)}
        (folder / _STATE).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
        for each, source in _configs(wanted.config).items():
            shutil.copyfile(source, folder / each)
        size_bytes = size_of(folder)
    left_out = [n for n in selected.names if n != name and n not in beside]
    return Written(count, size_bytes, left_out)


def _model_of(selected: Selected, wanted: Wanted) -> str:
    """The state that is the model: the one that was asked for, or the one of that name."""
    candidates = [name for name in selected.names if name not in _BESIDE]
    if wanted.strip or len(candidates) == 1:
        return candidates[0] if candidates else selected.names[0]
    if _MODEL in candidates:
        return _MODEL
    raise SettingsError(
        f"a Hugging Face folder holds one model, and no state of this run is called {_MODEL}.\n"
        f"Say which it is: --only NAME, one of {', '.join(candidates) or 'none'}."
    )


def _refuse_unknown(selected: Selected, names: dict[str, int], model: str) -> None:
    if not names:
        raise HoldfastError(
            f"{model}: has no tensor, so it is no model.\nSay which state is: --only NAME."
        )
    for name, number in names.items():
        spec = selected.loaded.plan.specs[number]
        if is_raw(spec):
            raise HoldfastError(
                f"{model}: {name} is of type {spec.dtype}, which no model of Hugging Face may be.\n"
                "Export to a .safetensors file, which has its bytes, or to a .pt file."
            )


def _write_beside(folder: Path, selected: Selected) -> None:
    if not selected.names:
        return
    from holdfast.torch import pt_file

    for name, value in as_values(selected).items():
        with (folder / _BESIDE[name]).open("wb") as file:
            pt_file.write_pt(file, value)


def _former_state(given: Path | None) -> dict[str, Any]:
    """What the Trainer noted in the folder that it began with: its batch size, and more."""
    if given is None or not (given / _STATE).is_file():
        return {}
    try:
        found = json.loads((given / _STATE).read_text())
    except ValueError as error:
        raise HoldfastError(
            f"{given / _STATE}: cannot be read ({error}).\nGive --config {given / _CONFIG}."
        ) from error
    return found if isinstance(found, dict) else {}


def _trainer_state(head: dict[str, Any]) -> dict[str, Any]:
    """Where the run stands, as the Trainer reads it; the rest it makes by itself."""
    position = head["tree"].get("extra", {}).get("position")
    epoch = position.get("epoch", 0) if isinstance(position, dict) else 0
    return {"epoch": float(epoch), "global_step": head["step"]}
