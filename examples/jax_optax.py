"""JAX: a small network trained with optax, on as many devices as there are.

    python examples/jax_optax.py

State is a value in JAX: after each step `run.update(...)` hands the new one over, and after a
resume the script takes it from `run.state`. The step gives its old buffers away (donates them),
which a snapshot survives. Press Ctrl-C, or kill it with -9 from another terminal, and start the
same command again: however often you interrupt it, it ends with the same hash of the weights.
"""

import argparse
import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast

BATCH, DROPOUT = 64, 0.1
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


class Training(NamedTuple):
    params: Any
    opt_state: Any
    key: Any  # of the dropout


class Batches:
    """Points of two spirals, shuffled anew for every epoch."""

    def __init__(self, size: int, sharding: NamedSharding) -> None:
        angle = np.sqrt(np.random.default_rng(0).random(size)) * 3 * np.pi
        self.label = np.arange(size) % 2
        turned = np.exp(1j * (angle + np.pi * self.label)) * angle / 10
        self.point = np.stack([turned.real, turned.imag], axis=1).astype(np.float32)
        self.sharding = sharding

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(len(self.label))  # holdfast keeps NumPy's generator
        for chosen in np.split(order, len(order) // BATCH):
            yield jax.device_put((self.point[chosen], self.label[chosen]), self.sharding)


def init(key: jax.Array, sizes: tuple[int, ...] = (2, 64, 64, 2)) -> Training:
    key, *keys = jax.random.split(key, len(sizes))
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    params = [(jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b)) for k, a, b in pairs]
    return Training(params, optimizer.init(params), key)


def loss_of(params: Any, key: Any, points: Any, labels: Any) -> Any:
    for number, (weight, bias) in enumerate(params[:-1]):
        points = jax.nn.relu(points @ weight + bias)
        kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - DROPOUT, points.shape)
        points = jnp.where(kept, points / (1 - DROPOUT), 0)
    logits = points @ params[-1][0] + params[-1][1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@partial(jax.jit, donate_argnums=0)
def step(training: Training, points: Any, labels: Any) -> tuple[Training, Any]:
    key, used = jax.random.split(training.key)
    loss, grads = jax.value_and_grad(loss_of)(training.params, used, points, labels)
    updates, opt_state = optimizer.update(grads, training.opt_state, training.params)
    return Training(optax.apply_updates(training.params, updates), opt_state, key), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/jax_optax", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--size", type=int, default=4096, help="points: a multiple of 64")
    options = parser.parse_args()

    np.random.seed(0)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    batches = Batches(options.size, sharding)
    with holdfast.Run(options.folder, training=init(jax.random.key(0))) as run:
        training = run.state["training"]
        for _ in run.epochs(options.epochs):
            for points, labels in run.batches(batches):
                training, loss = step(training, points, labels)
                run.update(training=training)
                run.log(loss=loss)

    loss = loss_of(training.params, training.key, batches.point, batches.label)
    values = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(training.params))
    print(f"loss {float(loss):.3f}, weights {hashlib.sha256(values).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
