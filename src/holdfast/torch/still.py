"""Whether many tensors are where they were, and of the same form, asked at once.

To ask each of 100,000 tensors for its address, type, shape and strides takes a quarter of a
second. torch's compiler has the same question before every call, and a quick way to ask it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

_Tensor = torch.Tensor


class Still:
    """Remembers tensors without holding them."""

    @torch.no_grad()  # torch's guards look at requires_grad, but not in here
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._addresses = list(map(_Tensor.data_ptr, tensors))
        self._guards = _guards(tensors) if _guards_see_all() else None
        self._forms = _forms(tensors) if self._guards is None else []

    @torch.no_grad()
    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """Which are at another place than before; None if their forms are no longer the same.

        Where some have moved, nothing is said of the forms.
        """
        try:
            addresses = list(map(_Tensor.data_ptr, tensors))
        except RuntimeError:  # one has no memory of its own any more, as a sparse one
            return None
        if addresses != self._addresses:
            if len(addresses) != len(self._addresses):
                return None
            pairs = enumerate(zip(addresses, self._addresses, strict=True))
            return [index for index, (now, then) in pairs if now != then]
        if self._guards is not None:
            return [] if self._guards.check(*tensors) else None
        return [] if _forms(tensors) == self._forms else None


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    from torch._C._dynamo import guards

    return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _forms(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [
        (t.dtype, t.size(), t.stride(), t.is_neg(), t.is_conj(), t.device, t.layout)
        for t in tensors
    ]


@functools.cache
@torch.no_grad()
def _guards_see_all() -> bool:
    """Whether this torch has the quick way, and it tells apart what has to be."""
    like = torch.zeros(2, 3)
    # A buffer of no gradient, in float: what follows are all the ways to differ.
    others = [
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, device="meta"),
        torch._neg_view(torch.zeros(2, 3)),
    ]
    wave = torch.zeros(2, dtype=torch.complex64)
    try:
        known = _guards([like, wave])
        return bool(known.check(torch.ones(2, 3), wave)) and not any(
            known.check(*pair)
            for pair in [*((other, wave) for other in others), (like, wave.conj())]
        )
    except Exception:  # noqa: BLE001  it is torch's own, and may be another one in any version
        return False
