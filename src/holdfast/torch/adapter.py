"""The adapter for PyTorch: tensors, modules, optimizers, random generators."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from holdfast._adapters.adapter import (
    Adapter,
    Generators,
    Objects,
    Places,
    Sharding,
)
from holdfast._errors import StateMismatch
from holdfast._store.format.image import STORED_AS, TensorSpec
from holdfast.torch import modules

_SEED_MASK = (1 << 63) - 1


class TorchObjects(Objects):
    flat_state = staticmethod(modules.flat_state)
    copied_into = staticmethod(modules.copied_into)
    loads_exactly = staticmethod(modules.loads_exactly)

    def load_targets(self, value: object) -> Any:
        # Objects of other frameworks have no state_dict().
        if not _sharded_types() or not callable(getattr(value, "state_dict", None)):
            return None
        from holdfast.torch import shards

        return shards.load_targets(value)

    def overrides_state_dict(self, value: object) -> bool:
        # GradScaler.state_dict() asks the device for two numbers, and so waits for all that is
        # queued there. As tensors they are copied like the rest of the state.
        if not isinstance(value, torch.amp.GradScaler):
            return False
        return value.is_enabled() and str(value._device).startswith("cuda")

    def is_object(self, value: object) -> bool:
        return self.overrides_state_dict(value)

    def object_state(self, value: Any) -> dict[str, Any]:
        scale, tracker = value._scale, value._growth_tracker
        if scale is None:
            scale = torch.tensor(value._init_scale, dtype=torch.float32)
        if tracker is None:
            tracker = torch.tensor(value._init_growth_tracker, dtype=torch.int32)
        return {
            "scale": scale,
            "growth_factor": value._growth_factor,
            "backoff_factor": value._backoff_factor,
            "growth_interval": value._growth_interval,
            "_growth_tracker": tracker,
        }

    def load_object(self, value: Any, state: dict[str, Any]) -> None:
        scale, tracker = float(state["scale"]), int(state["_growth_tracker"])
        value.load_state_dict({**state, "scale": scale, "_growth_tracker": tracker})
        if value._scale is None:  # now, not at the first step: the layout must not change
            value._lazy_init_scale_growth_tracker(torch.device(value._device))

    def refuse(self, value: object) -> str | None:
        from holdfast.torch import prepared

        if prepared.lacks_state(value):
            return (
                "a DataLoader that Accelerate has prepared cannot be stored.\n"
                "Take it out of the state, and go through it with "
                "`for batch in run.batches(loader)`, which keeps its position."
            )
        if sys.modules.keys().isdisjoint(("torch.distributed.fsdp", "torch.distributed.optim")):
            return None
        from holdfast.torch import ddp

        return ddp.refuse(value)

    def strict_tensors(self, value: object) -> dict[str, torch.Tensor] | None:
        if not isinstance(value, torch.nn.Module):
            return None
        tensors = value.state_dict()
        return {key: item for key, item in tensors.items() if isinstance(item, torch.Tensor)}

    def copies_what_it_loads(self, value: object) -> bool:
        return isinstance(value, torch.nn.Module)

    def after_load(self, value: object, stored: Any) -> None:
        # Optimizer.load_state_dict casts moments to the parameters' dtype: undo that.
        if not isinstance(value, torch.optim.Optimizer) or not isinstance(stored, dict):
            return
        if stored.get("state"):
            # It stepped in the previous attempt: a scheduler that steps first must not warn.
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


class TorchGenerators(Generators):
    global_generator = "torch"

    def is_generator(self, value: object) -> bool:
        return isinstance(value, torch.Generator)

    def generator_state(self, value: torch.Generator) -> torch.Tensor:
        return value.get_state()

    def restore_generator(self, value: torch.Generator, state: torch.Tensor) -> None:
        value.set_state(state)

    def reseed(self, value: torch.Generator, seed: int) -> None:
        value.manual_seed(seed & _SEED_MASK)

    def is_global(self, value: object) -> bool:
        return value is torch.default_generator

    def global_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_global_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def seed_global(self, seed: int) -> None:
        # Those of devices are not for data.
        torch.default_generator.manual_seed(seed & _SEED_MASK)

    def states(self, *, devices: bool) -> dict[str, Any]:
        states: dict[str, Any] = {"torch": torch.get_rng_state()}
        for name, module in _device_modules().items() if devices else ():
            if name == "mps":
                states["torch.mps"] = module.get_rng_state()
            elif module.is_initialized():
                states[f"torch.{name}"] = list(module.get_rng_state_all())
        return states

    def restore_states(self, states: Mapping[str, Any]) -> list[str]:
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


class TorchAdapter(Adapter):
    kind = "torch"
    objects = TorchObjects()
    generators = TorchGenerators()
    exact_types = (torch.Tensor, torch.nn.Parameter)

    def is_array(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def alias_key(self, value: torch.Tensor) -> Hashable | None:
        if value.layout is not torch.strided:
            return None
        address, dtype = value.data_ptr(), value.dtype
        if address == 0:  # empty, or on the meta device
            return None
        if dtype.is_complex:
            return (address, dtype, value.shape, value.stride(), value.is_conj(), value.device)
        return (address, dtype, value.shape, value.stride(), value.is_neg(), value.device)

    def spec(self, name: str, value: torch.Tensor) -> TensorSpec:
        if value.layout is not torch.strided:
            raise ValueError(
                f"a tensor of layout {value.layout} cannot be stored; use value.to_dense()."
            )
        if value.is_meta:
            raise ValueError("a tensor on the meta device has no values to store.")
        if value.is_quantized:
            raise ValueError(
                "a quantized tensor cannot be stored; store its int_repr() and scales."
            )
        dtype = str(value.dtype).removeprefix("torch.")
        is_bits = dtype.rstrip("0123456789") in ("bits", "int", "uint")
        if is_bits and value.element_size() == 1 and dtype not in ("int8", "uint8"):
            raise ValueError(f"a tensor of dtype {value.dtype} cannot be stored; view it as uint8.")
        contiguous = value.is_contiguous()
        return TensorSpec(
            name=name,
            kind=self.kind,
            dtype=dtype,
            stored_as=STORED_AS.get(dtype, "U8"),
            shape=tuple(value.shape),
            strides=None if contiguous else tuple(value.stride()),
            item_bytes=value.element_size(),
            size_bytes=value.numel() * value.element_size(),
            device="" if value.device.type == "cpu" else str(value.device),
        )

    def item_bytes(self, dtype: str) -> int:
        return dtype_of(dtype).itemsize

    def bytes_of(self, value: torch.Tensor) -> memoryview:
        flat = self.part_here(value).detach().cpu().resolve_conj().resolve_neg().contiguous()
        size_bytes = flat.numel() * flat.element_size()
        if size_bytes == 0:
            return memoryview(b"")
        array = (ctypes.c_char * size_bytes).from_address(flat.data_ptr())
        array.owner = flat  # type: ignore[attr-defined]  # the view lives as long as its tensor
        return memoryview(array).cast("B")

    def part_here(self, value: torch.Tensor) -> torch.Tensor:
        return value._local_tensor if self.is_sharded(value) else value  # type: ignore[attr-defined]  # DTensor

    def raw_address(self, value: torch.Tensor) -> int:
        in_order = value.device.type == "cpu" and value.is_contiguous()
        return value.data_ptr() if in_order and not (value.is_neg() or value.is_conj()) else 0

    def destinations(self, buffer: Any, places: Places, start: int) -> list[torch.Tensor]:
        base = torch.frombuffer(buffer, dtype=torch.uint8)
        return [typed(base[start + at : start + at + s.size_bytes], s) for s, at in places]

    @torch.no_grad()
    def copy_all(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        if targets:
            # Detaching takes longer than copying a small tensor, and only derived classes need it.
            plain = [v if type(v) in self.exact_types else v.detach() for v in values]
            torch._foreach_copy_(list(targets), plain)

    def is_frozen(self, value: torch.Tensor) -> bool:
        return isinstance(value, torch.nn.Parameter) and not value.requires_grad

    def copies_by_itself(self, spec: TensorSpec) -> bool:
        return spec.device.startswith("cuda")

    def device_copies(self, buffer: Any, places: Places, slots: Sequence[int]) -> Any:
        from holdfast.torch.device import Devices

        return Devices(buffer, places, slots)

    def read_array(self, spec: TensorSpec, data: memoryview) -> torch.Tensor:
        if spec.size_bytes == 0:
            return torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
        return typed(torch.frombuffer(data, dtype=torch.uint8), spec)

    def new_array(self, spec: TensorSpec, data: memoryview) -> torch.Tensor:
        fresh = self._own_on_cpu(spec, data)
        if not spec.device:
            return fresh
        try:
            return fresh.to(spec.device)
        except (RuntimeError, AssertionError):  # no such device here: the object decides
            return fresh

    def _own_on_cpu(self, spec: TensorSpec, data: memoryview) -> torch.Tensor:
        dtype = dtype_of(spec.dtype)
        values = self.read_array(spec, data)
        if spec.strides is None:
            return torch.empty(spec.shape, dtype=dtype).copy_(values)
        for axis in repeated_axes(spec.shape, spec.strides):
            values = values.narrow(axis, 0, 1)
        fresh = torch.empty_strided(values.shape, spec.strides, dtype=dtype)
        return fresh.copy_(values).expand(spec.shape)

    @torch.no_grad()
    def load_in_place(self, live: object, spec: TensorSpec, data: memoryview) -> bool:
        if not isinstance(live, torch.Tensor) or live.dtype != dtype_of(spec.dtype):
            return False
        if tuple(live.shape) != spec.shape:
            return False
        target, values = live.detach(), self.read_array(spec, data)
        repeated = repeated_axes(live.shape, live.stride())
        before = repeated_axes(spec.shape, spec.strides) if spec.strides else []
        if not set(repeated) <= set(before):
            return False  # separate memory would become shared
        for axis in repeated:
            target, values = target.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
        target.copy_(values)
        return True

    def is_alike(self, value: torch.Tensor, spec: TensorSpec) -> bool:
        return (
            type(value) in self.exact_types
            and spec.kind == self.kind
            and value.dtype is getattr(torch, spec.dtype, None)
            and value.shape == spec.shape
        )

    def is_sharded(self, value: object) -> bool:
        return isinstance(value, _sharded_types())

    def check_sharded(self, dtype: str) -> None:
        dtype_of(dtype)
        try:
            self.sharding()
        except (ImportError, AttributeError) as error:  # built without torch.distributed
            raise ValueError(f"this torch has no sharded tensors ({error})") from error

    def sharding(self) -> Sharding:
        from holdfast.torch import shards  # half of torch.distributed comes with it

        return shards

    def receiving(self) -> Any:
        from holdfast.torch import receive

        return receive

    def placement_guard(self, tensors: Sequence[torch.Tensor]) -> modules.TensorPlaces:
        return modules.TensorPlaces(tensors)

    # -- Other values ----------------------------------------------------------------

    def encode_other(self, value: object) -> dict[str, str] | None:
        if isinstance(value, torch.dtype):
            return {"$torch.dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$torch.device": str(value)}
        return None

    def decode_other(self, tag: str, value: str) -> torch.dtype | torch.device:
        try:
            return dtype_of(value) if tag == "$torch.dtype" else torch.device(value)
        except (RuntimeError, TypeError, ValueError) as error:
            raise StateMismatch(
                f"the checkpoint holds a {tag[1:]} {value!r}, which this torch lacks."
            ) from error


ADAPTER = TorchAdapter()


def _sharded_types() -> tuple[type, ...]:
    # A DTensor exists only where its module is loaded; torch 2.4 has it under the second name.
    for name in ("torch.distributed.tensor", "torch.distributed._tensor"):
        found = getattr(sys.modules.get(name), "DTensor", None)
        if found is not None:
            return (found,)
    return ()


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return found


def typed(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if spec.size_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
    return raw.view(dtype_of(spec.dtype)).view(spec.shape)


def repeated_axes(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions along which an expanded tensor shows the same memory: copy_ refuses them."""
    pairs = enumerate(zip(shape, strides, strict=True))
    return [axis for axis, (size, stride) in pairs if size > 1 and stride == 0]


def _device_modules() -> dict[str, Any]:
    modules = {name: getattr(torch, name, None) for name in ("cuda", "xpu", "mps")}
    return {name: each for name, each in modules.items() if each and each.is_available()}
