"""The adapter for PyTorch: the only file that imports it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from holdfast._errors import StateMismatch, missing_framework
from holdfast._store.format.image import STORED_AS, TensorSpec

try:
    import torch
except ImportError as error:
    raise missing_framework("torch", "PyTorch") from error

from holdfast.torch.flat import flat_state as flat_state
from holdfast.torch.scaler import is_object as is_object
from holdfast.torch.scaler import knows_better as knows_better
from holdfast.torch.scaler import load_object as load_object
from holdfast.torch.scaler import object_state as object_state
from holdfast.torch.still import Still

if TYPE_CHECKING:
    from holdfast.torch.launch import init_process_group as init_process_group

KIND = "torch"
GENERATOR = "torch"  # the name of its global generator
_SEED_MASK = (1 << 63) - 1
# Classes whose objects are tensors and nothing more, if they are of no class derived from them.
EXACT_TYPES = (torch.Tensor, torch.nn.Parameter)


def __getattr__(name: str) -> Any:
    # On first use: a run of one process needs nothing of it.
    if name != "init_process_group":
        raise AttributeError(f"module 'holdfast.torch' has no attribute {name!r}")
    from holdfast.torch import launch

    return launch.init_process_group


def is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def is_sharded(value: object) -> bool:
    """Whether a tensor is in parts on several ranks, of which this one holds its own."""
    return isinstance(value, _sharded_types())


def _sharded_types() -> tuple[type, ...]:
    # Whoever has a DTensor has imported its module; 2.4 has it under the second name.
    for name in ("torch.distributed.tensor", "torch.distributed._tensor"):
        found = getattr(sys.modules.get(name), "DTensor", None)
        if found is not None:
            return (found,)
    return ()


def part_here(value: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this rank holds; of any other tensor all of it."""
    return value._local_tensor if is_sharded(value) else value  # type: ignore[attr-defined]


def sharding() -> ModuleType:
    """What knows how; imported where it is needed, as it takes half of torch.distributed along."""
    from holdfast.torch import shards

    return shards


def check_sharded(dtype: str) -> None:
    """ValueError if a stored sharded tensor of this type cannot be put together here."""
    _dtype(dtype)
    try:
        sharding()
    except (ImportError, AttributeError) as error:  # built without torch.distributed
        raise ValueError(f"this torch has no sharded tensors ({error})") from error


def alias_key(value: torch.Tensor) -> Hashable | None:
    """Equal for two names of the same memory, seen in the same way (tied weights)."""
    if value.layout is not torch.strided:
        return None
    address, dtype = value.data_ptr(), value.dtype
    if address == 0:  # empty, or on the meta device
        return None
    if dtype.is_complex:
        return (address, dtype, value.shape, value.stride(), value.is_conj(), value.device)
    return (address, dtype, value.shape, value.stride(), value.is_neg(), value.device)


def still(tensors: Sequence[torch.Tensor]) -> Still:
    """What knows again where tensors are, and of which form."""
    return Still(tensors)


def raw_address(value: torch.Tensor) -> int:
    """Where the bytes of a tensor are in C order, if they are in this process; else 0."""
    in_order = value.device.type == "cpu" and value.is_contiguous() and not value.is_neg()
    if not in_order or value.is_conj():
        return 0
    return value.data_ptr()


def spec(name: str, value: torch.Tensor) -> TensorSpec:
    if value.layout is not torch.strided:
        raise ValueError(
            f"a tensor of layout {value.layout} cannot be stored; use value.to_dense()."
        )
    if value.is_meta:
        raise ValueError("a tensor on the meta device has no values to store.")
    if value.is_quantized:
        raise ValueError("a quantized tensor cannot be stored; store its int_repr() and scales.")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype.rstrip("0123456789") in ("bits", "int", "uint") and value.element_size() == 1:
        _check_whole_bytes(value, dtype)
    contiguous = value.is_contiguous()
    return TensorSpec(
        name=name,
        kind=KIND,
        dtype=dtype,
        stored_as=STORED_AS.get(dtype, "U8"),
        shape=tuple(value.shape),
        strides=None if contiguous else tuple(value.stride()),
        item_bytes=value.element_size(),
        size_bytes=value.numel() * value.element_size(),
        device="" if value.device.type == "cpu" else str(value.device),
    )


def _check_whole_bytes(value: torch.Tensor, dtype: str) -> None:
    if dtype not in ("int8", "uint8"):
        raise ValueError(f"a tensor of dtype {value.dtype} cannot be stored; view it as uint8.")


def encode_other(value: object) -> dict[str, str] | None:
    if isinstance(value, torch.dtype):
        return {"$torch.dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$torch.device": str(value)}
    return None


def decode_other(tag: str, value: str) -> torch.dtype | torch.device:
    try:
        return _dtype(value) if tag == "$torch.dtype" else torch.device(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise StateMismatch(
            f"the checkpoint holds a {tag[1:]} {value!r}, which this torch lacks."
        ) from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return found


def item_bytes(dtype: str) -> int:
    """The size of one item; ValueError if there is no such type here."""
    return _dtype(dtype).itemsize


def destinations(
    buffer: Any, places: Sequence[tuple[TensorSpec, int]], start: int
) -> list[torch.Tensor]:
    """Where each tensor goes: views of the mapping, made once and used for every snapshot."""
    base = torch.frombuffer(buffer, dtype=torch.uint8)
    return [_typed(base[start + at : start + at + s.size_bytes], s) for s, at in places]


def _typed(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if spec.size_bytes == 0:
        return torch.empty(spec.shape, dtype=_dtype(spec.dtype))
    return raw.view(_dtype(spec.dtype)).view(spec.shape)


@torch.no_grad()
def copy_all(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy live tensors into the mapping; returns when their values are there."""
    if targets:
        # To detach takes longer than to copy a small one, and only others than these need it.
        plain = [v if type(v) in EXACT_TYPES else v.detach() for v in values]
        torch._foreach_copy_(list(targets), plain)


def copies_by_itself(spec: TensorSpec) -> bool:
    """Whether a tensor is on a device that copies while training goes on."""
    return spec.device.startswith("cuda")


def device_copies(
    buffer: Any, places: Sequence[tuple[TensorSpec, int]], slots: Sequence[int]
) -> Any:
    """What copies such tensors into the slots of an arena."""
    from holdfast.torch.device import Devices

    return Devices(buffer, places, slots)


def bytes_of(value: torch.Tensor) -> memoryview:
    """A tensor's bytes in C order, on the CPU."""
    flat = part_here(value).detach().cpu().resolve_conj().resolve_neg().contiguous()
    size_bytes = flat.numel() * flat.element_size()
    if size_bytes == 0:
        return memoryview(b"")
    array = (ctypes.c_char * size_bytes).from_address(flat.data_ptr())
    array.owner = flat  # type: ignore[attr-defined]  # the view lives as long as its tensor
    return memoryview(array).cast("B")


def borrow(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    """A tensor that shares `data`: only to be copied from."""
    if spec.size_bytes == 0:
        return torch.empty(spec.shape, dtype=_dtype(spec.dtype))
    return _typed(torch.frombuffer(data, dtype=torch.uint8), spec)


def own(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    """A new tensor with the stored values and layout, on the device it was on."""
    fresh = _own_on_cpu(spec, data)
    if not spec.device:
        return fresh
    try:
        return fresh.to(spec.device)
    except (RuntimeError, AssertionError):  # there is no such device here; whoever loads it decides
        return fresh


def _own_on_cpu(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    dtype = _dtype(spec.dtype)
    values = borrow(spec, data)
    if spec.strides is None:
        return torch.empty(spec.shape, dtype=dtype).copy_(values)
    for axis in _repeated(spec.shape, spec.strides):
        values = values.narrow(axis, 0, 1)
    fresh = torch.empty_strided(values.shape, spec.strides, dtype=dtype)
    return fresh.copy_(values).expand(spec.shape)


def _repeated(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions along which an expanded tensor shows the same memory: copy_ refuses them."""
    pairs = enumerate(zip(shape, strides, strict=True))
    return [axis for axis, (size, stride) in pairs if size > 1 and stride == 0]


@torch.no_grad()
def load_in_place(live: object, spec: TensorSpec, data: memoryview) -> bool:
    if not isinstance(live, torch.Tensor) or live.dtype != _dtype(spec.dtype):
        return False
    if tuple(live.shape) != spec.shape:
        return False
    target, values = live.detach(), borrow(spec, data)
    repeated = _repeated(live.shape, live.stride())
    if not set(repeated) <= set(_repeated(spec.shape, spec.strides) if spec.strides else ()):
        return False  # memory that was told apart would become one
    for axis in repeated:
        target, values = target.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
    target.copy_(values)
    return True


def is_generator(value: object) -> bool:
    return isinstance(value, torch.Generator)


def generator_state(value: torch.Generator) -> torch.Tensor:
    return value.get_state()


def restore_generator(value: torch.Generator, state: torch.Tensor) -> None:
    value.set_state(state)


def _device_modules() -> dict[str, Any]:
    found = {}
    for name in ("cuda", "xpu", "mps"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            found[name] = module
    return found


def is_global(value: object) -> bool:
    """Whether a generator is the one that torch draws from unless told otherwise."""
    return value is torch.default_generator


def global_state() -> torch.Tensor:
    return torch.get_rng_state()


def set_global_state(state: torch.Tensor) -> None:
    torch.set_rng_state(state)


def seed_global(seed: int) -> None:
    """Seed the CPU generator; those of devices are not for data."""
    torch.default_generator.manual_seed(seed & _SEED_MASK)


def reseed(value: torch.Generator, seed: int) -> None:
    """Seed a generator that somebody holds."""
    value.manual_seed(seed & _SEED_MASK)


def generators(*, devices: bool) -> dict[str, Any]:
    """The CPU generator, and those of every device in use if asked for."""
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    for name, module in _device_modules().items() if devices else ():
        if name == "mps":
            states["torch.mps"] = module.get_rng_state()
        elif module.is_initialized():
            states[f"torch.{name}"] = list(module.get_rng_state_all())
    return states


def restore_generators(states: Mapping[str, Any]) -> list[str]:
    """Put the generators back; returns what could not be."""
    lost = []
    torch.set_rng_state(states["torch"])
    modules = _device_modules()
    for key, value in states.items():
        name = key.removeprefix("torch.")
        if key == name or not key.startswith("torch."):
            continue
        module = modules.get(name)
        if module is None:
            lost.append(f"the generators of {name}: there is no such device here")
        elif name == "mps":
            module.set_rng_state(value)
        elif len(value) > module.device_count():
            lost.append(
                f"the generators of {name}: stored for {len(value)} devices, "
                f"there are {module.device_count()}"
            )
        else:
            module.set_rng_state_all(value)
    return lost


def refuse(value: object) -> str | None:
    """What to say of an object whose state cannot be had; None if it can."""
    from holdfast.torch import refusals

    return refusals.refuse(value)


def strict_tensors(value: object) -> dict[str, torch.Tensor] | None:
    """The tensors that a stored state must match, name by name: those of a module."""
    if not isinstance(value, torch.nn.Module):
        return None
    tensors = value.state_dict()
    return {key: item for key, item in tensors.items() if isinstance(item, torch.Tensor)}


def only_tensors(value: object) -> list[torch.Tensor] | None:
    """The tensors of a module whose state is nothing else; None if it is not that."""
    if not isinstance(value, torch.nn.Module):
        return None
    found = list(value.state_dict().values())
    return found if all(isinstance(each, torch.Tensor) for each in found) else None


def copies_what_it_loads(value: object) -> bool:
    """Whether load_state_dict only copies from the tensors it is given."""
    return isinstance(value, torch.nn.Module)


def settle(value: object, stored: Any) -> None:
    """Undo the casts of Optimizer.load_state_dict, which gives moments the parameters' dtype."""
    if not isinstance(value, torch.optim.Optimizer) or not isinstance(stored, dict):
        return
    if stored.get("state"):
        # It has stepped, in the life before: a scheduler that steps first has nothing to warn of.
        value._opt_called = True  # type: ignore[attr-defined]  # set by its schedulers
    parameters = [p for group in value.param_groups for p in group["params"]]
    indices = [i for group in stored.get("param_groups", []) for i in group["params"]]
    for index, parameter in zip(indices, parameters, strict=False):
        for key, item in stored.get("state", {}).get(index, {}).items():
            now = value.state.get(parameter, {}).get(key)
            if not isinstance(item, torch.Tensor) or not isinstance(now, torch.Tensor):
                continue
            if now.dtype != item.dtype:
                value.state[parameter][key] = item.to(now.device)


def partners(value: object) -> Any:
    """What is now where a stored state will go, if any of it may be sharded; else None."""
    has_state = callable(getattr(value, "state_dict", None))  # those of other frameworks have none
    return sharding().partners(value) if _sharded_types() and has_state else None


def receiving() -> ModuleType:
    """What takes a stored state in by all cores; imported by whoever has one."""
    from holdfast.torch import receive

    return receive
