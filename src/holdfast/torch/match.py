"""States of other libraries, matched with live modules and optimizers.

The result is a state as the objects themselves would give it, with the stored values in it. Nothing
is changed here: what does not fit is only recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from holdfast._adapters.adapter import Unfit
from holdfast.torch.adapter import ADAPTER

# Prefixes of wrappers in the names of parameters.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
# Entries of torch's optimizers that have the shape of the parameter.
_FOR_EACH_VALUE = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "prev",
    }
)


def is_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module)


def is_known(value: object) -> bool:
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer)


def plain_name(name: str) -> str:
    """The name of a parameter without the prefixes of DDP, FSDP and torch.compile."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def module_state(
    module: Any,
    stored: Mapping[str, Any],
    path: str,
    unfit: Unfit,
    known: dict[Any, Any],
    array: Callable[[Any, Any, Any, str], Any],
) -> Any:
    """The state of a module with the stored values: its names, its order, its tied weights.

    `known` has the stored value of each live tensor so far, and `array` compares one with its live
    tensor.
    """
    live = module.state_dict()
    by_name = dict(stored)
    if not live.keys() & by_name.keys():  # only one of the two was wrapped
        by_name = {plain_name(name): value for name, value in stored.items()}
    names = {name: name if name in by_name else plain_name(name) for name in live}
    places = {name: _place(now) for name, now in live.items()}
    # The stored value of each live tensor first: files may have tied weights only once.
    for name, place in places.items():
        if place is not None and isinstance(then := by_name.get(names[name]), torch.Tensor):
            known.setdefault(place, then)
    made = OrderedDict()
    for name, now in live.items():
        if names[name] in by_name:
            then = by_name[names[name]]
        elif places[name] in known:
            then = known[places[name]]
        else:
            unfit.missing.append(f"{path}.{name}")
            continue
        is_tensor = isinstance(now, torch.Tensor)
        made[name] = array(ADAPTER, now, then, f"{path}.{name}") if is_tensor else then
    used = set(names.values())
    unfit.unexpected += [f"{path}.{name}" for name in by_name if name not in used]
    versions = getattr(stored, "_metadata", None) or getattr(live, "_metadata", None)
    if versions is not None:
        made._metadata = versions  # type: ignore[attr-defined]  # torch keeps versions there
    return made


def _place(now: Any) -> Hashable | None:
    """Equal for two names of one tensor; None if that is not known."""
    is_plain = isinstance(now, torch.Tensor) and not ADAPTER.is_sharded(now)
    return ADAPTER.alias_key(now) if is_plain else None


# -- optimizers ------------------------------------------------------------------------


def optimizer_state(
    optimizer: Any, stored: Mapping[str, Any], names: Mapping[int, str], path: str, unfit: Unfit
) -> Any:
    """The state of an optimizer as load_state_dict takes it: parameters by their numbers.

    `names` has those of parameters, by their identity: torch.distributed.checkpoint stores these.
    """
    groups, entries = stored.get("param_groups"), stored.get("state", {})
    if not isinstance(groups, list) or not isinstance(entries, Mapping):
        unfit.changed.append(f"{path} (the checkpoint has no state of an optimizer for it)")
        return dict(stored)
    live = [group["params"] for group in optimizer.param_groups]
    then = "+".join(str(len(group.get("params", ()))) for group in groups) or "none"
    now = "+".join(str(len(group)) for group in live) or "none"
    if then != now:
        unfit.changed.append(f"{path} (groups of parameters: {then} → {now})")
        return dict(stored)
    numbers: dict[Any, int] = {}
    parameters: list[Any] = [parameter for group in live for parameter in group]
    made_groups = []
    for group, ours in zip(groups, live, strict=True):
        taken = _in_our_order(list(group["params"]), ours, names)
        start = len(numbers)
        numbers.update({key: start + at for at, key in enumerate(taken)})
        made_groups.append({**group, "params": list(range(start, start + len(taken)))})
    made = {}
    for key, entry in entries.items():
        # DCP has the numbers as strings.
        plain = int(key) if isinstance(key, str) and key.isdigit() else key
        number = numbers.get(key, numbers.get(plain))
        if number is None:
            made[key] = entry  # not of a parameter
            continue
        made[number] = entry
        _check_entry(f"{path}.state.{number}", entry, parameters[number], unfit)
    in_order = {number: made.pop(number) for number in range(len(parameters)) if number in made}
    return {**stored, "state": {**in_order, **made}, "param_groups": made_groups}


def _in_our_order(stored: list[Any], ours: list[Any], names: Mapping[int, str]) -> list[Any]:
    """The keys of a stored group in the order of the live parameters, if they are names."""
    if not all(isinstance(key, str) and not key.isdigit() for key in stored):
        return stored
    plain = {plain_name(key): key for key in stored}
    wanted = [plain_name(names.get(id(parameter), "")) for parameter in ours]
    return [plain[name] for name in wanted] if set(wanted) == plain.keys() else stored


def _check_entry(path: str, entry: Any, parameter: torch.Tensor, unfit: Unfit) -> None:
    if not isinstance(entry, Mapping):
        return
    for name, value in entry.items():
        if name in _FOR_EACH_VALUE and isinstance(value, torch.Tensor):
            then, now = list(value.shape), list(parameter.shape)
            if then != now:
                unfit.changed.append(f"{path}.{name} ({then} → {now})")


def names_of_parameters(values: list[Any]) -> dict[int, str]:
    """The name of each parameter of these modules, by its identity."""
    found: dict[int, str] = {}
    for module in values:
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), name)
    return found


def number_like(number: float, live: torch.Tensor) -> torch.Tensor | None:
    """A number as a tensor of the type of another; None if that type cannot hold it."""
    made = torch.tensor(number, dtype=live.dtype)
    return made if made.item() == number else None
