"""The contract between holdfast and a framework.

Each framework has one object of a class derived from `Adapter`, and `registry.py` finds it. It
handles arrays and other values, its `objects` modules and optimizers, its `generators` random
generators. An adapter
that is not complete is refused where its class is defined. The key in `registry.py`, the name under
which the framework is imported and `Adapter.kind` are the same word. It has no dot, and the module
of that name has a `__version__` once it is imported. If it has none, name the one that has it in
`registry._is_loaded`: otherwise the adapter is never asked, and no error says so.
Standard library only: this module is loaded where there is no framework at all.
"""

# ruff: noqa: ARG002  a default has no use for its arguments

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from holdfast._store.format.image import TensorSpec

if TYPE_CHECKING:
    from holdfast._store.read.verify import StoredShard

Places = Sequence[tuple[TensorSpec, int]]  # tensors, and where each begins in a slot


# An adapter that overrides the method on the left must override those on the right, too: they have
# no default.
_NEEDS = {
    "is_array": (
        *("alias_key", "spec", "item_bytes", "bytes_of"),
        *("new_array", "destinations", "copy_all"),
    ),
    "exact_types": ("placement_guard", "receiving"),
    "copies_by_itself": ("device_copies",),
    "is_sharded": ("check_sharded", "sharding"),
    "is_node": ("node_parts", "node_from"),
    "encode_other": ("decode_other",),
    "is_object": ("object_state", "load_object"),
    "is_generator": ("generator_state", "restore_generator", "reseed", "is_global"),
    "is_global": ("global_state", "set_global_state", "seed_global"),
    "states": ("restore_states",),
}


def has_state(value: object) -> bool:
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods))


class _Part:
    """Methods with defaults; a default means that the framework has nothing of the kind."""

    def __init_subclass__(cls) -> None:
        [part] = [each for each in cls.__mro__ if _Part in each.__bases__]
        own = () if cls is part else [name for name in vars(cls) if not name.startswith("_")]
        for name in own:
            # A misspelt method would leave its default in place, a missing one raise in a run.
            if not hasattr(part, name):
                raise TypeError(f"{cls.__name__} has {name}, which {part.__name__} lacks")
            for needed in _NEEDS.get(name, ()):
                if getattr(cls, needed) is getattr(part, needed):
                    raise TypeError(f"{cls.__name__} has {name} and lacks {needed}")


class Objects(_Part):
    """The objects of a framework that have a state: modules, optimizers.

    Never asked about a dict, list or tuple or a subclass of them: those are taken apart.
    """

    def overrides_state_dict(self, value: object) -> bool:
        """Whether the adapter knows a better state of an object than its own state_dict()."""
        return False

    def is_object(self, value: object) -> bool:
        """Whether `object_state` knows the state of an object."""
        return False

    def object_state(self, value: Any) -> Any:
        raise NotImplementedError

    def load_object(self, value: Any, state: Any) -> None:
        raise NotImplementedError

    def object_parts(self, value: object) -> dict[str, Any] | None:
        """The parts by name, if the object's state is exactly their states; otherwise None."""
        return None

    def refuse(self, value: object) -> str | None:
        """Why an object cannot be stored, if there is more to say than its type."""
        return None

    def flat_state(self, value: object) -> tuple[list[Any], list[Any]] | None:
        """The form of an object's state_dict() and its tensors, without making one."""
        return None

    def strict_tensors(self, value: object) -> dict[str, Any] | None:
        """The tensors that a stored state must match name by name; None if any state may fit."""
        return None

    def copies_what_it_loads(self, value: object) -> bool:
        """Whether loading only copies from the tensors that the object is given."""
        return False

    def copied_into(self, value: object) -> dict[str, Any] | None:
        """The tensors of an object by their stored names, if loading is to copy into them.

        Only if all of the object's state is in them, its loading does nothing else, and the bytes
        of each are in this process, in C order.
        """
        return None

    def loads_exactly(self, value: object) -> bool:
        """Whether loading runs code of the framework alone, which keeps tensors as they are."""
        return False

    def after_load(self, value: object, stored: Any) -> None:
        """Undo what loading has changed in the stored state."""

    def load_targets(self, value: object) -> Any:
        """What is now where an object's stored state will go, if any of it may be sharded."""
        return None


class Generators(_Part):
    """The random generators of a framework."""

    global_generator: str = "python"  # the key in `states`; set it with `seed_global`

    def is_generator(self, value: object) -> bool:
        return False

    def generator_state(self, value: Any) -> Any:
        raise NotImplementedError

    def restore_generator(self, value: Any, state: Any) -> None:
        raise NotImplementedError

    def reseed(self, value: Any, seed: int) -> None:
        """Seed a generator that an object holds."""
        raise NotImplementedError

    def is_global(self, value: object) -> bool:
        """Whether a generator is the one behind the framework's own functions."""
        return False

    def global_state(self) -> Any:
        """The state of the global generator, for this process only."""
        return None

    def set_global_state(self, state: Any) -> None:
        """Restore what `global_state` returned."""

    def seed_global(self, seed: int) -> None:
        """Seed the global generator."""

    def states(self, *, devices: bool) -> dict[str, Any]:
        """The states of all global generators to be stored; those of devices if asked for.

        Each key is the adapter's `kind`, or begins with it and a dot.
        """
        return {}

    def restore_states(self, states: Mapping[str, Any]) -> list[str]:
        """Restore what `states` returned; returns what could not be restored."""
        return []


class Adapter(_Part):
    """What one framework can do; arguments of type Any are values of that framework."""

    kind = ""  # of its tensors, as checkpoints name it
    has_own_arrays = True  # False if its arrays are those of another adapter
    objects = Objects()
    generators = Generators()
    exact_types: tuple[type, ...] = ()  # objects of these very classes are plain tensors
    arrays_are_values = False  # True if an array never changes: a step makes new ones

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.kind:
            raise TypeError(f"{cls.__name__} has no kind")
        if cls.has_own_arrays and cls.is_array is Adapter.is_array:
            raise TypeError(f"{cls.__name__} lacks is_array")

    # -- Arrays: described and read -------------------------------------------------

    def is_array(self, value: object) -> bool:
        return False

    def alias_key(self, value: Any) -> Hashable | None:
        """A key that is equal for two names of the same memory with the same layout (tied weights).

        It contains everything that `spec` depends on. None if the array is never shared.
        """
        raise NotImplementedError

    def spec(self, name: str, value: Any) -> TensorSpec:
        """The description of an array; ValueError if it cannot be stored."""
        raise NotImplementedError

    def item_bytes(self, dtype: str) -> int:
        """The size of one item; ValueError if this installation lacks the type."""
        raise NotImplementedError

    def bytes_of(self, value: Any) -> memoryview:
        """An array's bytes in C order, in the memory of the host."""
        raise NotImplementedError

    def part_here(self, value: Any) -> Any:
        """The part of a sharded array that this rank holds; any other array itself."""
        return value

    def placement_guard(self, tensors: Sequence[Any]) -> Any:
        """Finds out later whether tensors of `exact_types` have moved: torch/modules.py."""
        raise NotImplementedError

    def raw_address(self, value: Any) -> int:
        """Where an array's bytes are in C order, if they are in this process; else 0."""
        return 0

    # -- Arrays: copied into the slots of an arena ----------------------------------

    def destinations(self, buffer: Any, places: Places, start: int) -> Sequence[Any]:
        """Views of the mapping for each array, made once and used for every snapshot."""
        raise NotImplementedError

    def copy_all(self, targets: Sequence[Any], values: Sequence[Any]) -> None:
        """Copy live arrays into their destinations; returns when the values are there."""
        raise NotImplementedError

    def is_frozen(self, value: Any) -> bool:
        """Whether a tensor probably never changes; it is compared at each snapshot."""
        return False

    def copies_by_itself(self, spec: TensorSpec) -> bool:
        """Whether a tensor is on a device that copies while training goes on."""
        return False

    def device_copies(self, buffer: Any, places: Places, slots: Sequence[int]) -> Any:
        """Copies such tensors into the slots of an arena."""
        raise NotImplementedError

    # -- Arrays: restored -----------------------------------------------------------

    def read_array(self, spec: TensorSpec, data: memoryview) -> Any:
        """An array to copy from; it may share the memory of `data`."""
        return self.new_array(spec, data)

    def new_array(self, spec: TensorSpec, data: memoryview) -> Any:
        """A new array with the stored values, where it was if that place exists."""
        raise NotImplementedError

    def load_in_place(self, live: object, spec: TensorSpec, data: memoryview) -> bool:
        """Copy stored values into a live array; False if it cannot hold them."""
        return False

    def made_like(self, spec: TensorSpec, data: memoryview, near: object) -> Any:
        """A new array placed as `near` is; None if the place of the stored one decides.

        Called only for the kinds that `_state/restore.py` names: today JAX.
        """
        return None

    def holds_array(self, value: object) -> bool:
        """Whether a stored array can be put into it, and it is more than that: a tf.Variable."""
        return False

    def is_alike(self, value: Any, spec: TensorSpec) -> bool:
        """Whether an array surely has the type and size of a stored one; a quick first look."""
        return False

    def takes_size(self, value: object, size: list[int]) -> bool:
        """Whether a variable was made for values of several sizes, and this is one of them."""
        return False

    def receiving(self) -> Any:
        """Restores by all cores, and onto devices: torch/receive.py."""
        raise NotImplementedError

    # -- Sharded arrays -------------------------------------------------------------

    def is_sharded(self, value: object) -> bool:
        """Whether an array is in parts on several ranks, and this rank holds its own."""
        return False

    def check_sharded(self, dtype: str) -> None:
        """ValueError if a stored sharded array of this type cannot be assembled here."""
        raise ValueError(f"{self.kind} has no sharded arrays of type {dtype}")

    def sharding(self) -> Sharding:
        """Imported where it is needed: it may load much of a framework."""
        raise NotImplementedError

    # -- Values made of parts, and other values --------------------------------------

    def is_node(self, value: object) -> bool:
        """Whether a value is made of parts, and made again to change (a JAX pytree)."""
        return False

    def node_parts(self, value: Any) -> dict[str, Any]:
        raise NotImplementedError

    def node_from(self, live: Any, parts: Mapping[str, Any]) -> Any:
        """The same node with other parts."""
        raise NotImplementedError

    def same_form(self, then: Any, now: Any) -> bool:
        """Whether a value can be stored as the one before it was."""
        return False

    def has_arrays(self, value: Any) -> bool:
        """Whether any part of a value is an array that never changes."""
        return False

    def encode_other(self, value: object) -> dict[str, Any] | None:
        """A value of the framework as JSON, under a tag of its own; None for any other value."""
        return None

    def decode_other(self, tag: str, value: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class StoredArray:
    """An array as a checkpoint has it: in parts, or whole, which is a single part."""

    description: dict[str, Any]  # of the part that this rank stored, or would have
    own: StoredShard | None  # that part, if it stored one
    parts: Callable[[], Sequence[StoredShard]]  # those of all ranks: read only if needed
    is_whole: bool


class Sharding(Protocol):
    """Sharded arrays; nothing here communicates, so that each rank works by itself."""

    def shard_of(self, value: Any, *, replicas: bool) -> tuple[dict[str, Any], Any]:
        """How this rank's part is described, and the part itself; None if it stores none.

        With `replicas`, parts that another rank stores are returned too.
        """

    def assemble(self, stored: StoredArray, near: object, path: str) -> tuple[Any, Any] | None:
        """A stored array sharded as `near` is, and the part that is here; None if neither is."""

    def load_in_place(self, live: object, value: Any) -> bool:
        """Copy what was assembled like `live` into it."""


@dataclass
class Unfit:
    """What of a stored state does not fit the live objects."""

    missing: list[str] = field(default_factory=list)  # only here
    unexpected: list[str] = field(default_factory=list)  # only in the checkpoint
    changed: list[str] = field(default_factory=list)
