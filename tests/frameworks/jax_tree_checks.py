"""What holds for pytrees and for objects of flax.nnx. Started by jax_support.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax
import flax.linen
import flax.struct
import flax.training.train_state
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax_support import assert_same, bits, emptied, refused, restore, round_trip

import holdfast

# -- pytrees --------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    weights: Any
    label: str = dataclasses.field(default="a", metadata={"static": True})


@flax.struct.dataclass
class Struct:
    weights: Any
    rate: float = flax.struct.field(pytree_node=False, default=0.1)


class Unnamed:
    """A node that was registered without names for its parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


jax.tree_util.register_pytree_node(Unnamed, lambda u: (u.parts, None), lambda _, p: Unnamed(*p))


def linen_state() -> Any:
    model = flax.linen.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))
    return flax.training.train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adamw(1e-3)
    )


def check_nodes_of_every_kind_come_back(folder: Path) -> None:
    params = {"w": jnp.arange(3.0), "b": [jnp.ones(1), (jnp.ones(2), None)]}
    transforms = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-3, 10))
    )
    train = linen_state()
    train = train.apply_gradients(grads=jax.tree.map(jnp.ones_like, train.params))
    saved = {
        "named": Pair(jnp.ones(2), {"x": jnp.zeros(1)}),
        "registered": Registered(jnp.arange(2.0)),
        "struct": Struct({"k": jnp.arange(2.0)}),
        "frozen": flax.core.freeze({"layer": {"kernel": jnp.ones((2, 2))}}),
        "unnamed": Unnamed(jnp.ones(1), jnp.zeros(2)),
        "partial": jax.tree_util.Partial(jnp.add, jnp.ones(2)),
        "optax": transforms.update(params, transforms.init(params), params)[1],
        "many": optax.multi_transform(
            {"a": optax.sgd(0.1, momentum=0.9), "b": optax.lion(0.1)}, {"w": "a", "b": "b"}
        ).init(params),
        "train": train,
        "numbers": flax.core.freeze({"epoch": 3, "name": "a"}),
    }
    fresh = emptied(saved)
    now = round_trip(folder, saved, fresh)
    assert_same(now, saved)
    assert now["train"].apply_fn is train.apply_fn or now["train"].apply_fn == train.apply_fn
    assert type(now["optax"][1][0]).__name__ == "ScaleByAdamState"


def check_an_equinox_module_keeps_its_functions(folder: Path) -> None:
    def made(seed: int) -> Any:
        return eqx.nn.MLP(2, 2, 2, 1, activation=jnp.tanh, key=jax.random.key(seed))

    saved, fresh = made(1), made(2)
    now = round_trip(folder, saved, fresh)
    x = jnp.ones(2)
    assert bits(now(x)) == bits(saved(x)) != bits(fresh(x))
    assert now.activation is fresh.activation


def check_nnx_generators_alone_are_saved_and_nothing_is_drawn_from_them(folder: Path) -> None:
    def draw(folder: Path, steps: int) -> list[Any]:
        rngs, drawn = nnx.Rngs(3), []
        with holdfast.Run(folder, rngs=rngs) as run:
            for _ in run.steps(steps):
                drawn.append(bits(rngs()))
        return drawn

    plain = nnx.Rngs(3)
    expected = [bits(plain()) for _ in range(6)]
    assert draw(folder, 3) == expected[:3]
    assert draw(folder, 6) == expected[3:]


def check_nnx_objects_change_in_place(folder: Path) -> None:
    class Net(nnx.Module):
        def __init__(self, seed: int) -> None:
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(2, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)])
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.layers[1](self.drop(self.layers[0](x)))

    def made(seed: int) -> tuple[Any, Any]:
        net = Net(seed)
        return net, nnx.Optimizer(net, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        optimizer.update(net, grads)
        return loss

    x = jax.random.normal(jax.random.key(1), (8, 2))

    def train(folder: Path, seed: int, steps: int) -> Any:
        net, optimizer = made(seed)
        with holdfast.Run(folder, net=net, optimizer=optimizer) as run:
            for _ in run.steps(steps):
                loss = step(net, optimizer, x)
        return [*map(bits, jax.tree.leaves((net, optimizer))), bits(loss)]

    expected = train(folder / "whole", 0, 6)
    train(folder / "cut", 0, 3)
    assert train(folder / "cut", 9, 6) == expected
    net, optimizer = made(0)
    net.layers[0] = nnx.Linear(2, 5, rngs=nnx.Rngs(0))
    with refused(holdfast.StateMismatch, r"net.layers.0.kernel \(float32 \[2, 4\] → "):
        restore(folder / "cut", net=net, optimizer=optimizer)
    split = nnx.state(made(3)[0])
    assert_same(round_trip(folder / "split", split, nnx.state(made(4)[0])), nnx.state(made(3)[0]))
