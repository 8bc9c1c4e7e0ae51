"""The formats of an export: what each refuses, and how it is written.

Every tensor is written under its plain name. A tensor that the state has under two names is stored
once; here it has both names. Sharded tensors are put together for readers outside of the run.

A file or folder has its name only when all of it is written and durable. Frameworks are imported
only by the format that needs them; a .safetensors file needs none.
"""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from holdfast._adapters.registry import adapter_of
from holdfast._errors import (
    FolderError,
    HoldfastError,
    SettingsError,
    install_command,
)
from holdfast._state.capture_cache import OBJECTS
from holdfast._state.restore import Assembler, decode_scalar, kind_of
from holdfast._store.commit.fault_points import fault_point
from holdfast._store.folder.atomic import writing_folder, writing_whole
from holdfast._store.format.image import TensorSpec
from holdfast._store.format.tree import Pairs, TreeVisitor, tensor_leaves
from holdfast._store.read.verify import Loaded
from holdfast._tools.convert.foreign import TRAINER_FILES, TRAINER_STATE, load_tensorflow

Written = tuple[int, list[str]]  # how many tensors, and what the format has no place for

SUFFIXES = {".safetensors": "safetensors", ".pt": "torch"}
_CHUNK_BYTES = 16 << 20
_TENSORFLOW_FILES = ("checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001")
_MODEL = "model"
_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"
# The files of a model or its tokenizer, as in a folder of Hugging Face.
_OF_A_MODEL = (
    *(_CONFIG, "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt"),
    *("preprocessor_config.json", "processor_config.json", "sentencepiece.bpe.model"),
    *("special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer.model"),
    *("tokenizer_config.json", "vocab.json", "vocab.txt"),
)
_HUGGINGFACE_FILES = (_WEIGHTS, TRAINER_STATE, *TRAINER_FILES.values(), *_OF_A_MODEL)
_MOST_BITS = 2032  # what torch.load(…, weights_only=True) can read
_NOT_FOR_TORCH = (
    ", which torch does not load.\nExport to a .safetensors file, which has it as JSON."
)


@dataclass(frozen=True)
class ExportRequest:
    out: Path
    step: int | None = None
    only: tuple[str, ...] = ()
    strip: bool = False
    force: bool = False
    to: str | None = None  # the format; else the ending of `out` says it
    config: Path | None = None  # of the model, for a Hugging Face folder


@dataclass(frozen=True)
class Selected:
    """The states to be written, with every checksum verified and every tensor whole."""

    loaded: Loaded
    names: list[str]

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.loaded.head["tree"]["state"]
        return {name: found[name] for name in self.names}

    def tensor_names(self, *states: str, prefix: str = "") -> dict[str, int]:
        """The names of the tensors in some of the states, each with its number."""
        named = _NamedTensors(self.loaded.plan.specs, prefix)
        for name in states:
            named.visit(self.state[name], name)
        return named.names


class _NamedTensors(TreeVisitor):
    """Puts names in the place of the tensors' numbers; `names` has the number of each."""

    def __init__(self, specs: Sequence[TensorSpec], prefix: str = "") -> None:
        self._specs = specs
        self._prefix = prefix  # dropped from every name
        self.names: dict[str, int] = {}

    def tensor(self, number: int, path: str) -> dict[str, str]:
        stored = self._specs[number].name
        # Two paths can read alike (`a.b` as a key, and `b` in `a`); the stored names differ.
        # Another path to this tensor gets a name of its own.
        is_own = stored == path or stored.startswith(f"{path}~")
        wanted = (stored if is_own else path).removeprefix(self._prefix)
        name, count = wanted, 1
        while name == "__metadata__" or self.names.get(name, number) != number:
            count += 1
            name = f"{wanted}~{count}"
        self.names[name] = number
        return {"$t": name}


class _TorchValues(TreeVisitor):
    """The tree as dicts, lists, tuples, sets and values that torch loads without running code."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        self._read = read

    def tensor(self, number: int, _: str) -> Any:
        return self._read(number)

    def mapping(self, encoded: dict[str, Any], pairs: Pairs) -> Any:
        decoded = [(_hashable(self.visit(key, "")), item) for key, item in pairs]
        if "$dict" in encoded:
            return dict(decoded)
        ordered = OrderedDict(decoded)
        if "$metadata" in encoded:  # the versions of a module's state
            metadata = self.visit(encoded["$metadata"], "")
            ordered._metadata = metadata  # type: ignore[attr-defined]  # torch's own
        return ordered

    def container(self, tag: str, inner: Any) -> Any:
        if tag == "$tuple":
            return tuple(inner)
        if tag in ("$set", "$frozenset"):  # torch loads no frozenset
            return {_hashable(item) for item in inner}
        return inner

    def scalar(self, tag: str, inner: Any) -> Any:
        if tag.startswith("$tensorflow."):
            raise HoldfastError(f"the state has a value of TensorFlow{_NOT_FOR_TORCH}")
        value = decode_scalar(tag, inner)
        if tag == "$int" and value.bit_length() > _MOST_BITS:
            bits = value.bit_length()
            raise HoldfastError(f"the state has a number of {bits} bits{_NOT_FOR_TORCH}")
        return value


def _hashable(found: Any) -> Any:
    try:
        hash(found)
    except TypeError as error:
        what = "the state has a frozenset as a key or in a set"
        raise HoldfastError(f"{what}{_NOT_FOR_TORCH}") from error
    return found


def put_together(loaded: Loaded, names: Collection[str]) -> Loaded:
    """The same state, with whole tensors where the ranks have stored parts of them."""
    states = loaded.head["tree"]["state"]
    sharded = [
        (path, kind_of(leaf["$shard"]))
        for name in names
        for path, leaf in tensor_leaves(states[name], name)
        if "$shard" in leaf
    ]
    if not sharded:
        return loaded
    if of_torch := [path for path, kind in sharded if kind == "torch"]:
        what = f"{of_torch[0]} is sharded, and putting it together"
        _load_torch(what, "export the states that are not: --only NAME.")
    joiner = _Joiner(loaded)
    whole = {name: joiner.visit(states[name], name) for name in names}
    tree = {**loaded.head["tree"], "state": {**states, **whole}}
    return replace(
        loaded,
        plan=replace(loaded.plan, specs=(*loaded.plan.specs, *joiner.specs)),
        head={**loaded.head, "tree": tree},
        tensors=(*loaded.tensors, *joiner.views),
    )


class _Joiner(TreeVisitor):
    """Makes whole tensors, with numbers after those of the stored ones."""

    def __init__(self, loaded: Loaded) -> None:
        self._assembler = Assembler(loaded)
        self._first = len(loaded.plan.specs)
        self._known: dict[int, int] = {}  # the number of a whole tensor, by that of rank 0's part
        self.specs: list[TensorSpec] = []
        self.views: list[memoryview] = []

    def shard(self, shard: dict[str, Any], path: str) -> dict[str, int]:
        part = shard["t"]
        if part in self._known:  # tied weights stay one tensor
            return {"$t": self._known[part]}
        number = self._first + len(self.specs)
        if kind_of(shard) == "torch":
            adapter = adapter_of("torch")
            value = self._assembler.value({"$shard": shard}, None, path)
            spec, view = adapter.spec(path, value), adapter.bytes_of(value)
        else:
            spec, view = self._assembler.whole_bytes(shard, path)
        self.specs.append(spec)
        self.views.append(view)
        if part is not None:
            self._known[part] = number
        return {"$t": number}


# -- files and folders ------------------------------------------------------------


def is_taken(out: Path) -> FolderError:
    return FolderError(
        f"{out}: this file exists already; it was left as it is.\n"
        "To replace it: --force. Or choose another name."
    )


def _check_file(request: ExportRequest) -> None:
    out = request.out
    if out.is_dir():
        suffix = out.suffix or next(s for s, name in SUFFIXES.items() if name == request.to)
        raise FolderError(f"{out}: this is a folder.\nName a file in it: {out / 'out'}{suffix}")
    if out.exists() and not request.force:
        raise is_taken(out)


def _check_folder(request: ExportRequest, what: str, is_ours: Callable[[str], bool]) -> None:
    out = request.out
    if not (out.exists() or out.is_symlink()):
        return
    if not request.force:
        raise FolderError(
            f"{out}: is there already, and was left as it is.\n"
            "To replace what an export has left there: --force. Or choose another name."
        )
    if not out.is_dir() or not all(is_ours(each.name) for each in out.iterdir()):
        raise FolderError(
            f"{out}: holds what no export to {what} has left there, and was left as it is.\n"
            "Choose another name."
        )


def _write_safetensors(request: ExportRequest, selected: Selected) -> Written:
    """Tensors under plain names, and all else as JSON."""
    loaded, state = selected.loaded, selected.state
    # A state that is a tensor itself has no prefix to drop, and keeps its name.
    prefix = f"{next(iter(state))}." if request.strip else ""
    named = _NamedTensors(loaded.plan.specs, prefix)
    tree = {name: named.visit(encoded, name) for name, encoded in state.items()}
    specs = [(name, loaded.plan.specs[number]) for name, number in named.names.items()]
    head = loaded.head
    about = {key: head[key] for key in ("step", "attempt", "at_turn", "metrics") if key in head}
    metadata = {
        # Readers of other projects ask for it.
        "format": "pt" if any(spec.kind == "torch" for _, spec in specs) else "np",
        "holdfast": json.dumps(about),
        "holdfast.state": json.dumps(tree),
        # Of the tensors that are stored as plain bytes.
        "holdfast.dtypes": json.dumps({name: spec.dtype for name, spec in specs if _is_raw(spec)}),
    }
    with writing_whole(request.out, replace=request.force) as file:
        _write_tensors(file, loaded, named.names, metadata)
    return len(named.names), []


def _write_tensors(
    file: IO[bytes], loaded: Loaded, names: Mapping[str, int], metadata: dict[str, str]
) -> None:
    specs = loaded.plan.specs
    # Large items first, so that each tensor is aligned although there are no gaps.

    def item_bytes(name: str) -> int:
        spec = specs[names[name]]
        return 1 if spec.stored_as == "U8" else spec.item_bytes

    order = sorted(names, key=lambda name: (-item_bytes(name), name))
    table: dict[str, Any] = {"__metadata__": metadata}
    total = done = 0
    for name in order:
        spec = specs[names[name]]
        table[name] = {
            "dtype": spec.stored_as,
            "shape": spec.stored_shape,
            "data_offsets": [total, total + spec.size_bytes],
        }
        total += spec.size_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    padded = -(-len(text) // 8) * 8
    file.write(padded.to_bytes(8, "little") + text.ljust(padded))
    for name in order:
        data = loaded.data(names[name])
        for start in range(0, data.nbytes, _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            file.write(chunk)
            done += chunk.nbytes
            if done * 2 >= total:
                fault_point("export-half-written")


def _is_raw(spec: TensorSpec) -> bool:
    """Whether safetensors lacks the type, so that only the bytes are written."""
    return spec.stored_as == "U8" and spec.dtype.removeprefix("scalar ") not in ("uint8", "|u1")


def _load_torch(
    what: str, instead: str = "export to a .safetensors file, which needs none."
) -> None:
    try:
        from holdfast.torch import checkpoints  # noqa: F401  only whether it can be imported
    except ImportError as error:
        reason = error.__cause__ or error  # the adapter has words of its own
        raise HoldfastError(
            f"{what} needs PyTorch, which cannot be imported here ({reason}).\n"
            f"{install_command('torch')}, or {instead}"
        ) from error


def _check_pt(request: ExportRequest) -> None:
    _check_file(request)
    _load_torch("a .pt file")


def _write_pt(request: ExportRequest, selected: Selected) -> Written:
    """A dict with the state of each object."""
    from holdfast.torch import pt_file

    with writing_whole(request.out, replace=request.force) as file:
        plain = _as_values(selected)
        pt_file.write_pt(file, next(iter(plain.values())) if request.strip else plain)
    return len(selected.tensor_names(*selected.names)), []


def _as_values(selected: Selected) -> dict[str, Any]:
    """The states as containers, numbers and tensors of torch, on the CPU."""
    from holdfast.torch import pt_file

    loaded = selected.loaded
    values = _TorchValues(pt_file.tensor_reader(loaded.plan.specs, loaded.data))
    return {name: values.visit(encoded, "") for name, encoded in selected.state.items()}


def _check_dcp(request: ExportRequest) -> None:
    _load_torch("--to dcp")
    _check_folder(request, "DCP", lambda name: name == ".metadata" or name.endswith(".distcp"))


def _write_dcp(request: ExportRequest, selected: Selected) -> Written:
    """A folder for torch.distributed.checkpoint.load, on any number of ranks."""
    from holdfast.torch import checkpoints

    plain = _as_values(selected)
    if request.strip:
        (plain,) = plain.values()
        if not isinstance(plain, dict):
            raise SettingsError(
                f"--strip: {selected.names[0]} has no parts with names.\n"
                "Leave out --strip: what DCP writes has a name."
            )
    with writing_folder(request.out, replace=request.force) as folder:
        try:
            checkpoints.write_dcp(folder, plain)
        except checkpoints.Unwritable as error:
            raise HoldfastError(
                f"{', '.join(selected.names)}: torch.distributed.checkpoint cannot write it "
                f"({error}).\nExport to a .pt file, or fewer states: --only NAME."
            ) from error
    return len(selected.tensor_names(*selected.names)), []


def _check_tensorflow(request: ExportRequest) -> None:
    _check_folder(request, "TensorFlow", lambda name: name in _TENSORFLOW_FILES)
    load_tensorflow()


def _write_tensorflow(request: ExportRequest, selected: Selected) -> Written:
    """The files of tf.train.Checkpoint, in a folder."""
    checkpoints = load_tensorflow()
    loaded, names = selected.loaded, selected.names
    encoded = loaded.head["tree"]["extra"].get(OBJECTS)
    if encoded is None:
        raise HoldfastError(
            "this checkpoint has no graph of TensorFlow's objects: it has no variables of "
            "TensorFlow, or they could not be described when it was stored.\n"
            "Export to a .safetensors file, which takes any state."
        )
    graph = checkpoints.Graph.from_bytes(bytes(loaded.data(encoded["$t"])))

    def holds_tensors(name: str) -> bool:
        start = graph.nodes[0].children.get(name)
        return start is not None and any(graph.nodes[n].tensor for _, n in graph.below(start))

    held = [name for name in names if holds_tensors(name)]
    by_name = {spec.name: number for number, spec in enumerate(loaded.plan.specs)}

    def read(name: str) -> Any:
        spec = loaded.plan.specs[by_name[name]]
        return adapter_of(spec.kind).new_array(spec, loaded.data(by_name[name]))

    with writing_folder(request.out, replace=request.force) as folder:
        written = checkpoints.write_bundle(folder, graph, held, read, strip=request.strip)
        if not written:
            instead = "Leave out --strip: it is a variable itself, and needs its name."
            if not held:
                instead = "Export to a .safetensors file, which takes any state."
            raise HoldfastError(f"{', '.join(names)}: no variable to be written.\n{instead}")
    # Left out: states that are no objects of TensorFlow, and tensors that it does not track.
    left_out = [name for name in names if name not in held]
    for name in held:
        numbers = dict.fromkeys(selected.tensor_names(name).values())
        left_out += [s for n in numbers if (s := loaded.plan.specs[n].name) not in written]
    return len(written), left_out


def _check_huggingface(request: ExportRequest) -> None:
    _check_folder(request, "Hugging Face", lambda name: name in _HUGGINGFACE_FILES)
    _configs(request.config)


def _configs(given: Path | None) -> dict[str, Path]:
    """The further files of the model, by their names in the folder."""
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


def _write_huggingface(request: ExportRequest, selected: Selected) -> Written:
    """The model for from_pretrained; an optimizer, scheduler and scaler as the Trainer has them."""
    name = _model_of(selected, request)
    names = selected.tensor_names(name, prefix=f"{name}.")
    _refuse_unknown(selected, names, name)
    of_trainer = [n for n in selected.names if n in TRAINER_FILES and n != name]
    if of_trainer:
        instead = f"write the model only: --only {name}."
        _load_torch("an optimizer in a Hugging Face folder", instead)
    with writing_folder(request.out, replace=request.force) as folder:
        with (folder / _WEIGHTS).open("wb") as file:
            _write_tensors(file, selected.loaded, names, {"format": "pt"})
        if of_trainer:
            from holdfast.torch import pt_file

            for each, value in _as_values(Selected(selected.loaded, of_trainer)).items():
                with (folder / TRAINER_FILES[each]).open("wb") as file:
                    pt_file.write_pt(file, value)
        head = selected.loaded.head
        position = head["tree"].get("extra", {}).get("position")
        epoch = position.get("epoch", 0) if isinstance(position, dict) else 0
        about = _former_state(request.config)
        about |= {"epoch": float(epoch), "global_step": head["step"]}
        (folder / TRAINER_STATE).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
        for each, source in _configs(request.config).items():
            shutil.copyfile(source, folder / each)
    left_out = [n for n in selected.names if n != name and n not in of_trainer]
    return len(names), left_out


def _model_of(selected: Selected, request: ExportRequest) -> str:
    candidates = [name for name in selected.names if name not in TRAINER_FILES]
    if request.strip or len(candidates) == 1:
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
        if _is_raw(spec):
            raise HoldfastError(
                f"{model}: {name} is of type {spec.dtype}, which no model of Hugging Face may be.\n"
                "Export to a .safetensors file, which has its bytes, or to a .pt file."
            )


def _former_state(given: Path | None) -> dict[str, Any]:
    """The Trainer's own record in the folder that it began with: its batch size, and more."""
    if given is None or not (given / TRAINER_STATE).is_file():
        return {}
    try:
        found = json.loads((given / TRAINER_STATE).read_text())
    except ValueError as error:
        raise HoldfastError(
            f"{given / TRAINER_STATE}: cannot be read ({error}).\nGive --config {given / _CONFIG}."
        ) from error
    return found if isinstance(found, dict) else {}


#: By the name of the format: what refuses it before gigabytes are read, and what writes it.
WRITERS: dict[
    str, tuple[Callable[[ExportRequest], None], Callable[[ExportRequest, Selected], Written]]
] = {
    "safetensors": (_check_file, _write_safetensors),
    "torch": (_check_pt, _write_pt),
    "dcp": (_check_dcp, _write_dcp),
    "huggingface": (_check_huggingface, _write_huggingface),
    "tensorflow": (_check_tensorflow, _write_tensorflow),
}
