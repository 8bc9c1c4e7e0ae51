"""Sharded tensors: which part of one is here, and how stored parts make the part wanted now.

A DTensor (FSDP2's `fully_shard`, tensor parallel) is one tensor of which every rank holds a part.
torch's checkpoint planner decides where a part lies in the whole, for one tensor at a time. Nothing
here communicates, so a rank can be captured and restored while the others do something else.

Private parts of torch that are used, and the versions that have them:
    DTensor._local_tensor, ._spec             2.4 … 2.13; to_local() would build a graph
    create_default_local_save_plan            2.4 … 2.13, in __all__ of its module
    torch.distributed._tensor                 2.4, which has DTensor there; public later
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast._adapters.adapter import StoredArray
from holdfast._adapters.numpy import fill_whole
from holdfast.torch.adapter import ADAPTER, dtype_of

try:
    from torch.distributed.tensor import DTensor, Replicate

    _KNOWS_STRIDES = True
except ImportError:  # 2.4
    from torch.distributed._tensor import DTensor, Replicate

    _KNOWS_STRIDES = False

_NAME = "tensor"  # each is planned by itself, so any name does
_MOST_LAYOUTS = 4096


@dataclass(frozen=True)
class Layout:
    """What a rank holds of a tensor that is laid out over a mesh."""

    description: dict[str, Any]  # as it is stored
    sizes: tuple[int, ...]  # of the part
    stores: bool  # False where another rank stores the same part
    mesh: Any  # kept alive, so that its id is not reused


# By dtype, size, placements and the mesh's identity: an equal mesh that is made after a change of
# ranks may give this rank another place.
_layouts: dict[Hashable, Layout] = {}


def shard_of(value: DTensor, *, replicas: bool) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The description of this rank's part, and the part itself; None if it is not stored.

    That is so if it is empty, or if another rank stores the same and `replicas` is False.
    ValueError if it cannot be stored.
    """
    local = value._local_tensor
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        kind = type(local).__name__
        raise ValueError(f"a sharded tensor whose parts are of type {kind} cannot be stored.")
    layout = layout_of(value)
    if tuple(local.shape) != layout.sizes and (local.numel() > 0 or 0 not in layout.sizes):
        # torch describes a part as one box, which some uneven layouts over two mesh dimensions
        # are not.
        raise ValueError(
            f"this rank holds {list(local.shape)} of a sharded tensor {list(value.shape)}, and "
            f"torch.distributed.checkpoint would store {list(layout.sizes)}. Make the sharded "
            "sizes divisible by the sizes of the mesh."
        )
    wanted = (layout.stores or replicas) and local.numel() > 0
    return layout.description, local if wanted else None


def layout_of(value: DTensor) -> Layout:
    """What this rank holds of a tensor; planned once for each layout."""
    spec = value._spec
    key = (value.dtype, value.shape, spec.placements, id(spec.mesh))
    found = _layouts.get(key)
    if found is None:
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        found = _layouts[key] = _plan(value)
    return found


def _plan(value: DTensor) -> Layout:
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    mesh, placements = value.device_mesh, value.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            "a sharded tensor with a Partial placement is a sum that is not yet made; "
            "redistribute it first."
        )
    axes = [placement.dim for placement in placements if hasattr(placement, "dim")]
    if not _KNOWS_STRIDES and len(set(axes)) < len(axes):
        raise ValueError(
            "a dimension that is sharded over two dimensions of the mesh is described wrongly by "
            "this version of torch; it takes 2.5 or newer."
        )
    items = create_default_local_save_plan({_NAME: value}, is_coordinator=False).items
    offsets = sizes = (0,) * value.dim()  # for a rank that is not in the mesh
    for item in items:
        data = item.tensor_data
        assert data is not None
        offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    coordinate = mesh.get_coordinate() or ()
    pairs = zip(placements, coordinate, strict=False)
    description = {
        "size": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "offsets": list(offsets),
        "sizes": list(sizes),
        # Distinguishes tensors of one name on several meshes: stages of a pipeline.
        "mesh": int(mesh.mesh.flatten()[0]),
    }
    return Layout(
        description,
        sizes,
        stores=bool(items) and all(not p.is_replicate() or at == 0 for p, at in pairs),
        mesh=mesh,
    )


# -- Restored --------------------------------------------------------------------


class Entries(dict[Any, Any]):
    """An optimizer's entries for a parameter; a missing entry is sharded like the parameter."""

    def __init__(self, parameter: torch.Tensor, entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self.parameter = parameter

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ARG002  as in dict
        found = super().get(key)
        return Entries(self.parameter, {}) if found is None else found


def load_targets(value: Any) -> Any:
    """The live tensors that say how a stored state is to be sharded."""
    if not isinstance(value, torch.optim.Optimizer):
        return value.state_dict()
    parameters = [parameter for group in value.param_groups for parameter in group["params"]]
    # Numbered as in Optimizer.state_dict. A new optimizer has no state: only its parameters are
    # known.
    entries = (Entries(p, value.state.get(p, {})) for p in parameters)
    return {"state": dict(enumerate(entries))}


@torch.no_grad()
def assemble(
    stored: StoredArray, near: object, path: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A stored tensor, sharded as `near` is, and this rank's part of it in the CPU's memory.

    None if neither is sharded. The part may share the checkpoint's memory, the whole does not.
    """
    size, dtype = stored.description["size"], dtype_of(stored.description["dtype"])
    like = _like(size, dtype, near, was_sharded=not stored.is_whole)
    if like is not None:
        part = _part(stored, layout_of(like).description["offsets"], like, path)
        value = torch.empty_like(like, dtype=dtype)
        assert isinstance(value, DTensor)
        value._local_tensor.copy_(part)
        return value, part
    if stored.is_whole:
        return None
    device = near.device if isinstance(near, torch.Tensor) else None
    whole = torch.empty(size, dtype=dtype, device=device)
    part = _part(stored, [0] * len(size), whole, path)
    return whole.copy_(part), part


def _like(
    size: list[int], dtype: torch.dtype, near: object, *, was_sharded: bool
) -> DTensor | None:
    """A sharded tensor with the layout for a stored one; None if it is not to be sharded."""
    if isinstance(near, DTensor):
        return near if list(near.shape) == size else None
    if not isinstance(near, Entries) or not isinstance(near.parameter, DTensor):
        return None
    parameter = near.parameter
    if list(parameter.shape) == size and (size or was_sharded):
        return parameter
    if not was_sharded:
        return None
    # An entry of another size is replicated, as torch makes it.
    mesh = parameter.device_mesh
    whole = torch.empty(size, dtype=dtype, device=parameter._local_tensor.device)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _part(stored: StoredArray, offsets: list[int], like: torch.Tensor, path: str) -> torch.Tensor:
    """The values of the part of `like` that is here, on the CPU."""
    sizes = like._local_tensor.shape if isinstance(like, DTensor) else like.shape
    if stored.own is not None:
        described = stored.own.description
        if (described["offsets"], described["sizes"]) == (offsets, list(sizes)):
            return ADAPTER.read_array(stored.own.spec, stored.own.data)
    target = torch.empty(sizes, dtype=dtype_of(stored.description["dtype"]))
    if target.numel() > 0:
        # Bytes are moved: NumPy lacks some types. A tensor of the same name on another mesh is
        # another tensor.
        mesh, item = stored.description.get("mesh"), f"V{target.element_size()}"
        boxes = (
            ((tuple(about["offsets"]), tuple(about["sizes"])), part.data)
            for part in stored.parts()
            if (about := part.description).get("mesh") == mesh
        )
        parts = ((box, np.frombuffer(data, item).reshape(box[1])) for box, data in boxes)
        whole = np.frombuffer(ADAPTER.bytes_of(target), item).reshape(tuple(sizes))
        fill_whole(whole, (tuple(offsets), tuple(sizes)), parts, path)
    return target


@torch.no_grad()
def load_in_place(live: object, value: torch.Tensor) -> bool:
    """Copy what was assembled like `live` into it."""
    if not isinstance(value, DTensor):
        whole = ADAPTER.bytes_of(value)
        return ADAPTER.load_in_place(live, ADAPTER.spec("", value), whole)
    if not isinstance(live, DTensor) or live.dtype != value.dtype:
        return False
    live._local_tensor.copy_(value._local_tensor)
    return True
