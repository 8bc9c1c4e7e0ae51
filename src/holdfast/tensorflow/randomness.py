"""TensorFlow's random numbers: the global seed, and generators.

After `tf.random.set_seed` every eager op without a seed of its own draws one, from a Python
generator in the context. The op's kernel counts its draws, and is cached for the next op with the
same seed: so when seeds are drawn again, the kernels must be new too.

Random ops inside a tf.function count only in their kernels, which cannot be read.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops

from holdfast._text import say
from holdfast.tensorflow import distribute

# Other ops that count in their kernel have "Random" in their names.
_DRAW_TOO = frozenset({"Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal"})
_CLEAR_TOO = frozenset({"AnonymousRandomSeedGenerator", "RngReadAndSkip"})
# These take their seeds as arguments, or count in a variable or an iterator.
_ARE_READABLE = ("Stateless", "Stateful")
_EAGER = "__wrapped__"  # the context's prefix for an op that was called eagerly

_examined: set[str] = set()
_drawing: list[str] = []  # functions with random ops that cannot be restored


def is_generator(value: object) -> bool:
    return isinstance(value, tf.random.Generator)


def generator_state(value: Any) -> dict[str, Any]:
    return {"algorithm": int(value.algorithm), "state": distribute.first(value.state).numpy()}


def restore_generator(value: Any, state: Mapping[str, Any]) -> None:
    if int(value.algorithm) != state["algorithm"]:
        raise ValueError(f"its algorithm is {value.algorithm}, and was {state['algorithm']}")
    if tuple(value.state.shape) != state["state"].shape:
        raise ValueError(f"its state has {value.state.shape}, and had {state['state'].shape}")
    distribute.assign(value.state, tf.constant(state["state"]))


def global_generator() -> Any:
    """The generator that TensorFlow gives to code that asks for any; None if there is none yet."""
    # Asking TensorFlow itself would make one.
    return stateful_random_ops.global_generator


def global_state() -> Any:
    """The seed, and the state of the generator of op seeds."""
    held = context.context()
    if held._seed is None:
        return None
    return held._seed, held._rng.getstate()


def set_global_state(state: Any) -> None:
    held = context.context()
    if state is None:
        held._seed = None
        return
    held._seed = state[0]
    held._rng = random.Random()
    held._rng.setstate(state[1])


def seed_global(seed: int) -> None:
    """Seed what eager ops draw, unless the script has set no seed."""
    held = context.context()
    if held._seed is not None:
        held._seed = seed & 0x7FFFFFFF
        held._rng = random.Random(held._seed)


def generators() -> dict[str, Any]:
    states: dict[str, Any] = {"tensorflow": None}
    now = global_state()
    if now is not None:
        seed, (version, words, gauss) = now
        states["tensorflow"] = (seed, version, struct.pack(f"<{len(words)}I", *words), gauss)
    if global_generator() is not None:
        states["tensorflow.generator"] = generator_state(global_generator())
    find_hidden_draws()
    return states


def restore_generators(states: Mapping[str, Any]) -> list[str]:
    """Restore the global seed and generator; returns what could not be restored."""
    then = states.get("tensorflow")
    if then is not None:
        seed, version, packed, gauss = then
        then = (seed, (version, struct.unpack(f"<{len(packed) // 4}I", packed), gauss))
    if then != global_state():
        set_global_state(then)
        if not _drawing:  # these would restart their sequences each time
            context.context().clear_kernel_cache()
    return _restore_global_generator(states.get("tensorflow.generator"))


def _restore_global_generator(state: Mapping[str, Any] | None) -> list[str]:
    if state is None:
        return []
    if global_generator() is None:
        fresh = tf.random.Generator.from_state(state["state"], state["algorithm"])
        tf.random.set_global_generator(fresh)
        return []
    try:
        # In place: a tf.function may have captured it.
        restore_generator(global_generator(), state)
    except ValueError as error:
        return [f"TensorFlow's global generator ({error})"]
    return []


def is_hidden_draw(op: str) -> bool:
    """Whether an op draws random numbers and counts them in its kernel."""
    if op.startswith(_ARE_READABLE) or op in _CLEAR_TOO or "Dataset" in op:
        return False
    return "Random" in op or op in _DRAW_TOO


def hidden_draws(nodes: Iterable[Any]) -> list[str]:
    """Such ops among the nodes of a graph."""
    return sorted({node.op for node in nodes if is_hidden_draw(node.op)})


def find_hidden_draws() -> None:
    """Find tf.functions whose draws differ after a restart; the first one is reported."""
    if not context.executing_eagerly():
        return
    held = context.context()
    if not held._initialized:
        return
    for name in held.list_function_names() - _examined:
        _examined.add(name)
        if name.startswith(_EAGER) or "_Dataset_" in name:  # a feed examines those of its data
            continue
        ops = hidden_draws(held.get_function_def(name).node_def)
        if ops:
            _drawing.append(name)
            if len(_drawing) == 1:
                say(
                    f"a tf.function draws random numbers by {', '.join(ops)}, whose count nobody "
                    f"can read ({plain_name(name)}): after a restart they start over, so the run "
                    "does not go on to the same bits.\n"
                    "To be exact, draw from a tf.random.Generator that is part of the state, or "
                    "by tf.random.stateless_… and Keras layers, which keep their seeds."
                )


def plain_name(name: str) -> str:
    """A function's name in the script: __inference_step_517 is step.

    >>> plain_name("__inference_step_517")
    'step'
    """
    bare = name.removeprefix("__inference_").removeprefix("__forward_")
    bare = bare.removeprefix("__backward_")
    head, _, number = bare.rpartition("_")
    return head if head and number.isdigit() else bare
